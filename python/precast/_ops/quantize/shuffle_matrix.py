# SPDX-License-Identifier: Apache-2.0
"""Weights and their scales in the order that GEMM kernels load: shuffled rows, tiles of 128x4.

Loaders of weights use it. PyTorch shuffles rows; only the tiles of scales have a kernel of this
library. Sources: TensorRT-LLM's generated GEMM kernels; cuBLAS, 1D block scaling factors layout.
"""

from __future__ import annotations

import math
from typing import Any

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.dispatch import check_tensors
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.quantize._reference_blocks import place_scales, scale_shape
from precast._ops.quantize.sf_layout import BLOCKS
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var, dispatch


def block_scale_interleave_reference(unswizzled_sf: torch.Tensor) -> torch.Tensor:
    """:func:`block_scale_interleave` in plain PyTorch on any device."""
    experts = unswizzled_sf if unswizzled_sf.dim() == 3 else unswizzled_sf[None]
    placed = [place_scales(scales, 0).flatten() for scales in experts]
    return torch.cat([*placed, unswizzled_sf.new_empty(0)])


def _check(export: str, unswizzled_sf: torch.Tensor, out: torch.Tensor) -> None:
    if not unswizzled_sf.is_contiguous():
        raise ValueError(
            f"{export}: unswizzled_sf must be contiguous, got strides "
            f"{[*unswizzled_sf.stride()]} for shape {[*unswizzled_sf.shape]}; call .contiguous()"
        )
    size = _size(unswizzled_sf)
    if [*out.shape] != [size] or not out.is_contiguous():
        raise ValueError(
            f"{export}: out must be contiguous with shape [{size}], got shape {[*out.shape]} and "
            f"strides {[*out.stride()]}"
        )


def _size(unswizzled_sf: torch.Tensor) -> int:
    """How many scales there are in tiles."""
    shape = unswizzled_sf.shape
    rows, columns = shape[-2:] if len(shape) >= 2 else (0, 0)
    experts = shape[0] if len(shape) == 3 else 1
    return experts * math.prod(scale_shape(rows, columns, 0))


_BLOCK_SCALE_INTERLEAVE = Export(
    "block_scale",
    "block_scale_interleave",
    "unswizzled_sf:T=u8|bf16[*experts(0-1),rows,columns] out!:T enable_pdl:pdl_on",
    reference=block_scale_interleave_reference,
    check=_check,
    new={"out": lambda unswizzled_sf: unswizzled_sf.new_empty((_size(unswizzled_sf),))},
)


def _template(suffix: str, dtype: str) -> TraceTemplate:
    return TraceTemplate(
        op_type="quantization",
        name_prefix=_BLOCK_SCALE_INTERLEAVE.function + suffix,
        description="Block scales in tiles of 128 rows and 4 columns.",
        axes={
            "*experts": Var(sample=2),
            "rows": Const("r"),
            "columns": Const("c"),
            "num_scales": Const(
                abbrev="s",
                value="experts * ((rows + 127) // 128 * 128) * ((columns + 3) // 4 * 4)",
            ),
        },
        inputs={"scales": Tensor(["*experts", "rows", "columns"], "unswizzled_sf", dtype)},
        outputs={"interleaved": Tensor(["num_scales"], dtype=dtype)},
        reference=block_scale_interleave_reference,
    )


_BYTES = _template("", "uint8")
_WIDE = _template("_bf16", "bfloat16")


@dispatch(_BYTES, _WIDE)
def _trace(unswizzled_sf: Any, **others: Any) -> TraceTemplate:
    return _WIDE if unswizzled_sf.dtype == torch.bfloat16 else _BYTES


