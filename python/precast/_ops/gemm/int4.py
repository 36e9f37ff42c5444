# SPDX-License-Identifier: Apache-2.0
"""Products of groups of consecutive rows with a weight of int4 for each group."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._ops.gemm._fp8 import MMA
from precast._ops.gemm._plain import (
    TACTIC,
    check_choice,
    check_out,
    chosen,
    exports,
    fill_starts,
)
from precast._ops.gemm._w4 import SM90_TILES, check_w4, dequantized_int4, grouped_template
from precast._ops.gemm.grouped_mm import GROUPS, write_groups
from precast.api_logging import precast_api


def _write_int4(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
) -> None:
    write_groups(a, dequantized_int4(b, b_scale).mT, m_indptr, out)


_INT4, _INT4_SM90 = _INT4_BOTH = exports(
    "grouped_mm_int4",
    "a:bf16[m,k] b:u8[groups,n,k//2] b_scale:bf16[groups,n//64,k//128,8,8] "
    "m_indptr:i32[groups+1] out!:T=bf16|f16|f32[m,n] tactic:int enable_pdl:pdl_on",
    check_w4,
    range(SM90_TILES),
    op="int4_gemm",
    write=_write_int4,
    derived={"out_dtype": lambda out: out.dtype},
)


def grouped_mm_int4_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """:func:`grouped_mm_int4` in plain PyTorch on any device; rows of no group are zero."""
    out = a.new_zeros(len(a), b.shape[1], dtype=out_dtype)
    _write_int4(a, b, b_scale, m_indptr, out)
    return out


def _fill(made: dict[str, Any]) -> None:
    fill_starts(made["m_indptr"], len(made["a"]))
    made["b_scale"].abs_()


@precast_api(
    trace=grouped_template(
        "grouped_mm_int4", "int4", (8, "bfloat16"), grouped_mm_int4_reference, _fill
    )
)
@op("int4_gemm")
@documented(GROUPS, TACTIC)
def grouped_mm_int4(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "auto",
    tactic: int = -1,
) -> torch.Tensor:
    r"""Multiply groups of consecutive rows by an int4 weight each.

    .. math::

        out_m = \mathrm{round}(a_m \cdot w_g^T), \quad w_{g,n,k} = b_{g,n,k} \cdot
        scale_{g,n,k/128}, \quad m\_indptr_g \le m < m\_indptr_{g+1}

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, bfloat16, on a CUDA device; stride 1 in the last dimension, rows at multiples of
        16 bytes. ``k`` is a multiple of 128.
    b : torch.Tensor
        ``[groups, n, k / 2]``, uint8, contiguous: numbers from -8 to 7 as
        :func:`~precast.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm` returns them with
        ``quant_type="int4"``. ``n`` is a multiple of 64.
    b_scale : torch.Tensor
        ``[groups, n / 64, k / 128, 8, 8]``, bfloat16, contiguous: scales of 128 numbers as
        :func:`~precast.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm` returns them with
        ``group_size=128``.
    m_indptr : torch.Tensor
        ``[groups + 1]``, int32, contiguous: where the rows of each group begin, ascending.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16, float16 or float32; stride 1 in the last dimension. Rows of no group
        are not written. Default: a new tensor.
    out_dtype : torch.dtype
        The dtype of a new ``out``.
    backend : str
        ``"auto"``, or ``"mma"``, the kernels for every GPU on Hopper, too.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Notes
    -----
    Numbers are bfloat16 when they are multiplied, exactly, and so is an ``a`` that was e4m3 before.
    Sums of at most 128 products are multiplied by their scale and added in float32.

    Examples
    --------
    >>> import torch, precast
    >>> a = torch.ones(3, 128).bfloat16()
    >>> twos = torch.full((1, 64, 64), 0x22, dtype=torch.uint8)
    >>> halves = torch.full((1, 64, 1), 0.5).bfloat16()
    >>> b = precast.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(twos, "int4")
    >>> scales = precast.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(halves, 128)
    >>> starts = torch.tensor([0, 3], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.gemm.grouped_mm_int4(a, b, scales, starts)[:, 0]
    tensor([128., 128., 128.], dtype=torch.bfloat16)
    """
    name = "grouped_mm_int4"
    check_choice(name, "backend", backend, "auto", MMA)
    check_out(name, out, out_dtype, is_equal=False)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    chosen(_INT4_BOTH, a, b, True, backend).launch(a, b, b_scale, m_indptr, out, tactic)
    return out
