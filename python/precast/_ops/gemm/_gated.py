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

#: Output columns come in eights, as TMA copies the rows of ``up`` and of ``gate``.
_EIGHT = 8
_LIMITS = Limits(UNSPLIT, by_tma=True)


def _check(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
    tactic: int,
) -> None:
    columns = out.shape[1]
    if columns % _EIGHT:
        raise ValueError(
            f"{export}: out must have a multiple of {_EIGHT} columns, got shape {[*out.shape]}"
        )
    shape = [len(b), 2 * columns, a.shape[1]]
    if [*b.shape] != shape:
        raise ValueError(f"{export}: b must have shape {shape}, got {[*b.shape]}")
    check_contiguous(export, m_indptr=m_indptr)
    check_rows(export, "b", b)
    check_tma(export, "a", a, "b", b, True)
    check_sizes(export, "a", a, out, tactic, _LIMITS)


def _write(a: torch.Tensor, b: torch.Tensor, m_indptr: torch.Tensor, out: torch.Tensor) -> None:
    for group, rows in enumerate(rows_of_groups(m_indptr, len(a))):
        up, gate = (a[rows].float() @ b[group].float().mT).chunk(2, dim=1)
        out[rows] = (torch.nn.functional.silu(gate) * up).to(out.dtype)


#: ``out = silu(a b[n:]^T) * (a b[:n]^T)``, the sums not rounded. A tuning table's choice for the
#: product without the activation is one for this product, which multiplies the same tiles.
GROUPED_SWIGLU = Export(
    "gemm_gated_sm90",
    "grouped_mm_swiglu",
    "a:T=bf16|f16[m,k] b:T[groups,rows,k] m_indptr:i32[groups+1] out!:T[m,n] tactic:int "
    "enable_pdl:pdl_on",
    check=_check,
    write=_write,
    function="cutlass_fused_moe",
    error_name="grouped_mm_swiglu",
    traced=False,
    adapt=adaptation("grouped_mm_bf16"),
)
