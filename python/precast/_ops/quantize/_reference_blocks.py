# SPDX-License-Identifier: Apache-2.0
"""e2m1, ue8m0 and the layouts of scales in plain PyTorch, for the references.

Layouts are plain numbers, those of :class:`SfLayout`, because a trace cannot import the class.
"""

from __future__ import annotations

import math

from precast._base.rounding import saturated
from precast._base.torch import torch


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Convert fp32 to e2m1 bits in uint8: to nearest even, saturated; NaN becomes 6."""
    a = torch.where(x.isnan(), 6.0, x.abs())
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for odd_is_above in (0.25, 1.25, 2.5, 5.0):
        codes += a > odd_is_above
    for even_is_from in (0.75, 1.75, 3.5):
        codes += a >= even_is_from
    return codes | ((x.signbit() & ~x.isnan()).to(torch.uint8) << 3)


def e2m1_pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack the bits of two elements into a byte, the first in the lower 4 bits."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def e2m1_unpack(packed: torch.Tensor) -> torch.Tensor:
    """Convert packed bytes to fp32, with twice as many elements in the last dimension."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor(magnitudes + [-m for m in magnitudes], device=packed.device)
    return values[codes.long()]


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Convert fp32 to float8_e4m3fn, saturated, with one NaN for all."""
    return saturated(torch.where(x.isnan(), float("nan"), x), torch.float8_e4m3fn)


def ue8m0_round_up(amax: torch.Tensor, exponent: int, mantissa: float) -> torch.Tensor:
    """Return the least scale with ``amax <= scale * mantissa * 2**exponent``, as its byte in int32.

    Infinity gives 254.
    """
    fraction, power = torch.frexp(amax)  # fraction in [0.5, 1)
    least = power - 1 - exponent + (2 * fraction > mantissa).to(torch.int32)
    scale = torch.where(amax == 0, 0, (least + 127).clamp(min=0))
    return torch.where(amax.isinf(), 254, scale)


def ue8m0_values(scales: torch.Tensor) -> torch.Tensor:
    """Convert bytes of ue8m0 to fp32; 255 is NaN."""
    values = torch.ldexp(torch.ones_like(scales, dtype=torch.float64), scales.int() - 127).float()
    return torch.where(scales == 255, float("nan"), values)


def scale_shape(rows: int, columns: int, layout: int) -> tuple[int, int]:
    """Return the rows and columns of a layout with their padding."""
    if layout == 2:
        return rows, columns
    tile = 128 if layout == 0 else 8
    return (rows + tile - 1) // tile * tile, (columns + 3) // 4 * 4


def scale_offsets(rows: int, columns: int, layout: int, device: torch.device) -> torch.Tensor:
    """Return the offset in memory of the scale of each row and column."""
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(columns, device=device)[None]
    if layout == 2:
        return row * columns + column
    tiles = (columns + 3) // 4
    if layout == 1:
        return (row // 8 * tiles + column // 4) * 32 + row % 8 * 4 + column % 4
    place = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    return (row // 128 * tiles + column // 4) * 512 + place


def place_scales(scales: torch.Tensor, layout: int) -> torch.Tensor:
    """Put ``[rows, columns]`` in a layout's order, with zeros in its padding."""
    rows, columns = scales.shape
    placed = scales.new_zeros(scale_shape(rows, columns, layout))
    placed.view(-1)[scale_offsets(rows, columns, layout, scales.device)] = scales
    return placed


def gather_scales(scales: torch.Tensor, rows: int, columns: int, layout: int) -> torch.Tensor:
    """Undo :func:`place_scales`."""
    return scales.reshape(-1)[scale_offsets(rows, columns, layout, scales.device)]


def block_maxima(blocks: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude along the last dimension; NaN is left out."""
    return torch.where(blocks.isnan(), 0.0, blocks.abs()).amax(dim=-1)


def in_blocks(input: torch.Tensor, block: int) -> torch.Tensor:
    """Reshape to fp32 ``[rows, blocks, block]``."""
    rows = math.prod(input.shape[:-1])
    return input.reshape(rows, input.shape[-1] // block, block).float()


def quantize_e2m1(
    input: torch.Tensor,
    layout: int,
    global_scale: torch.Tensor | None = None,
    inverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed e2m1 in the shape of ``input``, and scales in the order of the layout.

    With a global scale that is NVFP4, without one MXFP4.
    """
    if global_scale is None:
        x = in_blocks(input, 32)
        exponents = ue8m0_round_up(block_maxima(x), 2, 1.5)
        scales, multiplier = exponents.to(torch.uint8), ue8m0_values(254 - exponents)
    else:
        x = in_blocks(input, 16)
        g = global_scale.float().reshape(-1, 1)
        if inverse:
            g = 1.0 / g
        scales = e4m3(g * (block_maxima(x) * (1.0 / 6.0)))
        value = scales.float()
        multiplier = (1.0 / (value * (1.0 / g))).clamp(max=torch.finfo(torch.float32).max)
        multiplier = torch.where(value == 0, 0.0, multiplier)
    packed = e2m1_pack(e2m1_codes(x * multiplier[..., None]))
    shape = (*input.shape[:-1], input.shape[-1] // 2)
    return packed.reshape(shape), place_scales(scales.view(torch.uint8), layout)


def dequantize(
    elements: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor | None, block: int
) -> torch.Tensor:
    """Multiply fp32 elements by their block's fp32 scales ``[rows, blocks]`` and by one number."""
    rows = elements.reshape(scales.shape[0], scales.shape[1], block)
    values = (rows * scales[..., None]).reshape(elements.shape)
    return values if global_scale is None else values * global_scale.float().reshape(())


def dequantize_blocks(
    elements: torch.Tensor,
    scales: torch.Tensor,
    block: int,
    layout: int,
    e4m3_scales: bool = False,
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply fp32 elements by their scales, given as bytes, and by one number."""
    rows = math.prod(elements.shape[:-1])
    placed = gather_scales(scales, rows, elements.shape[-1] // block, layout)
    values = placed.view(torch.float8_e4m3fn).float() if e4m3_scales else ue8m0_values(placed)
    return dequantize(elements, values, global_scale, block)
