# SPDX-License-Identifier: Apache-2.0
"""The order in which kernels load weights of 4 bits: ``include/precast/gemm/w4_weight.cuh``.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._op.validation import check_contiguous
from precast._ops.gemm._plain import Limits, check_sizes, check_tma
from precast._ops.quantize._reference_blocks import e2m1_unpack, ue8m0_values
from precast.trace import Const, Tensor, TraceTemplate, Var

#: What the columns and the depth of a weight are multiples of.
COLUMNS, DEPTH = 64, 128
#: The tiles of the kernels for Hopper: ``kW4Tiles`` of ``gemm/sm90/w4_tile.cuh``.
SM90_TILES = 6
#: Columns of a band, depth of the 16 bytes of a lane, 16 of the depth in these.
_BAND, _STEP, _PARTS = 16, 64, 4

_Bits = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]
#: The order of a format of 4 bits. First, for each pair of numbers of a word: where the four bits
#: of its first number are, the lowest one first, and by how much further those of the second one.
#: Then the bits of a byte that are stored inverted. Plain numbers, because a trace cannot import a
#: class.
Order = tuple[tuple[_Bits, _Bits, _Bits, _Bits], int]

MXFP4: Order = (
    (
        ((6, 7, 8, 15), (16, 16, 16, 16)),
        ((2, 3, 4, 11), (16, 16, 16, 16)),
        ((12, 13, 14, 21), (16, 16, 16, -16)),
        ((0, 1, 10, 9), (16, 16, 16, 16)),
    ),
    0,
)
_FURTHER = 16, 16, 16, 16
INT4: Order = (
    (
        ((0, 1, 2, 3), _FURTHER),
        ((4, 5, 6, 7), _FURTHER),
        ((8, 9, 10, 11), _FURTHER),
        ((12, 13, 14, 15), _FURTHER),
    ),
    0x88,  # which makes int4 + 8 of a number
)
#: Numbers of a scale.
MXFP4_GROUP, INT4_GROUP = 32, 128


def grouped_template(
    name: str,
    words: str,
    scale: tuple[int, str],
    reference: Callable[..., Any],
    fill: Callable[[dict[str, Any]], None],
) -> TraceTemplate:
    """Describe a product of groups to traces; ``scale``: the sides of a block of scales, dtype."""
    sides, scale_dtype = scale
    blocks = ["num_groups", "column_blocks", "depth_blocks", "block_rows", "block_rows"]
    return TraceTemplate(
        op_type="grouped_gemm",
        name_prefix=name,
        description=f"Multiplies groups of rows by the {words} weights of their groups.",
        axes={
            "num_tokens": Var("Rows of a.", sample=64),
            "num_groups": Const("g", sample=4),
            "num_starts": Const("", value="num_groups + 1"),
            "num_columns": Const("n", multiple=COLUMNS),
            "column_blocks": Const("", value=f"num_columns // {COLUMNS}"),
            "depth": Const("k", multiple=DEPTH),
            "depth_blocks": Const("", value=f"depth // {DEPTH}"),
            "depth_bytes": Const("", value="depth // 2"),
            "block_rows": Const("", value=str(sides)),
        },
        inputs={
            "a": Tensor(["num_tokens", "depth"], dtype="bfloat16"),
            "b": Tensor(["num_groups", "num_columns", "depth_bytes"], dtype="uint8"),
            "b_scale": Tensor(blocks, dtype=scale_dtype),
            "m_indptr": Tensor(["num_starts"], dtype="int32"),
        },
        outputs={"result": Tensor(["num_tokens", "num_columns"], dtype="bfloat16")},
        reference=reference,
        tags=["moe"],
        fill=fill,
    )


def _places(bits: _Bits) -> list[int]:
    """Where the bits of a byte are, the low one first: its first number has the lower 4 bits."""
    first, further = bits
    return [*first, *(at + by for at, by in zip(first, further, strict=True))]


def _spread(bits: _Bits, inverted: int, device: torch.device) -> torch.Tensor:
    """The bits of a word ``[256]`` that hold a byte of a pair, int32."""
    byte = torch.arange(256, device=device) ^ inverted
    word = sum(((byte >> bit & 1) << at for bit, at in enumerate(_places(bits))), byte * 0)
    return torch.where(word >= 2**31, word - 2**32, word).int()


def interleave_weight(weight: torch.Tensor, order: Order) -> torch.Tensor:
    """Return packed numbers ``[groups, n, k / 2]`` in the order of the kernels, of one shape."""
    groups, n, half = weight.shape
    pairs, inverted = order
    tables = [_spread(bits, inverted, weight.device) for bits in pairs]
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


def separate_weight(weight: torch.Tensor, order: Order) -> torch.Tensor:
    """Return what :func:`interleave_weight` got."""
    groups, n, half = weight.shape
    pairs, inverted = order
    word = weight.reshape(-1, 4).contiguous().view(torch.int32)[:, 0]
    codes = [
        sum(((word >> at & 1) << bit for bit, at in enumerate(_places(bits))), word * 0)
        for bits in pairs
    ]
    # Group, band, step, column g, lane's q, part, half of the depth, half of the band.
    each = torch.stack(codes, -1).byte() ^ inverted
    each = each.view(groups, n // _BAND, 2 * half // _STEP, 8, 4, _PARTS, 2, 2)
    return each.permute(0, 1, 7, 3, 2, 5, 6, 4).reshape(groups, n, half)


def fold_scales(scales: torch.Tensor, group_size: int) -> torch.Tensor:
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


def unfold_scales(scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return what :func:`fold_scales` got."""
    groups, blocks, of_depth, rows, of_row = scales.shape
    of_block = DEPTH // group_size
    each = scales.reshape(groups, blocks, of_depth, rows, of_row // of_block, of_block)
    return each.permute(0, 1, 4, 3, 2, 5).reshape(groups, COLUMNS * blocks, of_depth * of_block)


def int4_unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return packed int4 numbers as float32, two for each byte, the lower 4 bits first."""
    numbers = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.int8)
    return ((numbers ^ 8) - 8).float()


def dequantized(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return interleaved weights and scales of MXFP4 as float32 ``[groups, n, k]``."""
    values = e2m1_unpack(separate_weight(weight, MXFP4))
    each = ue8m0_values(unfold_scales(scales, MXFP4_GROUP))
    return values * each.repeat_interleave(MXFP4_GROUP, -1)


def dequantized_int4(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The same of int4."""
    values = int4_unpack(separate_weight(weight, INT4))
    each = unfold_scales(scales, INT4_GROUP).float()
    return values * each.repeat_interleave(INT4_GROUP, -1)


def check_w4(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
    tactic: int,
    limits: Limits,
) -> None:
    """What the declaration of a product with such a weight cannot say."""
    check_contiguous(export, b=b, b_scale=b_scale, m_indptr=m_indptr)
    for what, t, size, multiple, things in (
        ("a", a, a.shape[1], DEPTH, "columns"),
        ("b", b, b.shape[1], COLUMNS, "rows"),
    ):
        if size % multiple or (what == "a" and size == 0):
            legal = "a positive multiple" if what == "a" else "a multiple"
            raise ValueError(
                f"{export}: {what} must have {legal} of {multiple} {things}, got shape "
                f"{[*t.shape]}; pad with zeros"
            )
    if limits.by_tma:
        check_tma(export, "a", a, "b", b, True)
    check_sizes(export, "a", a, out, tactic, limits)
