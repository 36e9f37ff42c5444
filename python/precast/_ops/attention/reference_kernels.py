# SPDX-License-Identifier: Apache-2.0
"""The exports of attention in plain PyTorch, and the bindings' checks that no declaration holds.

A plan divides the work of a batch among the SMs. References divide nothing, so a plan consists of
checks and of copies into the buffers of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precast._base.torch import torch
from precast._op.validation import check_memory_apart, check_rank
from precast._ops.attention.enums import MaskMode, PosEncodingMode
from precast._ops.attention.plan import AttentionPlan, BlockNumbers
from precast._ops.attention.reference import (
    Request,
    attend,
    features_of,
    paged_requests,
    ragged_requests,
    row_bounds,
)
from precast._ops.paged._cache import Cache, entries_of, halves, joined

# -- plans ----------------------------------------------------------------------------------------


def check_plan(
    export: str,
    block: BlockNumbers,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    int_workspace: torch.Tensor,
    float_workspace: torch.Tensor,
    prefix_len: torch.Tensor | None,
    token_pos: torch.Tensor | None,
) -> None:
    """Raise for options that do not fit the plan, or that need tensors which are not there."""
    shape, options = block
    if shape.page_size:
        if kv_last_page_len is None and kv_len is None:
            raise ValueError(f"{export}: pages need kv_last_page_len or kv_len, got neither")
        if kv_indices is None:
            raise ValueError(f"{export}: a paged cache needs kv_indices, got None")
    check_memory_apart(export, "float_workspace", float_workspace, int_workspace, "int_workspace")
    mode, window, planned = options.mask_mode, options.window_left, shape.window_left
    # A plan for some of the tokens serves no run that sees more.
    if shape.causal and mode not in (MaskMode.CAUSAL, MaskMode.MULTIITEMSCORING):
        raise ValueError(
            f"{export}: mask_mode must be causal (1) or multi-item (3) as plan() had it, got "
            f"{mode}; plan again with causal=False"
        )
    if planned >= 0 and not 0 <= window <= planned:
        raise ValueError(
            f"{export}: window_left must be 0 to {planned} as plan() had it, got {window}; plan "
            f"again with the wider window"
        )
    scale, theta = options.rope_scale, options.rope_theta
    if options.pos_encoding == PosEncodingMode.ROPE_LLAMA and not (scale > 0 and theta > 0):
        raise ValueError(
            f"{export}: rope_scale and rope_theta must be positive, got {scale} and {theta}"
        )
    if mode != MaskMode.MULTIITEMSCORING:
        return
    for name, tensor, least in (
        ("prefix_len", prefix_len, shape.batch_size),
        ("token_pos", token_pos, shape.batch_size * options.token_pos_len),
    ):
        if tensor is None:
            raise ValueError(f"{export}: multi-item scoring needs {name}, got None")
        if tensor.numel() < least:
            raise ValueError(
                f"{export}: {name} must have at least {least} elements, got shape {[*tensor.shape]}"
            )


def pack_plan() -> None:
    """A reference reads the plan itself and not its block, so nothing is packed."""


def copy_tables(block: AttentionPlan, **tables: Any) -> None:
    """Copy tables into the plan's buffers of the same names."""
    for name, buffer in block.tables._asdict().items():
        table = tables.get(name)
        if table is None:
            continue
        if buffer is None or buffer.numel() < table.numel():
            size = 0 if buffer is None else buffer.numel()
            raise ValueError(
                f"plan: {name} must have at most the {size} elements of its buffer, got shape "
                f"{[*table.shape]}"
            )
        buffer[: table.numel()].copy_(table)


def workspace_size(sizes: torch.Tensor) -> None:
    """Write zeros: a reference needs no workspace."""
    sizes.zero_()


# -- runs -----------------------------------------------------------------------------------------


