# SPDX-License-Identifier: Apache-2.0
"""The exports of MLA in plain PyTorch, and the bindings' checks that no declaration holds."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.ranges import FINITE
from precast._op.scalars import check_ranges
from precast._ops.attention.plan import AttentionPlan
from precast._ops.attention.reference_kernels import SM_PRODUCT, check_run_memory
from precast._ops.mla.formula import attend_pages

#: The arguments of e4m3 alone, with what they are without it.
_SCALES = {"kpe_ratio": 1.0, "kpe_scale": None, "ckv_scale_arr": None}


def check_run(
    export: str,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    block: AttentionPlan,
    sm_factor: float,
    **numbers: Any,
) -> None:
    """Raise for rows and caches that are not those of the plan, and for outputs that overlap."""
    shape = block.shape
    sm_scale = block.scores.sm_scale
    assert sm_scale is not None
    check_ranges(export, {SM_PRODUCT: FINITE}, {SM_PRODUCT: sm_scale * sm_factor})
    if shape.sm90 != (export == "run_mla_sm90"):
        ours, theirs = ("mla_sm90", "mla") if shape.sm90 else ("mla", "mla_sm90")
        raise ValueError(
            f"{export}: block must be of a plan for {theirs}, got one for {ours}. Fix: call plan()"
        )
    if shape.rows >= 0 and q_nope.shape[0] != shape.rows:
        raise ValueError(
            f"{export}: q_nope must have {shape.rows} rows as in plan(), got shape "
            f"{[*q_nope.shape]}"
        )
    dim_kpe = shape.head_dim_qk - shape.head_dim_vo
    for name, tensor in (("q_pe", q_pe), ("kpe_cache", kpe_cache)):
        if (tensor is not None) != (dim_kpe > 0):
            raise ValueError(
                f"{export}: {name} must be {'a tensor' if dim_kpe else 'None'} for head_dim_kpe "
                f"{dim_kpe} of plan()"
            )
    if ckv_cache.element_size() > 1 and any(numbers[n] != none for n, none in _SCALES.items()):
        raise ValueError(
            f"{export}: kpe_ratio, kpe_scale and ckv_scale_arr are for caches of float8_e4m3fn, "
            f"got {ckv_cache.dtype}"
        )
    if shape.sm90 and not sm_scale * sm_factor > 0:
        raise ValueError(
            f"{export}: sm_scale * sm_factor must be positive, got {sm_scale * sm_factor}. Fix: "
            f"plan with backend='fa2'"
        )
    read = {"q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
    check_run_memory(export, q_nope, out, lse, block, read, numbers)


def run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    block: AttentionPlan,
    sm_factor: float,
    out_scale: float,
    qk_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    kpe_ratio: float,
    kpe_scale: torch.Tensor | None,
    ckv_scale_arr: torch.Tensor | None,
    lse_base_e: bool,
) -> None:
    """Run the plan of ``block``; rows that no request has are not written."""
    tables, scores = block.tables, block.scores
    assert scores.sm_scale is not None
    factor = 1.0 if qk_scale is None else qk_scale.float().reshape(())
    if kpe_scale is not None:
        kpe_ratio = kpe_ratio * kpe_scale.float().reshape(()) / factor
    assert tables.kv_indices is not None
    assert tables.kv_len is not None
    result, sums, used = attend_pages(
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        block.query_bounds,
        tables.kv_indptr,
        tables.kv_indices,
        tables.kv_len,
        scores.sm_scale * sm_factor * factor,
        scores.causal,
        kpe_ratio,
        ckv_scale_arr,
        sinks,
        lse_base_e,
    )
    result = result * out_scale * (1.0 if v_scale is None else v_scale.float().reshape(()))
    out[used] = result[used].to(out.dtype)
    if lse is not None:
        lse[used] = sums[used]
