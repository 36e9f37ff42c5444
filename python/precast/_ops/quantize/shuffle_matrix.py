# SPDX-License-Identifier: Apache-2.0
"""Weights and their scales in the order of TensorRT-LLM's generated GEMM kernels.

Loaders of weights use it. PyTorch indexes; only the tiles of scales have a kernel of this library.
"""

from __future__ import annotations

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.dispatch import check_tensors
from precast._op.docs import documented
from precast._ops.quantize.block_scale_interleave import block_scale_interleave
from precast.api_logging import precast_api


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
    return shuffled_rows("get_shuffle_matrix_a_row_indices", input_tensor, epilogue_tile_m)


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
        Numbers of a scale, 16 or 32.

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
    return shuffled_sf_rows(
        "get_shuffle_matrix_sf_a_row_indices", input_tensor, epilogue_tile_m, num_elts_per_sf
    )


def shuffled_sf_rows(
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
    return shuffled_rows(name, input_tensor, epilogue_tile_m)


def shuffled_rows(name: str, input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
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
def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """Put the rows of a weight in the order that the GEMM kernels of compute capability 10.0 load.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``[rows, columns]``, any dtype, strides and device; rows are a multiple of 32, or of 16
        where ``epilogue_tile_m`` is no multiple of 128.
    epilogue_tile_m : int
        Rows of the tile that the kernel's epilogue writes.

    Returns
    -------
    torch.Tensor
        A new tensor of the same shape, dtype and device, whose row ``i`` is row
        ``precast.utils.get_shuffle_matrix_a_row_indices(...)[i]`` of the input.

    Raises
    ------
    ValueError
        A tensor that is not 2-D, or whose rows are no whole blocks.

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
    rows = shuffled_rows("shuffle_matrix_a", input_tensor, epilogue_tile_m)
    return _taken(input_tensor, rows)


@precast_api
def shuffle_matrix_sf_a(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> torch.Tensor:
    """Put the scales of a weight in the order of its rows, and then in tiles of 128x4.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``[rows, columns]``, linear, uint8 or bfloat16, on a CUDA device; rows are a multiple of
        128.
    epilogue_tile_m : int
        As for :func:`shuffle_matrix_a`.
    num_elts_per_sf : int
        Numbers of a scale, 16 or 32; the result does not depend on it.

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
    rows = shuffled_sf_rows("shuffle_matrix_sf_a", input_tensor, epilogue_tile_m, num_elts_per_sf)
    return block_scale_interleave(_taken(input_tensor, rows))


def _taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        return bits[rows.to(tensor.device)].view(tensor.dtype)
