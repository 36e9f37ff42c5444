# SPDX-License-Identifier: Apache-2.0
"""The traces of merges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from precast.trace import Const, Tensor, TraceTemplate, Var, dispatch

Reference: TypeAlias = "Callable[..., Any]"

_AXES: dict[str, Var | Const] = {
    "num_tokens": Var(),
    "num_heads": Const("h"),
    "head_dim": Const("d"),
}
_V = ["num_tokens", "num_heads", "head_dim"]
_S = ["num_tokens", "num_heads"]
_LSE = "Base 2."


def pair_trace(reference: Reference) -> TraceTemplate:
    """Of two states."""
    return TraceTemplate(
        op_type="cascade_merge",
        name_prefix="merge_state",
        description="Attention over two parts of the keys, put together.",
        axes=_AXES,
        inputs={
            "v_a": Tensor(_V),
            "s_a": Tensor(_S, dtype="float32", description=_LSE),
            "v_b": Tensor(_V),
            "s_b": Tensor(_S, dtype="float32", description=_LSE),
        },
        outputs={
            "v_merged": Tensor(_V, dtype_from="v_a"),
            "s_merged": Tensor(_S, dtype="float32", description=_LSE),
        },
        reference=reference,
    )


def _in_place(reference: Reference, has_mask: bool) -> TraceTemplate:
    mask = {"mask": Tensor(["num_tokens"], dtype="bool", description="False: left as it is.")}
    return TraceTemplate(
        op_type="cascade_merge",
        name_prefix="merge_state_in_place" + "_mask" * has_mask,
        description="Attention over two parts of the keys, put together in place of the first"
        + (", where a mask says so." if has_mask else "."),
        axes=_AXES,
        inputs={
            "v": Tensor(_V),
            "s": Tensor(_S, dtype="float32", description=_LSE),
            "v_other": Tensor(_V),
            "s_other": Tensor(_S, dtype="float32", description=_LSE),
            **(mask if has_mask else {}),
        },
        outputs={
            "v_merged": Tensor(_V, dtype_from="v", param="v"),
            "s_merged": Tensor(_S, dtype="float32", param="s", description=_LSE),
        },
        reference=reference,
    )


def in_place_trace(reference: Reference) -> Callable[..., TraceTemplate]:
    """Of a state that another goes into: with a mask, or without."""
    merges_all, masked = _in_place(reference, False), _in_place(reference, True)

    @dispatch(merges_all, masked)
    def choose(mask: object = None, **others: object) -> TraceTemplate:
        return merges_all if mask is None else masked

    return choose


def states_trace(reference: Reference) -> TraceTemplate:
    """Of any number of states."""
    return TraceTemplate(
        op_type="cascade_merge",
        name_prefix="merge_states",
        description="Attention over parts of the keys, put together.",
        axes={"num_tokens": Var(), "num_states": Var(), **_AXES},
        inputs={
            "v": Tensor(["num_tokens", "num_states", "num_heads", "head_dim"]),
            "s": Tensor(
                ["num_tokens", "num_states", "num_heads"], dtype="float32", description=_LSE
            ),
        },
        outputs={
            "v_merged": Tensor(_V, dtype_from="v"),
            "s_merged": Tensor(_S, dtype="float32", description=_LSE),
        },
        reference=reference,
    )
