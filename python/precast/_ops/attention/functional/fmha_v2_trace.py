# SPDX-License-Identifier: Apache-2.0
"""Trace templates of attention in five layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precast._ops.attention.functional.fmha_v2_layouts import (
    CONTIGUOUS,
    LAYOUTS,
    PACKED,
    PAGED,
    SEPARATE,
)
from precast._ops.attention.functional.trace import (
    BATCH,
    HEADS,
    PAGES,
    SCALES,
    WORKSPACE,
    fill_bounds,
    fill_table,
)
from precast._ops.attention.trace import by_form, entries_axes
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

_QUERY = ["num_queries", "num_qo_heads", "head_dim"]
_TOKEN = ["num_tokens", "num_kv_heads", "head_dim"]


def _item(axes: list[str], item: int) -> Tensor:
    return Tensor(axes, param="qkv", item=item)


def _tensors(layout: str) -> dict[str, Tensor]:
    """The tensors of ``qkv``."""
    if layout == PACKED:
        return {"qkv": Tensor(["num_queries", "three", "num_qo_heads", "head_dim"])}
    if layout == CONTIGUOUS:
        return {"query": _item(_QUERY, 0), "kv": _item(["num_tokens", "two", *_TOKEN[1:]], 1)}
    if layout == SEPARATE:
        return {"query": _item(_QUERY, 0), "key": _item(_TOKEN, 1), "value": _item(_TOKEN, 2)}
    entries = entries_axes(PAGED[layout], "page_size")
    return {"query": _item(_QUERY, 0), "cache": _item(["num_pages", "two", *entries], 1)}


def _axes(layout: str) -> Mapping[str, Var | Const]:
    axes = {**BATCH, "num_queries": Var("Queries of all requests.", sample=9), **HEADS}
    if layout == PACKED:
        del axes["num_kv_heads"]
        return {**axes, "three": Const("", "Queries, keys, values.", value="3")}
    axes["two"] = Const("", "Keys, values.", value="2")
    if layout in PAGED:
        return {**axes, **PAGES}
    if layout == SEPARATE:
        del axes["two"]
    return {**axes, "num_tokens": Var("Tokens of all requests.", sample=11)}


def fmha_v2_trace(reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """Make a template of each layout."""

    def template(layout: str) -> TraceTemplate:
        tensors = _tensors(layout)
        table = {}
        if layout in PAGED:
            table["block_tables"] = Tensor(["batch_size", "max_pages"], dtype="int32")
        heads = [] if layout == PACKED else ["num_qo_heads % num_kv_heads == 0"]
        return TraceTemplate(
            op_type="gqa_paged" if layout in PAGED else "gqa_ragged",
            name_prefix=f"trtllm_fmha_v2_prefill_{layout.lower()}",
            description="Attention of a ragged batch of queries over its keys and values.",
            axes={
                **_axes(layout),
                **WORKSPACE,
                "len_indptr": Var("One more than requests.", sample=3),
            },
            inputs={
                **tensors,
                "workspace_buffer": Tensor(["workspace_bytes"], dtype="uint8"),
                "seq_lens": Tensor(["batch_size"], dtype="int32"),
                "max_q_len": Scalar("int32"),
                "max_kv_len": Scalar("int32"),
                **SCALES,
                "batch_size": Scalar("int32"),
                "cum_seq_lens_q": Tensor(["len_indptr"], dtype="int32"),
                "cum_seq_lens_kv": Tensor(["len_indptr"], dtype="int32"),
                **table,
            },
            outputs={"output": Tensor(_QUERY, dtype_from=next(iter(tensors)))},
            constraints=heads,
            reference=reference,
            fixed={"input_layout": layout},
            fill=lambda call: _fill(call, layout),
        )

    def form_of(input_layout: Any = None, **others: Any) -> tuple[str]:
        is_known = isinstance(input_layout, str) and input_layout in LAYOUTS
        return (input_layout if is_known else PACKED,)

    return by_form(template, form_of, LAYOUTS)


def _fill(call: dict[str, Any], layout: str) -> None:
    """Divide queries and tokens among the requests."""
    qkv = call["qkv"]
    query = qkv if layout == PACKED else qkv[0]
    call["batch_size"], call["max_q_len"] = call["seq_lens"].shape[0], query.shape[0]
    if query.is_meta:
        return
    fill_bounds(call["cum_seq_lens_q"], query.shape[0])
    if layout in PAGED:
        fill_table({**call, "kv_cache": qkv[1], "kv_layout": PAGED[layout]})
        call["cum_seq_lens_kv"][1:] = call["seq_lens"].cumsum(0)
        return
    tokens = query if layout == PACKED else qkv[1]
    fill_bounds(call["cum_seq_lens_kv"], tokens.shape[0])
    call["seq_lens"].copy_(call["cum_seq_lens_kv"].diff())
