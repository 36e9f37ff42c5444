# SPDX-License-Identifier: Apache-2.0
"""The exports of attention in plain PyTorch, with the refusals of the bindings.

A plan divides the work of a batch among the SMs. References divide nothing, so a plan is a matter
of checks and of copies into the buffers of a CUDA graph.
"""

from __future__ import annotations

from types import SimpleNamespace

from precast._base.torch import torch
from precast._op.validation import check_memory_apart
from precast._ops.attention import reference_checks as checks
from precast._ops.attention.enums import MaskMode, PosEncodingMode
from precast._ops.attention.plan import AttentionPlan, plan_of, read_block
from precast._ops.attention.reference import (
    attend,
    features_of,
    paged_requests,
    ragged_requests,
    row_bounds,
)
from precast._ops.paged._cache import entries_of, halves


def pack_plan_into(
    kv_indptr: torch.Tensor,
    qo_indptr: torch.Tensor | None,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    int_workspace: torch.Tensor,
    float_workspace: torch.Tensor,
    packed_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    prefix_len: torch.Tensor | None,
    token_pos: torch.Tensor | None,
    block: torch.Tensor,
) -> None:
    """Nothing but refusals."""
    export, (shape, options) = "pack_plan", read_block(block)
    checks.check_lengths(export, qo_indptr, kv_indptr, kv_last_page_len, kv_len, shape.batch_size)
    checks.check_pages(export, shape, kv_last_page_len, kv_len, kv_indices)
    check_memory_apart(export, "float_workspace", float_workspace, int_workspace, "int_workspace")
    checks.check_scores(export, shape, options)
    checks.check_items(export, options, prefix_len, token_pos, shape.batch_size)


def plan_into(
    int_workspace: torch.Tensor,
    block: torch.Tensor,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor | None,
    kv_last_page_len: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    enable_pdl: bool,
) -> None:
    """Copies of the tables into the plan's buffers."""
    tables = plan_of("plan", block).tables
    for name, table, buffer in (
        ("qo_indptr", qo_indptr, tables.qo_indptr),
        ("kv_indptr", kv_indptr, tables.kv_indptr),
        ("kv_last_page_len", kv_last_page_len, tables.kv_last_page_len),
        ("kv_indices", kv_indices, tables.kv_indices),
    ):
        if table is None:
            continue
        if buffer is None or buffer.numel() < table.numel():
            size = 0 if buffer is None else buffer.numel()
            raise ValueError(
                f"plan: {name} must have at most the {size} elements of its buffer, got shape "
                f"{[*table.shape]}"
            )
        buffer[: table.numel()].copy_(table)


def workspace_size_into(
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    sizes: torch.Tensor,
    block: torch.Tensor,
    sm_count: int,
) -> None:
    """Zeros: a reference needs no workspace."""
    sizes.zero_()


def run_paged_into(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    block: torch.Tensor,
    sm_factor: float,
    out_scale: float,
    qk_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    enable_pdl: bool,
) -> None:
    """Attention over pages by the plan of ``block``."""
    export, plan = "run_paged", plan_of("run_paged", block)
    cache = k_cache if v_cache is None else (k_cache, v_cache)
    checks.check_paged(export, q, cache, plan.hnd)
    keys, values = (entries_of(part, plan.hnd) for part in halves(cache))
    caches = (
        {"paged_kv_cache": k_cache}
        if v_cache is None
        else {"paged_kv_cache[0]": k_cache, "paged_kv_cache[1]": v_cache}
    )
    checks.check_planned(export, plan.shape, q, keys)
    checks.check_outputs(
        export, q, values.shape[-1], out, lse, sinks, **caches, **_workspaces(plan)
    )
    tables = plan.tables
    assert tables.kv_indptr is not None
    assert tables.kv_indices is not None
    assert tables.kv_last_page_len is not None
    requests = paged_requests(
        keys,
        values,
        _bounds(plan),
        tables.kv_indptr,
        tables.kv_indices,
        tables.kv_last_page_len,
    )
    features = _features(q, plan, sinks, sm_factor, out_scale, qk_scale, v_scale)
    _write(out, lse, attend(q, requests, values.shape[-1], features))


def run_ragged_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    block: torch.Tensor,
    sm_factor: float,
    out_scale: float,
    qk_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    enable_pdl: bool,
) -> None:
    """Attention over ragged keys and values by the plan of ``block``."""
    export, plan = "run_ragged", plan_of("run_ragged", block)
    checks.check_ragged(export, q, k, v)
    checks.check_planned(export, plan.shape, q, k)
    checks.check_outputs(export, q, v.shape[-1], out, lse, sinks, k=k, v=v, **_workspaces(plan))
    assert plan.tables.kv_indptr is not None
    requests = ragged_requests(k, v, _bounds(plan), plan.tables.kv_indptr)
    features = _features(q, plan, sinks, sm_factor, out_scale, qk_scale, v_scale)
    _write(out, lse, attend(q, requests, v.shape[-1], features))


def run_single_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    packed_mask: torch.Tensor | None,
    mask_mode: int,
    pos_encoding: int,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
    rope_scale: float,
    rope_theta: float,
    out_scale: float,
    qk_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Attention of one request, which needs no plan."""
    export = "run_ragged"
    checks.check_ragged(export, q, k, v)
    checks.check_outputs(export, q, v.shape[-1], out, lse, None, k=k, v=v)
    features = features_of(
        q,
        causal=mask_mode == MaskMode.CAUSAL,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        pos_encoding_mode=PosEncodingMode(pos_encoding).name,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        packed_mask=packed_mask,
        mask_indptr=torch.zeros(1, dtype=torch.int32),
        out_scale=out_scale,
        qk_scale=qk_scale,
        v_scale=v_scale,
    )
    requests = ragged_requests(k, v, [0, q.shape[0]], torch.tensor([0, k.shape[0]]))
    _write(out, lse, attend(q, requests, v.shape[-1], features))


def _workspaces(plan: AttentionPlan) -> dict[str, torch.Tensor | None]:
    return {"int_workspace": plan.int_workspace, "float_workspace": plan.float_workspace}


def _bounds(plan: AttentionPlan) -> list[int]:
    shape = plan.shape
    rows = None if shape.q_len_per_req else plan.tables.qo_indptr
    return row_bounds(rows, shape.q_len_per_req, shape.batch_size)


def _features(
    q: torch.Tensor,
    plan: AttentionPlan,
    sinks: torch.Tensor | None,
    sm_factor: float,
    out_scale: float,
    qk_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> SimpleNamespace:
    scores, mask_mode, items = plan.scores._asdict(), plan.mask_mode, plan.items
    del scores["use_fp16_qk_reduction"]
    scores["causal"] = mask_mode == MaskMode.CAUSAL
    return features_of(
        q,
        **scores,
        sm_factor=sm_factor,
        packed_mask=plan.mask.bits if mask_mode == MaskMode.CUSTOM else None,
        mask_indptr=plan.mask.indptr,
        out_scale=out_scale,
        qk_scale=qk_scale,
        v_scale=v_scale,
        sinks=sinks,
        prefix_len=items.prefix_len,
        token_pos=items.token_pos,
        token_pos_len=items.token_pos_len,
    )


def _write(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    values, sums, used = results
    out[used] = values[used].to(out.dtype)
    if lse is not None:
        lse[used] = sums[used].to(lse.dtype)
