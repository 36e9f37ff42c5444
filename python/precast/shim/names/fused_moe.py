# SPDX-License-Identifier: Apache-2.0
"""The order in which TensorRT-LLM's mixture of experts loads the rows of its weights.

Engines import these functions when they start and call them while they load weights for kernels of
compute capability 10.0. Source: TensorRT-LLM's generated MoE kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping

from precast._base.torch import torch
from precast._ops.quantize.shuffle_matrix import (
    get_shuffle_matrix_a_row_indices,
    get_shuffle_matrix_sf_a_row_indices,
)


def convert_to_block_layout(input_tensor: torch.Tensor, blockK: int) -> torch.Tensor:  # noqa: N803
    """Put blocks of columns one after the other.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``[rows, columns]``, any dtype and device.
    blockK : int
        Columns of a block, which divide ``columns``.

    Returns
    -------
    torch.Tensor
        A contiguous tensor ``[columns / blockK, rows, blockK]``.

    Raises
    ------
    ValueError
        A tensor that is not 2-D, or columns that are no whole blocks.

    Examples
    --------
    >>> import torch
    >>> convert_to_block_layout(torch.arange(4).view(1, 4), 2).tolist()
    [[[0, 1]], [[2, 3]]]
    """
    if input_tensor.dim() != 2 or blockK <= 0 or input_tensor.shape[1] % blockK:
        raise ValueError(
            f"convert_to_block_layout: input_tensor must have 2 dimensions, the second a multiple "
            f"of blockK={blockK}, got shape {[*input_tensor.shape]}"
        )
    return input_tensor.unflatten(1, (-1, blockK)).transpose(0, 1).contiguous()


def get_reorder_rows_for_gated_act_gemm_row_indices(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of a weight in an order that alternates between its two halves.

    Parameters
    ----------
    x : torch.Tensor
        ``[rows, columns]`` with an even number of rows; only its shape is read.

    Returns
    -------
    torch.Tensor
        ``[rows]``, int64, on the CPU: 0, ``rows / 2``, 1, ``rows / 2 + 1``, ...

    Raises
    ------
    ValueError
        A tensor that is not 2-D or has an odd number of rows.

    Examples
    --------
    >>> import torch
    >>> get_reorder_rows_for_gated_act_gemm_row_indices(torch.empty(6, 1)).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    if x.dim() != 2 or x.shape[0] % 2:
        raise ValueError(
            f"get_reorder_rows_for_gated_act_gemm_row_indices: x must have 2 dimensions and an "
            f"even number of rows, got shape {[*x.shape]}"
        )
    return torch.arange(x.shape[0]).view(2, -1).T.reshape(-1)


def _maybe_get_cached_w3_w1_permute_indices(
    _cache_permute_indices: MutableMapping[Hashable, torch.Tensor],
    dst_w3_w1_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: int | None = None,
    is_gated_act_gemm: bool = True,
) -> torch.Tensor:
    """Return the order of the rows of an expert's first weight, or of its scales.

    Parameters
    ----------
    _cache_permute_indices : mutable mapping
        The engine's cache: the order is kept there, and taken from it for the same arguments.
    dst_w3_w1_weight : torch.Tensor
        ``[rows, columns]``, gate and up projection one below the other; only shape and device are
        read.
    epilogue_tile_m : int
        Rows of the tile that the kernel's epilogue writes.
    num_elts_per_sf : int, optional
        16 or 32: the tensor has scales of so many numbers.
    is_gated_act_gemm : bool
        Whether the two projections alternate. Default: True.

    Returns
    -------
    torch.Tensor
        ``[rows]``, int64, on the device of the weight.
    """

    def order() -> torch.Tensor:
        shuffled = _shuffled(dst_w3_w1_weight, epilogue_tile_m, num_elts_per_sf)
        if not is_gated_act_gemm:
            return shuffled
        return get_reorder_rows_for_gated_act_gemm_row_indices(dst_w3_w1_weight)[shuffled]

    key = ("w3_w1", epilogue_tile_m, num_elts_per_sf, is_gated_act_gemm)
    return _cached(_cache_permute_indices, key, dst_w3_w1_weight, order)


def get_w2_permute_indices_with_cache(
    _cache_permute_indices: MutableMapping[Hashable, torch.Tensor],
    dst_w2_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: int | None = None,
    is_gated_act_gemm: bool | None = None,
) -> torch.Tensor:
    """Return the order of the rows of an expert's second weight, or of its scales.

    Parameters
    ----------
    _cache_permute_indices : mutable mapping
        As above.
    dst_w2_weight : torch.Tensor
        ``[rows, columns]``; only shape and device are read.
    epilogue_tile_m : int
        As above.
    num_elts_per_sf : int, optional
        As above.
    is_gated_act_gemm : bool, optional
        Without effect on the order.

    Returns
    -------
    torch.Tensor
        ``[rows]``, int64, on the device of the weight.
    """
    key = ("w2", epilogue_tile_m, num_elts_per_sf)
    return _cached(
        _cache_permute_indices,
        key,
        dst_w2_weight,
        lambda: _shuffled(dst_w2_weight, epilogue_tile_m, num_elts_per_sf),
    )


def _shuffled(weight: torch.Tensor, tile: int, num_elts_per_sf: int | None) -> torch.Tensor:
    if num_elts_per_sf is None:
        return get_shuffle_matrix_a_row_indices(weight, tile)
    return get_shuffle_matrix_sf_a_row_indices(weight, tile, num_elts_per_sf)


def _cached(
    cache: MutableMapping[Hashable, torch.Tensor],
    key: tuple[Hashable, ...],
    weight: torch.Tensor,
    order: Callable[[], torch.Tensor],
) -> torch.Tensor:
    whole = (*key, weight.shape, weight.device)
    if whole not in cache:
        cache[whole] = order().to(weight.device)
    return cache[whole]
