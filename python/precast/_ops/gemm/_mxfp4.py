# SPDX-License-Identifier: Apache-2.0
"""The order in which kernels load weights of MXFP4: ``include/precast/gemm/mxfp4_weight.cuh``.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.quantize._reference_blocks import e2m1_unpack, ue8m0_values

#: What the columns and the depth of a weight are multiples of.
COLUMNS, DEPTH = 64, 128
#: Numbers of a scale, columns of a band, depth of the 16 bytes of a lane, 16 of the depth in these.
_GROUP, _BAND, _STEP, _PARTS = 32, 16, 64, 4

#: Of each pair of a word: where bits m, e0, e1 and the sign of its first number are, and by how
#: much further those of the second one.
_BITS = (
    ((6, 7, 8, 15), (16, 16, 16, 16)),
    ((2, 3, 4, 11), (16, 16, 16, 16)),
    ((12, 13, 14, 21), (16, 16, 16, -16)),
    ((0, 1, 10, 9), (16, 16, 16, 16)),
)


def _places(pair: int) -> list[int]:
    """Where the bits of a byte are, the low one first: its first number has the lower 4 bits."""
    first, further = _BITS[pair]
    return [*first, *(at + by for at, by in zip(first, further, strict=True))]


def _spread(pair: int, device: torch.device) -> torch.Tensor:
    """The bits of a word ``[256]`` that hold a byte of a pair, int32."""
    byte = torch.arange(256, device=device)
    word = sum(((byte >> bit & 1) << at for bit, at in enumerate(_places(pair))), byte * 0)
    return torch.where(word >= 2**31, word - 2**32, word).int()


def interleave_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return packed e2m1 ``[groups, n, k / 2]`` in the order of the kernels, in the same shape."""
    groups, n, half = weight.shape
    tables = [_spread(pair, weight.device) for pair in range(4)]
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    # Group by group, because indices and words take many times the bytes of a weight.
    for group in range(groups):
        # Band, half of it, column g, step, part, half of the depth, lane's q.
        codes = weight[group].reshape(n // _BAND, 2, 8, 2 * half // _STEP, _PARTS, 2, 4)
        codes = codes.permute(0, 3, 2, 6, 4, 5, 1).reshape(-1, 4).int()
        word = tables[0][codes[:, 0]]
        for pair in range(1, 4):
            word |= tables[pair][codes[:, pair]]
        out[group] = word.view(torch.uint8).view(n, half)
    return out


def separate_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return what :func:`interleave_weight` got."""
    groups, n, half = weight.shape
    word = weight.reshape(-1, 4).contiguous().view(torch.int32)[:, 0]
    codes = [
        sum(((word >> at & 1) << bit for bit, at in enumerate(_places(pair))), word * 0)
        for pair in range(4)
    ]
    # Group, band, step, column g, lane's q, part, half of the depth, half of the band.
    order = torch.stack(codes, -1).byte()
    order = order.view(groups, n // _BAND, 2 * half // _STEP, 8, 4, _PARTS, 2, 2)
    return order.permute(0, 1, 7, 3, 2, 5, 6, 4).reshape(groups, n, half)


def fold_scales(scales: torch.Tensor, group_size: int = _GROUP) -> torch.Tensor:
    """Return scales ``[groups, n, k / group_size]`` in blocks of 64 columns and 128 of the depth.

    A block is ``[rows, 16 bytes]``: the scales of a column for the block's depth, then those of the
    column that is so many rows further, and so on.
    """
    groups, n, depth = scales.shape
    of_depth = DEPTH // group_size
    of_row = 16 // scales.element_size()
    columns = of_row // of_depth
    rows, blocks = COLUMNS // columns, depth // of_depth
    whole = scales.reshape(groups, n // COLUMNS, columns, rows, blocks, of_depth)
    folded = whole.permute(0, 1, 4, 3, 2, 5)
    return folded.reshape(groups, n // COLUMNS, blocks, rows, of_row).contiguous()


def unfold_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return what :func:`fold_scales` got, of bytes."""
    groups, blocks, of_depth = scales.shape[:3]
    of_block = DEPTH // _GROUP
    rows = scales.reshape(groups, blocks, of_depth, _BAND, COLUMNS // _BAND, of_block)
    return rows.permute(0, 1, 4, 3, 2, 5).reshape(groups, COLUMNS * blocks, of_depth * of_block)


def dequantized(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return interleaved weights and scales as float32 ``[groups, n, k]``."""
    values = e2m1_unpack(separate_weight(weight))
    return values * ue8m0_values(unfold_scales(scales)).repeat_interleave(_GROUP, -1)
