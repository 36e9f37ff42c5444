# SPDX-License-Identifier: Apache-2.0
"""Weights and their scales in the order of TensorRT-LLM's generated GEMM kernels.

For loaders of weights: indexing by PyTorch, no kernel of this library but the tiles of scales.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.dispatch import check_tensors
from precast._ops.quantize.block_scale_interleave import block_scale_interleave
from precast._ops.quantize.row_shuffle import shuffled_rows, shuffled_sf_rows
from precast.api_logging import precast_api


@precast_api
def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """Rows of a weight in the order that the GEMM kernels of compute capability 10.0 load.

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
    """Scales of a weight in the order of its rows, and then in tiles of 128x4.

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
