# SPDX-License-Identifier: Apache-2.0
"""What the products of e4m3 matrices with scales of blocks share: reference, checks, layouts.

The checks are those of reference mode, in the words of the bindings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from precast._base.device import is_hopper
from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.export import Export
from precast._ops.gemm._tuned import adaptation
from precast._ops.quantize._reference_blocks import ue8m0_values

BLOCK, DEPTH_MULTIPLE, COLUMN_MULTIPLE = 128, 16, 8
#: The largest sizes: kernels number rows with 32 bits.
MAX_DEPTH, MAX_ROWS = 2**31 - 1 - BLOCK, 2**31 - 1 - 512
#: Pairs of a tile and a kind of cluster, and kinds of clusters: ``kNumFp8Choices`` and
#: ``kNumSm90Clusters`` of ``choose.cuh``.
CHOICES, CLUSTERS = 84, 6
#: The tiles of the kernels for every GPU: ``kNumGemmTiles`` of ``gemm_tiles.cuh``.
MMA_TILES = 4
#: Sizes of clusters of the kernel in CuTe DSL.
CUTE_CHOICES = 2
#: The backend that takes the kernels for every GPU where there are others.
MMA = "mma"
#: Row strides and addresses of operands and outputs are multiples of so many bytes.
ROW_BYTES = 16
#: Whether the scales of `a` and `b` have the depth in their last dimension, by
#: ``scale_major_mode`` and by FlashInfer's backend where that decides.
K_MAJOR = {"K": (True, True), "MN": (False, False), None: (True, False)}
_BACKENDS = ("cutlass", "trtllm", "cutile", MMA)


def _blocks(size: int, block: int = BLOCK) -> int:
    return -(-size // block)


def unpacked(scales: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return scales of ``blocks`` of the depth, the last dimension, in float32.

    Packed ones are int32 of four biased exponents each, the first one in the lowest byte.
    """
    if scales.dtype != torch.int32:
        return scales
    shifts = torch.arange(0, 32, 8, device=scales.device)
    exponents = scales[..., None] >> shifts & 255
    return ue8m0_values(exponents.flatten(-2)[..., :blocks])


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    a_scale_rows: int,
) -> torch.Tensor:
    """``a @ b.T`` in float32: sums of 128 of the depth, each scaled and then added in order.

    Parameters
    ----------
    a_scale : torch.Tensor
        ``[row blocks of a, depth blocks]``; packed, int32 of four depth blocks each.
    b_scale : torch.Tensor
        ``[row blocks of b, depth blocks]``, of 128 rows each; packed, also of each row.
    a_scale_rows : int
        The rows of ``a`` that have one scale.
    """
    blocks = _blocks(a.shape[1])
    of_row = unpacked(a_scale, blocks).repeat_interleave(a_scale_rows, 0)[: a.shape[0]]
    of_column = unpacked(b_scale, blocks)
    if len(of_column) < len(b):
        of_column = of_column.repeat_interleave(BLOCK, 0)[: len(b)]
    sums = a.new_zeros(a.shape[0], b.shape[0], dtype=torch.float32)
    for i in range(of_row.shape[1]):
        depth = slice(i * BLOCK, (i + 1) * BLOCK)
        product = a[:, depth].float() @ b[:, depth].float().T
        sums += product * (of_row[:, i, None] * of_column[None, :, i])
    return sums


def _check_rows(export: str, name: str, tensor: torch.Tensor) -> None:
    """Rows are contiguous and start at different multiples of 16 bytes."""
    strides, shape = tensor.stride(), tensor.shape
    if shape[-1] > 1 and strides[-1] != 1:
        raise ValueError(
            f"{export}: {name} must have stride 1 in its last dimension, got strides "
            f"{[*strides]}; call .contiguous()"
        )
    if tensor.numel() and any(
        n > 1 and (s <= 0 or s * tensor.element_size() % ROW_BYTES)
        for s, n in zip(strides[:-1], shape[:-1])
    ):
        raise ValueError(
            f"{export}: {name} must have rows that start at different multiples of {ROW_BYTES} "
            f"bytes, got strides {[*strides]}; pad the rows"
        )


def _check_scales(
    export: str,
    name: str,
    scales: torch.Tensor,
    groups: tuple[int, ...],
    rows: int,
    depth: int,
    k_major: bool,
    each_row: int = -1,
) -> None:
    """``rows`` are the blocks of rows, ``groups`` none or their number.

    Packed scales may also be of each row.
    """
    packed = scales.dtype == torch.int32
    blocks = _blocks(depth, 4 * BLOCK if packed else BLOCK)
    if packed and scales.dim() >= 2 and scales.shape[-2 if k_major else -1] == each_row:
        rows = each_row
    shape = [*groups, rows, blocks] if k_major else [*groups, blocks, rows]
    if list(scales.shape) != shape:
        raise ValueError(f"{export}: {name} must have shape {shape}, got {[*scales.shape]}")


