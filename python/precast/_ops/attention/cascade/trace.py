# SPDX-License-Identifier: Apache-2.0
"""The traces of merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from precast.trace import Const, Tensor, TraceTemplate, Var, dispatch


def merge_trace(
    name: str,
    description: str,
    reference: Callable[..., Any],
    states: Sequence[tuple[str, str]],
    dims: Sequence[str] = (),
    in_place: bool = False,
    has_mask: bool = False,
) -> TraceTemplate:
    """Make the template of a merge of states, each an argument ``v`` and one ``s``.

    ``dims`` are axes of states between tokens and heads.
    """
    axes: dict[str, Var | Const] = {"num_tokens": Var(), **{dim: Var() for dim in dims}}
    axes |= {"num_heads": Const("h"), "head_dim": Const("d")}
    base = "Base 2."
    inputs = {}
    for v, s in states:
        inputs[v] = Tensor([*axes])
        inputs[s] = Tensor([*axes][:-1], dtype="float32", description=base)
    if has_mask:
        inputs["mask"] = Tensor(["num_tokens"], dtype="bool", description="False: left as it is.")
    merged = ["num_tokens", "num_heads", "head_dim"]
    v, s = states[0]
    return TraceTemplate(
        op_type="cascade_merge",
        name_prefix=name,
        description=description,
        axes=axes,
        inputs=inputs,
        outputs={
            "v_merged": Tensor(merged, v if in_place else None, dtype_from=v),
            "s_merged": Tensor(
                merged[:-1], s if in_place else None, dtype="float32", description=base
            ),
        },
        reference=reference,
    )


def in_place_trace(
    name: str, description: str, reference: Callable[..., Any], states: Sequence[tuple[str, str]]
) -> Callable[..., TraceTemplate]:
    """Make the templates of a merge into the first state, with a mask and without."""
    merges_all = merge_trace(name, f"{description}.", reference, states, in_place=True)
    description += ", where a mask says so."
    masked = merge_trace(
        f"{name}_mask", description, reference, states, in_place=True, has_mask=True
    )

    @dispatch(merges_all, masked)
    def choose(mask: object = None, **others: object) -> TraceTemplate:
        return merges_all if mask is None else masked

    return choose
