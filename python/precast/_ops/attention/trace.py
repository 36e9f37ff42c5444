# SPDX-License-Identifier: Apache-2.0
"""Trace templates of one request: what decode and prefill of it share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

_SCALARS = {
    "sm_scale": Scalar("float32"),
    "window_left": Scalar("int32"),
    "logits_soft_cap": Scalar("float32"),
}


def single_template(
    name: str,
    description: str,
    reference: Callable[..., Any],
    rows: list[str],
    kv_layout: str,
    return_lse: bool,
    fixed: Mapping[str, object],
) -> TraceTemplate:
    """For a layout; ``rows`` are the axes of queries before the heads."""
    hnd = kv_layout == "HND"
    tokens = ["num_kv_heads", "kv_len"] if hnd else ["kv_len", "num_kv_heads"]
    axes: dict[str, Var | Const] = {row: Var("Queries.") for row in rows}
    axes |= {
        "num_qo_heads": Const("h", multiple=1, sample=10),
        "head_dim": Const("d", sample=64),
        "kv_len": Var("Tokens of the request."),
        "num_kv_heads": Const("kv", multiple=1, sample=5),
    }
    outputs = {"output": Tensor([*rows, "num_qo_heads", "head_dim"], dtype_from="q")}
    if return_lse:
        outputs["lse"] = Tensor([*rows, "num_qo_heads"], dtype="float32")
    more: dict[str, object] = {"kv_layout": "HND"} if hnd else {}
    more |= {"return_lse": True} if return_lse else {}
    return TraceTemplate(
        op_type="gqa_single",
        name_prefix=name + ("_hnd" if hnd else "") + ("_lse" if return_lse else ""),
        description=description,
        axes=axes,
        inputs={
            "q": Tensor([*rows, "num_qo_heads", "head_dim"]),
            "k": Tensor([*tokens, "head_dim"]),
            "v": Tensor([*tokens, "head_dim"]),
            **_SCALARS,
        },
        outputs=outputs,
        reference=reference,
        constraints=["num_qo_heads % num_kv_heads == 0"],
        fixed={**fixed, **more},
    )