@precast_api(trace=_trace)
@launches(_BLOCK_SCALE_INTERLEAVE)
@documented(BLOCKS)
def block_scale_interleave(
    unswizzled_sf: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Put block scales into tiles of 128x4, as :attr:`SfLayout.layout_128x4` says.

    Parameters
    ----------
    unswizzled_sf : torch.Tensor
        ``[rows, columns]`` or ``[experts, rows, columns]``, uint8 (the bytes of e4m3 or ue8m0) or
        bfloat16, contiguous, on a CUDA device. Columns that are a multiple of 16 bytes are
        fastest.
    out : torch.Tensor, optional
        Where to write: shape, dtype and device of the result, contiguous, 16-byte aligned, sharing
        no memory with ``unswizzled_sf``. Default: a new tensor.

    Returns
    -------
    torch.Tensor
        One dimension, for each expert rows padded to 128 times columns padded to 4, by zeros; the
        dtype of ``unswizzled_sf``. ``out`` if it is given.

    Notes
    -----
    Also called ``nvfp4_block_scale_interleave``. Allocates only a missing ``out``; safe in CUDA
    graphs; not differentiable. Source: cuBLAS, 1D block scaling factors layout.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.block_scale_interleave(torch.ones(2, 2).byte()).shape
    torch.Size([512])
    """


#: The name that libraries used before.
nvfp4_block_scale_interleave = block_scale_interleave


def get_shuffle_matrix_a_row_indices(
    input_tensor: torch.Tensor, epilogue_tile_m: int
) -> torch.Tensor:
    """Return which row of a weight TensorRT-LLM's generated GEMM kernels want at each place.

    In each block of 32 rows, or of 16 where ``epilogue_tile_m`` is no multiple of 128, row
    ``8 * q + j`` of the result is row ``size / 8 * j + q`` of the block, for ``j < 8``.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``[rows, columns]``, any dtype and device; only its shape is read. Rows are a multiple of
        the block.
    epilogue_tile_m : int
        Rows of the tile that the kernel's epilogue writes.

    Returns
    -------
    torch.Tensor
        ``[rows]``, int64, on the CPU.

    Raises
    ------
    ValueError
        A tensor that is not 2-D, or whose rows are no whole blocks.

    Examples
    --------
    >>> import torch
    >>> get_shuffle_matrix_a_row_indices(torch.empty(16, 1), 64)[:10].tolist()
    [0, 2, 4, 6, 8, 10, 12, 14, 1, 3]
    """
    return _rows("get_shuffle_matrix_a_row_indices", input_tensor, epilogue_tile_m)


@documented(get_shuffle_matrix_a_row_indices)
def get_shuffle_matrix_sf_a_row_indices(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> torch.Tensor:
    """Return the same for the scales of a weight, which go into tiles of 128 rows after it.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``[rows, columns]``, uint8 or bfloat16, any device; rows are a multiple of 128.
    num_elts_per_sf : int
        Numbers of a scale, 16 or 32; the result does not depend on it.

    Raises
    ------
    ValueError
        A dtype, shape or number other than above.

    Examples
    --------
    >>> import torch
    >>> scales = torch.zeros(128, 4, dtype=torch.uint8)
    >>> get_shuffle_matrix_sf_a_row_indices(scales, 128)[:5].tolist()
    [0, 4, 8, 12, 16]
    """
    return _sf_rows(
        "get_shuffle_matrix_sf_a_row_indices", input_tensor, epilogue_tile_m, num_elts_per_sf
    )


def _sf_rows(
    name: str, input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int
) -> torch.Tensor:
    """:func:`get_shuffle_matrix_sf_a_row_indices` with the errors of ``name``."""
    if num_elts_per_sf not in (16, 32):
        raise ValueError(f"{name}: num_elts_per_sf must be 16 or 32, got {num_elts_per_sf}")
    if input_tensor.dtype not in (torch.uint8, torch.bfloat16):
        raise ValueError(
            f"{name}: input_tensor must be uint8 or bfloat16, got {dtype_word(input_tensor.dtype)}"
        )
    if input_tensor.dim() == 2 and input_tensor.shape[0] % 128:
        raise ValueError(
            f"{name}: input_tensor must have a multiple of 128 rows, got {input_tensor.shape[0]}"
        )
    return _rows(name, input_tensor, epilogue_tile_m)


def _rows(name: str, input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """:func:`get_shuffle_matrix_a_row_indices` with the errors of ``name``."""
    if input_tensor.dim() != 2:
        raise ValueError(
            f"{name}: input_tensor must have 2 dimensions, got shape {[*input_tensor.shape]}"
        )
    if epilogue_tile_m <= 0:
        raise ValueError(f"{name}: epilogue_tile_m must be positive, got {epilogue_tile_m}")
    rows = input_tensor.shape[0]
    block = 16 if epilogue_tile_m % 128 else 32
    if rows % block:
        raise ValueError(
            f"{name}: input_tensor must have a multiple of {block} rows for "
            f"epilogue_tile_m={epilogue_tile_m}, got {rows}"
        )
    return torch.arange(rows).view(-1, 8, block // 8).transpose(1, 2).reshape(-1)


@precast_api
@documented(get_shuffle_matrix_a_row_indices)
def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """Put the rows of a weight in the order that the GEMM kernels of compute capability 10.0 load.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``[rows, columns]``, any dtype, strides and device; rows are a multiple of 32, or of 16
        where ``epilogue_tile_m`` is no multiple of 128.

    Returns
    -------
    torch.Tensor
        A new tensor of the same shape, dtype and device, whose row ``i`` is row
        ``precast.utils.get_shuffle_matrix_a_row_indices(...)[i]`` of the input.

    Notes
    -----
    Copies indices to the device: not for CUDA graphs. Not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> precast.shuffle_matrix_a(torch.arange(16).view(16, 1), 64)[:4].flatten()
    tensor([0, 2, 4, 6])
    """
    check_tensors("shuffle_matrix_a", {"input_tensor": input_tensor})
    return _taken(input_tensor, _rows("shuffle_matrix_a", input_tensor, epilogue_tile_m))


@precast_api
@documented(get_shuffle_matrix_sf_a_row_indices)
def shuffle_matrix_sf_a(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> torch.Tensor:
    """Put the scales of a weight in the order of its rows, and then in tiles of 128x4.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``[rows, columns]``, linear, uint8 or bfloat16, on a CUDA device; rows are a multiple of
        128.

    Returns
    -------
    torch.Tensor
        What :func:`block_scale_interleave` makes of the rows in their new order: columns are
        padded to a multiple of 4.

    Raises
    ------
    ValueError
        A dtype, shape or number other than above; a tensor that is not on a CUDA device.

    Notes
    -----
    Copies indices to the device: not for CUDA graphs. Not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> scales = torch.arange(128).to(torch.uint8).view(128, 1)
    >>> with precast.reference_mode():
    ...     precast.shuffle_matrix_sf_a(scales, 128).view(32, 4, 4)[:2, 0, 0]
    tensor([0, 4], dtype=torch.uint8)
    """
    check_tensors("shuffle_matrix_sf_a", {"input_tensor": input_tensor})
    rows = _sf_rows("shuffle_matrix_sf_a", input_tensor, epilogue_tile_m, num_elts_per_sf)
    return block_scale_interleave(_taken(input_tensor, rows))


def _taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        return bits[rows.to(tensor.device)].view(tensor.dtype)
