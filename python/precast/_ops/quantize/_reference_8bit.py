# SPDX-License-Identifier: Apache-2.0
"""8-bit quantisation with a scale in plain PyTorch, bit for bit what the kernels compute.

Source of the format of exponents: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from precast._base.rounding import saturated
from precast._base.torch import torch


def dequant_scale(
    amax: torch.Tensor, eps: float, dtype: torch.dtype | None, power_of_two: bool = False
) -> torch.Tensor:
    """Return ``max(amax, eps)`` by the largest number of ``dtype``, as such or as a power of two.

    The largest number is 448, 57344 or 127, by default that of e4m3; a power of two is rounded up.
    A NaN stays one; a scale that is not finite has no power of two and becomes NaN.
    """
    dtype = dtype or torch.float8_e4m3fn
    largest = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    most = amax.clamp(min=eps)
    # By a tensor: torch multiplies by the reciprocal of a number on a GPU, which rounds twice.
    scale = most / torch.full_like(most, largest)
    if not power_of_two:
        return scale
    exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
    rounded = (exponent << 23).view(torch.float32)
    return torch.where(scale.isfinite(), rounded, torch.nan)


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Round float32 ``x * (1 / scale)`` to nearest even, saturated, by default to e4m3."""
    dtype = dtype or torch.float8_e4m3fn
    y = x * scale.reciprocal()
    if not dtype.is_floating_point:
        return y.round().nan_to_num(nan=0.0).clamp(-128.0, 127.0).to(dtype)
    return saturated(y, dtype)


def row_amax(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude along the last dimension, which is kept; 0 for no elements."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1))
    return x.abs().amax(dim=-1, keepdim=True)


def token_quant(
    x: torch.Tensor, eps: float, dtype: torch.dtype | None, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 rows, and return the scale of each, too."""
    scale = dequant_scale(row_amax(x), eps, dtype, power_of_two)
    return quantize(x, scale, dtype), scale


def group_quant(
    x: torch.Tensor,
    group_size: int,
    eps: float,
    dtype: torch.dtype | None,
    power_of_two: bool = False,
    packed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 rows by groups; with ``packed``, scales are words of four exponents."""
    groups = x.unflatten(-1, (x.shape[-1] // group_size, group_size))
    quantized, scales = token_quant(groups, eps, dtype, power_of_two)
    scales = scales.squeeze(-1)
    return quantized.flatten(-2), pack_exponents(scales) if packed else scales


def pack_exponents(scale: torch.Tensor) -> torch.Tensor:
    """Pack the biased exponents of powers of two, four in an int32, along the last dimension.

    The first is in the lowest byte; a NaN is 255, bytes without a scale are 0.
    """
    exponent = torch.where(scale.isfinite(), scale.view(torch.int32) >> 23, 255)
    exponent = torch.nn.functional.pad(exponent, (0, -scale.shape[-1] % 4))
    return exponent.to(torch.uint8).contiguous().view(torch.int32)


def unpack_exponents(words: torch.Tensor) -> torch.Tensor:
    """Return the powers of two that words of four exponents mean; 255 is NaN."""
    # A copy: one column at another stride counts as contiguous, and yet has no bytes side by side.
    copy = words.clone(memory_format=torch.contiguous_format)
    exponent = copy.view(torch.uint8).to(torch.int32)
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)
    return torch.where(exponent == 255, torch.nan, bits.view(torch.float32))


def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    """Multiply the SiLU of the first half of the last dimension by the second half, in float32."""
    gate, up = input.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
