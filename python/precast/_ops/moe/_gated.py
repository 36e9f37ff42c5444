# SPDX-License-Identifier: Apache-2.0
"""The first product of a mixture of experts with its activation in the epilogue, for Hopper.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export
from precast._op.validation import check_contiguous
from precast._ops.gemm._plain import (
    UNSPLIT,
    Limits,
    check_rows,
    check_sizes,
    check_tma,
    rows_of_groups,
)
from precast._ops.gemm._tuned import adaptation
from precast._ops.moe._activation_reference import gated, is_gated

#: Output columns come in eights, as TMA copies the rows of ``up`` and of ``gate``.
_EIGHT = 8
_LIMITS = Limits(UNSPLIT, by_tma=True)


def _check(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    activation_type: int,
    bias: torch.Tensor | None,
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    out: torch.Tensor,
    tactic: int,
) -> None:
    columns = out.shape[1]
    if not is_gated(activation_type):
        raise ValueError(f"{export}: activation_type must be 3, 4, 5 or 8, got {activation_type}")
    if columns % _EIGHT:
        raise ValueError(
            f"{export}: out must have a multiple of {_EIGHT} columns, got shape {[*out.shape]}"
        )
    shape = [len(b), 2 * columns, a.shape[1]]
    if [*b.shape] != shape:
        raise ValueError(f"{export}: b must have shape {shape}, got {[*b.shape]}")
    if bias is not None and [*bias.shape] != shape[:2]:
        raise ValueError(f"{export}: bias must have shape {shape[:2]}, got {[*bias.shape]}")
    numbers = {"swiglu_alpha": swiglu_alpha, "swiglu_beta": swiglu_beta}
    check_contiguous(export, m_indptr=m_indptr, bias=bias, **numbers, swiglu_limit=swiglu_limit)
    check_rows(export, "b", b)
    check_tma(export, "a", a, "b", b, True)
    check_sizes(export, "a", a, out, tactic, _LIMITS)


def _write(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    activation_type: int,
    bias: torch.Tensor | None,
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    for group, rows in enumerate(rows_of_groups(m_indptr, len(a))):
        y = a[rows].float() @ b[group].float().mT
        if bias is not None:
            y = y + bias[group].float()
        numbers = (
            None if each is None else each[group]
            for each in (swiglu_alpha, swiglu_beta, swiglu_limit)
        )
        up, gate = y.chunk(2, dim=1)
        out[rows] = gated(up, gate, activation_type, *numbers).to(out.dtype)


#: ``out = act(a b[:n]^T, a b[n:]^T)``, the sums, with their bias, not rounded; the function and its
#: numbers are those of :func:`moe_activation`. A tuning table's choice for the product without the
#: activation is one for this product, which multiplies the same tiles.
GROUPED_GATED = Export(
    "gemm_gated_sm90",
    "grouped_mm_gated",
    "a:T=bf16|f16[m,k] b:T[groups,rows,k] m_indptr:i32[groups+1] activation_type:int "
    "bias?:T[groups,rows] swiglu_alpha?:f32[groups] swiglu_beta?:f32[groups] "
    "swiglu_limit?:f32[groups] out!:T[m,n] tactic:int enable_pdl:pdl_on",
    check=_check,
    write=_write,
    function="cutlass_fused_moe",
    error_name="grouped_mm_gated",
    traced=False,
    adapt=adaptation("grouped_mm_bf16"),
)
