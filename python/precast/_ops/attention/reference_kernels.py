# SPDX-License-Identifier: Apache-2.0
"""The exports of attention in plain PyTorch, and the bindings' checks that no declaration holds.

A plan divides the work of a batch among the SMs. References divide nothing, so a plan consists of
checks and of copies into the buffers of a CUDA graph.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import accepted
from precast._op.ranges import FINITE, POSITIVE
from precast._op.scalars import check_ranges
from precast._op.validation import check_memory_apart
from precast._ops.attention.enums import MaskMode, PosEncodingMode
from precast._ops.attention.plan import AttentionPlan, BlockNumbers
from precast._ops.attention.reference import (
    attend,
    features_of,
    paged_requests,
    ragged_requests,
)
from precast._ops.attention.validation import softmax_scale
from precast._ops.paged._cache import entries_of, halves, joined
from precast._ops.quantize._reference_nvfp4 import nvfp4_dequantized

#: What logits are multiplied with on the host.
SM_PRODUCT = "sm_scale * q_scale * k_scale"

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
    **tables: Any,
) -> None:
    """Raise for options that do not fit the plan, or that need tensors which are not there."""
    shape, options = block
    mode, window, planned = options.mask_mode, options.window_left, shape.window_left
    scale, theta = options.rope_scale, options.rope_theta
    finite = dict.fromkeys(("sm_scale", "logits_soft_cap"), FINITE)
    check_ranges(export, finite, options._asdict())
    check_memory_apart(export, "float_workspace", float_workspace, int_workspace, "int_workspace")
    for is_wrong, words in (
        (
            shape.page_size and kv_last_page_len is None and kv_len is None,
            "pages need kv_last_page_len or kv_len, got neither",
        ),
        (shape.page_size and kv_indices is None, "a paged cache needs kv_indices, got None"),
        # A plan for some of the tokens serves no run that sees more.
        (
            shape.causal and mode not in (MaskMode.CAUSAL, MaskMode.MULTIITEMSCORING),
            f"mask_mode must be causal (1) or multi-item (3) as plan() had it, got {mode}; plan "
            f"again with causal=False",
        ),
        (
            planned >= 0 and not 0 <= window <= planned,
            f"window_left must be 0 to {planned} as plan() had it, got {window}; plan again with "
            f"the wider window",
        ),
        (
            options.pos_encoding == PosEncodingMode.ROPE_LLAMA
            and not (POSITIVE.holds(scale) and POSITIVE.holds(theta)),
            f"rope_scale and rope_theta must be positive and finite, got {scale} and {theta}",
        ),
    ):
        if is_wrong:
            raise ValueError(f"{export}: {words}")
    # plan() and run() write to the workspaces.
    tables |= {"kv_last_page_len": kv_last_page_len, "kv_len": kv_len, "kv_indices": kv_indices}
    tables |= {"prefix_len": prefix_len, "token_pos": token_pos}
    workspaces = {"int_workspace": int_workspace, "float_workspace": float_workspace}
    _check_apart(export, workspaces, tables)
    if mode != MaskMode.MULTIITEMSCORING:
        return
    if options.token_pos_len < 0:
        raise ValueError(
            f"{export}: token_pos_len must not be negative, got {options.token_pos_len}"
        )
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


def _check_apart(export: str, written: dict[str, Any], read: dict[str, Any]) -> None:
    """Raise for a tensor that is written in memory of one that is read; there may be others."""
    for name, tensor in written.items():
        for other_name, other in read.items():
            if isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor):
                check_memory_apart(export, name, tensor, other, other_name)


def pack_plan() -> None:
    """A reference reads the plan itself and not its block, so nothing is packed."""


def copy_tables(block: AttentionPlan, **tables: Any) -> None:
    """Copy tables into the plan's buffers of the same names."""
    buffers = block.tables._asdict()
    for name in tables:
        # A table may be its own buffer, or lie in its first part.
        others = {f"{key}_buf": x for key, x in buffers.items() if tables.get(key) is not None}
        if name in buffers and _is_at(tables[name], buffers[name]):
            del others[f"{name}_buf"]
        _check_apart("plan", {name: tables[name]}, others)
    for name, buffer in buffers.items():
        table = tables.get(name)
        if table is None:
            continue
        is_whole = name != "kv_indices"
        if buffer is not None and is_whole and table.shape != buffer.shape:
            raise ValueError(
                f"plan: {name} must have shape {[*buffer.shape]}, got {[*table.shape]}"
            )
        if buffer is None or buffer.numel() < table.numel():
            size = 0 if buffer is None else buffer.numel()
            raise ValueError(
                f"plan: {name} must have at most the {size} elements of its buffer, got shape "
                f"{[*table.shape]}"
            )
        buffer[: table.numel()].copy_(table)


def _is_at(table: Any, buffer: Any) -> bool:
    """Whether both start at one address."""
    tensors = isinstance(table, torch.Tensor) and isinstance(buffer, torch.Tensor)
    return tensors and table.data_ptr() == buffer.data_ptr()


def workspace_size(sizes: torch.Tensor) -> None:
    """Write zeros: a reference needs no workspace."""
    sizes.zero_()


# -- runs -----------------------------------------------------------------------------------------


