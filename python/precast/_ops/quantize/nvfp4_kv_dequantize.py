# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of an NVFP4 key-value cache.

Source: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149.
"""

from __future__ import annotations

import functools

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._ops.quantize._block_outputs import unpacked_output
from precast._ops.quantize._block_validation import check_dequantized_blocks
from precast._ops.quantize._reference_blocks import dequantize_e2m1
from precast._ops.quantize._trace_blocks import LINEAR, dequantize_trace, of_output_dtype
from precast.api_logging import precast_api


def nvfp4_kv_dequantize_reference(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`nvfp4_kv_dequantize` in plain PyTorch on any device.

    Examples
    --------
    >>> import torch
    >>> packed = torch.full((1, 8), 0x72, dtype=torch.uint8)
    >>> scales = torch.full((1, 1), 1.5).to(torch.float8_e4m3fn).view(torch.uint8)
    >>> nvfp4_kv_dequantize_reference(packed, scales, torch.tensor([0.5]))[0, :2]
    tensor([0.7500, 4.5000], dtype=torch.bfloat16)
    """
    values = dequantize_e2m1(fp4_data, block_scales, global_scale, 16, True, 2)
    return values.to(output_dtype or torch.bfloat16)


def _check(export: str, fp4_data: torch.Tensor, block_scales: torch.Tensor) -> None:
    check_dequantized_blocks(export, "fp4_data", fp4_data, "block_scales", block_scales, 16, 2)


def _new_output(fp4_data: torch.Tensor, output_dtype: torch.dtype | None) -> torch.Tensor:
    return unpacked_output(fp4_data, torch.bfloat16 if output_dtype is None else output_dtype)


_NVFP4_KV_DEQUANTIZE = Export(
    "block_dequantize",
    "nvfp4_kv_dequantize",
    "fp4_data:u8[*rows(1-),packed] block_scales:u8 global_scale:f32[.] out!:T=f32|f16|bf16 "
    "enable_pdl:pdl_on",
    reference=nvfp4_kv_dequantize_reference,
    check=_check,
    new={"out": _new_output},
    derived={"output_dtype": lambda out: out.dtype},
)
_TRACE = of_output_dtype(
    functools.partial(
        dequantize_trace,
        description="Dequantised e2m1 in blocks of 16 with linear e4m3 scales and one fp32 scale.",
        reference=nvfp4_kv_dequantize_reference,
        input="fp4_data",
        scales="block_scales",
        global_scale="global_scale",
        block="16",
        layout=LINEAR,
    ),
    "nvfp4_kv_dequantize",
    "bfloat16",
    "float16",
    "float32",
)


@precast_api(trace=_TRACE)
@launches(_NVFP4_KV_DEQUANTIZE)
def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    r"""Dequantise an NVFP4 key-value cache, whose scales are linear.

    .. math:: out = \mathrm{round}((q \cdot s) \cdot g)

    Parameters
    ----------
    fp4_data : torch.Tensor
        ``[..., columns // 2]``, at least 2 dimensions, uint8, contiguous, 16-byte aligned, on a
        CUDA device; columns are a multiple of 16. The first number is in the lower 4 bits.
    block_scales : torch.Tensor
        ``[..., columns // 16]``, the bytes of e4m3, uint8, contiguous, on the device of
        ``fp4_data``.
    global_scale : torch.Tensor
        ``g``, one float32 on the device of ``fp4_data``: the reciprocal of what
        :func:`nvfp4_quantize` was given.
    output_dtype : torch.dtype, optional
        bfloat16, float16 or float32. Default: bfloat16.

    Returns
    -------
    torch.Tensor
        ``[..., columns]``, ``output_dtype``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above.

    Notes
    -----
    The first product is exact, the second one float32, rounded once to nearest even. Allocates its
    result; safe in CUDA graphs; not differentiable. Source: arXiv:2509.25149.

    Examples
    --------
    >>> import torch, precast
    >>> packed = torch.full((1, 8), 0x72, dtype=torch.uint8)
    >>> scales = torch.full((1, 1), 1.5).to(torch.float8_e4m3fn).view(torch.uint8)
    >>> with precast.reference_mode():
    ...     precast.nvfp4_kv_dequantize(packed, scales, torch.tensor([0.5]))[0, :2]
    tensor([0.7500, 4.5000], dtype=torch.bfloat16)
    """