def check_product(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    a_scale_k_major: bool = True,
    b_scale_k_major: bool = True,
    a_scale_rows: int = 1,
    choice: int = -1,
    choices: Collection[int] = range(CHOICES),
) -> None:
    """Raise what all functions refuse; dtypes, and shapes but those of scales, are checked.

    Parameters
    ----------
    choices : collection of int
        Those that are legal for this kind of tokens: ``is_legal()`` of ``sm90/choose.cuh``, or the
        tiles of the kernels for every GPU.
    """
    (rows, depth), columns = a.shape[-2:], b.shape[-2]
    if not 0 < depth <= MAX_DEPTH or depth % DEPTH_MULTIPLE:
        raise ValueError(
            f"{export}: a must have a positive multiple of {DEPTH_MULTIPLE} columns, got shape "
            f"{[*a.shape]}"
        )
    if columns % COLUMN_MULTIPLE or columns > MAX_ROWS:
        raise ValueError(
            f"{export}: b must have a multiple of {COLUMN_MULTIPLE} rows, got shape {[*b.shape]}"
        )
    if rows > MAX_ROWS:
        raise ValueError(f"{export}: a must have at most {MAX_ROWS} rows, got shape {[*a.shape]}")
    if a_scale_rows not in (1, BLOCK):
        raise ValueError(f"{export}: a_scale_rows must be 1 or {BLOCK}, got {a_scale_rows}")
    if choice >= 0 and choice not in choices:
        legal = {
            MMA_TILES: f"a tile below {MMA_TILES}",
            CUTE_CHOICES: "0 for clusters of one CTA or 1 for clusters of two",
        }.get(len(choices), f"a tile and cluster for this kind of tokens below {CHOICES}")
        raise ValueError(f"{export}: choice must be -1 or {legal}, got {choice}")
    _check_rows(export, "a", a)
    _check_rows(export, "b", b)
    groups = tuple(b.shape[:-2])
    of_a = groups if a.dim() == 3 else ()
    if b_scale.dtype != a_scale.dtype:
        raise ValueError(
            f"{export}: b_scale must be {dtype_word(a_scale.dtype)}, as a_scale is, got "
            f"{dtype_word(b_scale.dtype)}"
        )
    a_rows, b_rows = _blocks(rows, a_scale_rows), _blocks(columns)
    _check_scales(export, "a_scale", a_scale, of_a, a_rows, depth, a_scale_k_major)
    _check_scales(export, "b_scale", b_scale, groups, b_rows, depth, b_scale_k_major, columns)
    _check_rows(export, "out", out)


def exports(
    name: str,
    declaration: str,
    check: Callable[..., None],
    choices: Collection[int] = range(CHOICES),
    **options: Any,
) -> tuple[Export, Export]:
    """Return a function's export of the kernels for every GPU, and that of those for Hopper.

    ``check`` takes the legal choices as ``choices``, as :func:`check_product` does.
    """
    of_every, of_sm90 = (
        functools.partial(check, choices=legal) for legal in (range(MMA_TILES), choices)
    )
    options_of_sm90 = {
        **options,
        "check": of_sm90,
        "function": name,
        "adapt": adaptation(name),
    }
    return (
        Export("fp8_gemm", name, declaration, check=of_every, **options),
        Export("fp8_gemm_sm90", f"{name}_sm90", declaration, **options_of_sm90),
    )


def chosen(both: tuple[Export, Export], a: torch.Tensor, backend: str) -> Export:
    """Of what :func:`exports` returns, the one for the GPU of ``a``, or that of the backend."""
    return both[1 if backend != MMA and is_hopper(a.device) else 0]


def scale_layout(
    export: str,
    scale_major_mode: str | None,
    scale_granularity_mnk: tuple[int, int, int],
    mma_sm: int = 1,
    backend: str = "cutlass",
    rows: Collection[int] = (1, BLOCK),
) -> tuple[bool, bool, int]:
    """Return whether the scales of ``a`` and ``b`` are K-major, and the rows of ``a`` with one.

    Raises ValueError for options that are not legal; ``rows`` are the legal numbers of rows.
    """
    usual = mma_sm == 1 and backend == "cutlass" and scale_granularity_mnk == (1, BLOCK, BLOCK)
    if usual and (scale_major_mode == "K" or scale_major_mode == "MN"):
        return *K_MAJOR[scale_major_mode], 1
    if backend not in _BACKENDS:
        raise ValueError(
            f"{export}: backend must be one of {', '.join(map(repr, _BACKENDS))}, got {backend!r}"
        )
    if not isinstance(scale_major_mode, str | None) or scale_major_mode not in K_MAJOR:
        raise ValueError(
            f"{export}: scale_major_mode must be 'MN' or 'K', got {scale_major_mode!r}"
        )
    if scale_major_mode is None and backend in ("cutlass", MMA):
        raise ValueError(
            f"{export}: scale_major_mode must be 'MN' or 'K' with backend={backend!r}, got None"
        )
    if mma_sm not in (1, 2):
        raise ValueError(f"{export}: mma_sm must be 1 or 2, got {mma_sm!r}")
    legal = [(count, BLOCK, BLOCK) for count in rows]
    is_list = isinstance(scale_granularity_mnk, tuple | list)
    if not is_list or tuple(scale_granularity_mnk) not in legal:
        raise ValueError(
            f"{export}: scale_granularity_mnk must be {' or '.join(map(str, legal))}, got "
            f"{scale_granularity_mnk!r}"
        )
    if scale_major_mode is None and backend == "cutile":
        scale_major_mode = "K"
    return *K_MAJOR[scale_major_mode], scale_granularity_mnk[0]