def check_run(
    export: str,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    block: AttentionPlan,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    **numbers: Any,
) -> None:
    """Raise for rows and caches that are not those of the plan, and for outputs that overlap."""
    sm_scale = softmax_scale(block.scores.sm_scale, block.shape.head_dim_qk)
    check_ranges(export, {SM_PRODUCT: FINITE}, {SM_PRODUCT: sm_scale * numbers["sm_factor"]})
    rows = block.shape.rows
    if rows >= 0 and q.shape[0] != rows:
        raise ValueError(f"{export}: q must have {rows} rows as in plan(), got shape {[*q.shape]}")
    read: dict[str, Any] = {"k": k, "v": v}
    if k_cache is not None:
        read |= _checked_caches(export, block, k_cache, v_cache)
    check_run_memory(export, q, out, lse, block, read, numbers)


def check_packed_run(
    export: str,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    block: AttentionPlan,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    k_sf: torch.Tensor,
    v_sf: torch.Tensor | None,
    **numbers: Any,
) -> None:
    """Raise as :func:`check_run`, for a cache in NVFP4 and its scales."""
    check_run(export, q, out, lse, block, **numbers)
    read = _checked_caches(export, block, k_cache, v_cache, 2)
    read |= _checked_caches(export, block, k_sf, v_sf, 16, "kv_cache_sf", k_cache.shape[0])
    check_run_memory(export, q, out, lse, block, read, numbers)


def check_run_memory(
    export: str,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    block: AttentionPlan,
    read: dict[str, Any],
    numbers: dict[str, Any],
) -> None:
    """Raise for what is written in memory of what is read."""
    workspaces = {
        "int_workspace": block.int_workspace,
        "float_workspace": block.float_workspace,
    }
    _check_apart(export, {"out": out, "lse": lse}, read | workspaces)
    _check_apart(export, {"lse": lse}, {"out": out})
    planned = block.tables._asdict() | block.items._asdict()
    planned |= {"packed_mask": block.mask.bits, "mask_indptr": block.mask.indptr}
    planned["alibi_slopes"] = block.alibi_slopes
    _check_apart(export, {"out": out, "lse": lse}, planned)
    # The workspaces are written, too; pack_plan() has compared them with the plan's tensors.
    _check_apart(export, workspaces, read | {"q": q} | numbers)


def _checked_caches(
    export: str,
    plan: AttentionPlan,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    per_byte: int = 1,
    what: str = "paged_kv_cache",
    pages: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return the caches by name; raise unless they have the plan's sizes.

    ``per_byte`` is how many numbers of a row an element is for, ``pages`` how many there must be.
    """
    shape = plan.shape
    sizes = [shape.page_size, shape.num_kv_heads]
    if plan.hnd:
        sizes.reverse()
    names = [f"{what}[0]", f"{what}[1]"]
    if v_cache is None:  # Keys and values are in dimension 1.
        names, v_cache, sizes = [what] * 2, k_cache, [2, *sizes]
    caches = k_cache, v_cache
    for name, cache, head_dim in zip(names, caches, (shape.head_dim_qk, shape.head_dim_vo)):
        want = [k_cache.shape[0] if pages is None else pages, *sizes, head_dim // per_byte]
        if [*cache.shape] != want:
            raise ValueError(f"{export}: {name} must have shape {want}, got {[*cache.shape]}")
    return dict(zip(names, caches))


def run(
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    block: AttentionPlan,
    sinks: torch.Tensor | None,
    sm_factor: float,
    out_scale: float,
    qk_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k: Any = None,
    v: Any = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
) -> None:
    """Run the plan of ``block``; rows that no request has are not written."""
    shape, tables, mask_mode, items = block.shape, block.tables, block.mask_mode, block.items
    bounds = block.query_bounds
    indptr, indices, last_page_len = tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len
    assert indptr is not None
    if k_cache is not None:
        assert indices is not None
        keys, values = (entries_of(x, block.hnd) for x in halves(joined(k_cache, v_cache)))
        table = indptr, indices, last_page_len, tables.kv_len
        requests = paged_requests(keys, values, bounds, *table)
    else:
        requests = ragged_requests(k, v, bounds, indptr)
    scores = block.scores._asdict()
    del scores["use_fp16_qk_reduction"]
    scores["causal"] = mask_mode == MaskMode.CAUSAL
    features = features_of(
        q,
        **scores,
        sm_factor=sm_factor,
        packed_mask=block.mask.bits if mask_mode == MaskMode.CUSTOM else None,
        mask_indptr=block.mask.indptr,
        out_scale=out_scale,
        qk_scale=qk_scale,
        v_scale=v_scale,
        sinks=sinks,
        prefix_len_ptr=items.prefix_len,
        token_pos_in_items_ptr=items.token_pos,
        token_pos_in_items_len=items.token_pos_len,
    )
    result, sums, used = attend(q, requests, shape.head_dim_vo, features)
    out[used] = result[used].to(out.dtype)
    if lse is not None:
        lse[used] = sums[used].to(lse.dtype)


def run_packed(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    k_sf: torch.Tensor,
    v_sf: torch.Tensor | None,
    **given: Any,
) -> None:
    """:func:`run` of a cache in NVFP4."""
    keys, values = nvfp4_dequantized(joined(k_cache, v_cache), joined(k_sf, v_sf))
    run(**accepted(run, given), k_cache=keys, v_cache=values)
