# SPDX-License-Identifier: Apache-2.0
"""Questions about devices; each answer is kept per device, and is false without a GPU.

Also the orders of rows that GEMM kernels of compute capability 10.0 want. The decorators of ops,
their error, and words of attention, which engines expect here too, come from their own modules.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

from precast._base.errors import BackendSupportedError as BackendSupportedError
from precast._base.torch import torch
from precast._op.decorators import backend_requirement as backend_requirement
from precast._op.decorators import supported_compute_capability as supported_compute_capability
from precast._ops.attention.buffers import _cache_buf as _cache_buf
from precast._ops.attention.buffers import _ceil_pow2 as _ceil_pow2
from precast._ops.attention.buffers import _get_range_buf as _get_range_buf
from precast._ops.attention.buffers import get_alibi_slopes as get_alibi_slopes
from precast._ops.attention.enums import MaskMode as MaskMode
from precast._ops.attention.enums import PosEncodingMode as PosEncodingMode
from precast._ops.attention.enums import TensorLayout as TensorLayout
from precast._ops.attention.validation import canonicalize_torch_dtype as canonicalize_torch_dtype

__all__ = [
    "device_support_pdl",
    "get_compute_capability",
    "get_device_sm_count",
    "get_shuffle_matrix_a_row_indices",
    "get_shuffle_matrix_sf_a_row_indices",
    "is_sm12x_supported",
    "is_sm90a_supported",
    "is_sm100a_supported",
]

if TYPE_CHECKING:
    Device: TypeAlias = "torch.device | str | int | None"


def device_index(device: Device = None) -> int:
    """The index of a CUDA device; None is the current one.

    Raises
    ------
    ValueError
        If ``device`` is not a CUDA device.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    if device is None:
        return int(torch.cuda.current_device())
    place: torch.device = torch.device(device)
    if place.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {place}")
    return int(torch.cuda.current_device()) if place.index is None else int(place.index)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return int(major), int(minor)


def get_compute_capability(device: Device = None) -> tuple[int, int]:
    """``(major, minor)`` of a CUDA device, ``(9, 0)`` on an H200.

    Raises
    ------
    ValueError
        If ``device`` is not a CUDA device.
    RuntimeError
        If there is no GPU.
    """
    return _capability(device_index(device))


def _major(device: Device) -> int:
    if not torch.cuda.is_available():
        return 0
    try:
        return get_compute_capability(device)[0]
    except ValueError:
        return 0


def is_sm90a_supported(device: Device = None) -> bool:
    """Whether the device is of the Hopper generation (9.0)."""
    return _major(device) == 9


def is_sm100a_supported(device: Device = None) -> bool:
    """Whether the device is a data-centre Blackwell (10.x)."""
    return _major(device) == 10


def is_sm12x_supported(device: Device = None) -> bool:
    """Whether the device is a desktop or workstation Blackwell (12.x)."""
    return _major(device) == 12


def device_support_pdl(device: Device = None) -> bool:
    """Whether kernels may start before their predecessor ends (capability 9.0 and later)."""
    return _major(device) >= 9


@functools.cache
def _sm_count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def get_device_sm_count(device: Device = None) -> int:
    """Streaming multiprocessors of the device; 0 without a GPU."""
    return _sm_count(device_index(device)) if torch.cuda.is_available() else 0


def get_shuffle_matrix_a_row_indices(
    input_tensor: torch.Tensor, epilogue_tile_m: int
) -> torch.Tensor:
    """Which row of a weight comes to each place for TensorRT-LLM's generated GEMM kernels.

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


def get_shuffle_matrix_sf_a_row_indices(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> torch.Tensor:
    """The same for the scales of a weight, which go into tiles of 128 rows after it.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``[rows, columns]``, uint8 or bfloat16, any device; rows are a multiple of 128.
    epilogue_tile_m : int
        As for :func:`get_shuffle_matrix_a_row_indices`.
    num_elts_per_sf : int
        Numbers of a scale, 16 or 32.

    Returns
    -------
    torch.Tensor
        ``[rows]``, int64, on the CPU.

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
        got = str(input_tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name}: input_tensor must be uint8 or bfloat16, got {got}")
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