def check_paged(
    export: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    block: AttentionPlan,
) -> None:
    """Raise for caches that are not those of the plan, and for outputs in memory that is read."""
    shape, cache = block.shape, joined(k_cache, v_cache)
    caches = {"paged_kv_cache": k_cache}
    if v_cache is not None:
        caches = {"paged_kv_cache[0]": k_cache, "paged_kv_cache[1]": v_cache}
    rank = 5 if v_cache is None else 4
    for name, part in caches.items():
        check_rank(export, name, part, rank, rank)
        if v_cache is None and part.shape[1] != 2:
            raise ValueError(
                f"{export}: {name} must hold keys and values in dimension 1 of size 2, got shape "
                f"{[*part.shape]}"
            )
    pages = k_cache.shape[0]
    for part, head_dim in zip(_entries(cache, block), (shape.head_dim_qk, shape.head_dim_vo)):
        want = (pages, shape.page_size, shape.num_kv_heads, head_dim)
        if part.shape != want:
            raise ValueError(
                f"{export}: paged_kv_cache must have {pages} pages of {shape.page_size} tokens, "
                f"{shape.num_kv_heads} heads and head_dim {head_dim} as in plan(), got shapes "
                f"{[[*tensor.shape] for tensor in caches.values()]}"
            )
    _check_run(export, q, out, lse, block, **caches)


def check_ragged(
    export: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    block: AttentionPlan,
) -> None:
    """Raise for queries that are not those of the plan, and for outputs in memory that is read."""
    _check_run(export, q, out, lse, block, k=k, v=v)


def _check_run(
    export: str,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    plan: AttentionPlan,
    **read: torch.Tensor | None,
) -> None:
    rows = plan.shape.rows
    if rows >= 0 and q.shape[0] != rows:
        raise ValueError(f"{export}: q must have {rows} rows as in plan(), got shape {[*q.shape]}")
    workspaces = {"int_workspace": plan.int_workspace, "float_workspace": plan.float_workspace}
    check_outputs_apart(export, out, lse, **read, **workspaces)


def check_outputs_apart(
    export: str, out: torch.Tensor, lse: torch.Tensor | None, **read: torch.Tensor | None
) -> None:
    """Raise unless both outputs have memory of their own; the declaration compares them with q."""
    for name, written in (("out", out), ("lse", lse)):
        for other_name, other in read.items():
            if written is not None and other is not None:
                check_memory_apart(export, name, written, other, other_name)
    if lse is not None:
        check_memory_apart(export, "lse", lse, out, "out")


def _entries(cache: Cache, plan: AttentionPlan) -> list[torch.Tensor]:
    """Keys and values ``[pages, page_size, heads, head_dim]`` as views."""
    return [entries_of(part, plan.hnd) for part in halves(cache)]


def run_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    block: AttentionPlan,
    **given: Any,
) -> None:
    """Attention over pages by the plan of ``block``."""
    tables = block.tables
    assert tables.kv_indptr is not None
    assert tables.kv_indices is not None
    assert tables.kv_last_page_len is not None
    keys, values = _entries(joined(k_cache, v_cache), block)
    requests = paged_requests(
        keys,
        values,
        _bounds(block),
        tables.kv_indptr,
        tables.kv_indices,
        tables.kv_last_page_len,
    )
    _run(q, requests, block, **given)


def run_ragged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionPlan, **given: Any
) -> None:
    """Attention over ragged keys and values by the plan of ``block``."""
    assert block.tables.kv_indptr is not None
    _run(q, ragged_requests(k, v, _bounds(block), block.tables.kv_indptr), block, **given)


def _bounds(plan: AttentionPlan) -> list[int]:
    shape = plan.shape
    rows = None if shape.q_len_per_req else plan.tables.qo_indptr
    return row_bounds(rows, shape.q_len_per_req, shape.batch_size)


def _run(
    q: torch.Tensor,
    requests: Iterator[Request],
    plan: AttentionPlan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    enable_pdl: bool,
    **given: Any,
) -> None:
    """Write the rows that a request has; ``given`` are scales and sinks."""
    scores, mask_mode, items = plan.scores._asdict(), plan.mask_mode, plan.items
    del scores["use_fp16_qk_reduction"]
    scores["causal"] = mask_mode == MaskMode.CAUSAL
    features = features_of(
        q,
        **scores,
        packed_mask=plan.mask.bits if mask_mode == MaskMode.CUSTOM else None,
        mask_indptr=plan.mask.indptr,
        prefix_len=items.prefix_len,
        token_pos=items.token_pos,
        token_pos_len=items.token_pos_len,
        **given,
    )
    values, sums, used = attend(q, requests, plan.shape.head_dim_vo, features)
    out[used] = values[used].to(out.dtype)
    if lse is not None:
        lse[used] = sums[used].to(lse.dtype)
