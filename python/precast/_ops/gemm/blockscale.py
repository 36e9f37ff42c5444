# SPDX-License-Identifier: Apache-2.0
"""The product of a layer whose weight has scales of blocks; 16-bit operands are quantised first."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.gemm._fp8 import BLOCK
from precast._ops.gemm.fp8_gemm import gemm_fp8_nt_groupwise
from precast._ops.quantize.per_block import per_block_cast_to_fp8
from precast._ops.quantize.per_token_group import per_token_group_quant_8bit
from precast.api_logging import precast_api

_NAME = "fp8_blockscale_gemm_sm90"
_COLUMNS = 64
_DTYPES = (torch.float8_e4m3fn, torch.bfloat16)
_OUTPUTS = (torch.bfloat16, torch.float16)


def _check_operand(name: str, x: torch.Tensor, scale: torch.Tensor | None) -> None:
    if x.dim() != 2:
        raise ValueError(f"{_NAME}: {name} must have 2 dimensions, got shape {[*x.shape]}")
    if x.dtype not in _DTYPES:
        raise ValueError(f"{_NAME}: {name} must be float8_e4m3fn or bfloat16, got {x.dtype}")
    if x.dtype == torch.bfloat16:
        if scale is not None:
            raise ValueError(
                f"{_NAME}: {name}_scale must be None if {name} is bfloat16, which is quantised "
                f"here, got a tensor of shape {[*scale.shape]}"
            )
    elif scale is None:
        raise ValueError(f"{_NAME}: {name}_scale is required when {name} is FP8, got None")


@precast_api
def fp8_blockscale_gemm_sm90(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    r"""Multiply by the transpose of a weight in FP8; operands of bfloat16 are quantised first.

    Quantised are groups of 128 elements of each row of ``input``
    (:func:`per_token_group_quant_8bit`), and blocks of 128 x 128 of ``weight``
    (:func:`precast.quantization.per_block_cast_to_fp8`); then :func:`gemm_fp8_nt_groupwise`.

    Parameters
    ----------
    input : torch.Tensor
        ``[m, k]``, bfloat16 or float8_e4m3fn, on a CUDA device, as :func:`gemm_fp8_nt_groupwise`
        takes it; ``k`` is a multiple of 128.
    weight : torch.Tensor
        ``[n, k]``, the same; ``n`` is a multiple of 64. May be float8_e4m3fn for any input, and
        bfloat16 for one of bfloat16.
    input_scale : torch.Tensor, optional
        ``[m, k / 128]``, float32: *dequantisation* scales of an ``input`` of float8_e4m3fn.
    weight_scale : torch.Tensor, optional
        ``[ceil(n / 128), k / 128]``, float32: those of a ``weight`` of float8_e4m3fn.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16 or float16, of ``out_dtype`` if that is given. Default: a new tensor.
    out_dtype : torch.dtype, optional
        bfloat16 or float16. Default: bfloat16.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Raises
    ------
    ValueError
        FP8 input with a bfloat16 weight; a scale that is missing, or one of a bfloat16 operand; a
        dtype, shape or size other than above; what :func:`gemm_fp8_nt_groupwise` refuses.

    Notes
    -----
    Up to three launches. What is quantised, and a missing ``out``, is allocated. Safe in CUDA
    graphs; not differentiable. It runs on every GPU, whatever the name says. FlashInfer's function
    also takes a scale for each 128 elements of a row of ``weight``; there is no kernel for it here.

    Examples
    --------
    >>> import torch, precast
    >>> x, weight = torch.ones(2, 128).bfloat16(), torch.ones(64, 128).bfloat16()
    >>> with precast.reference_mode():
    ...     precast.gemm.fp8_blockscale_gemm_sm90(x, weight)[:, 0]
    tensor([128., 128.], dtype=torch.bfloat16)
    """
    _check_operand("input", input, input_scale)
    _check_operand("weight", weight, weight_scale)
    depth, columns = input.shape[1], weight.shape[0]
    if weight.shape[1] != depth:
        raise ValueError(f"{_NAME}: weight must have shape [n, {depth}], got {[*weight.shape]}")
    if depth % BLOCK:
        raise ValueError(f"{_NAME}: K must be divisible by block size {BLOCK}, got {depth}")
    if columns % _COLUMNS:
        raise ValueError(f"{_NAME}: N must be divisible by {_COLUMNS}, got {columns}")
    if input.dtype == torch.float8_e4m3fn and weight.dtype == torch.bfloat16:
        raise ValueError(
            f"{_NAME}: FP8 input + BF16 weight is not supported; quantise the weight by "
            f"per_block_cast_to_fp8(weight, use_ue8m0=False)"
        )
    dtype = out_dtype or (torch.bfloat16 if out is None else out.dtype)
    if dtype not in _OUTPUTS or (out is not None and out.dtype != dtype):
        name, got = ("out_dtype", dtype) if out is None else ("out", out.dtype)
        legal = "bfloat16 or float16" if out_dtype not in _OUTPUTS else str(out_dtype)
        raise ValueError(f"{_NAME}: {name} must be {legal}, got {got}")
    blocks = [-(-columns // BLOCK), depth // BLOCK]
    if weight_scale is not None and list(weight_scale.shape) != blocks:
        raise ValueError(
            f"{_NAME}: weight_scale must have shape {blocks}, blocks of {BLOCK} x {BLOCK}, got "
            f"{[*weight_scale.shape]}. Fix: quantise the weight by per_block_cast_to_fp8"
        )
    if input_scale is None:
        input, input_scale = per_token_group_quant_8bit(input, BLOCK)
    if weight_scale is None:
        weight, weight_scale = per_block_cast_to_fp8(weight, use_ue8m0=False)
    return gemm_fp8_nt_groupwise(
        input, weight, input_scale, weight_scale, "K", out=out, out_dtype=dtype
    )
