# SPDX-License-Identifier: Apache-2.0
"""What reference mode refuses before it writes: what the bindings refuse, in their words.

Alignment and strides are the kernels' own affair; a reference takes any.
"""

from __future__ import annotations

from precast._torch import torch
from precast.errors import OutputShapeError


def check_peer(export: str, name: str, tensor: torch.Tensor, input: torch.Tensor) -> None:
    """``tensor`` has the device, dtype and shape of ``input``."""
    _check_device_and_dtype(export, name, tensor, input, input.dtype)
    if tensor.shape != input.shape:
        raise ValueError(
            f"{export}: {name} must have input's shape {[*input.shape]}, got {[*tensor.shape]}"
        )


def check_rank(export: str, input: torch.Tensor) -> None:
    """``input`` is rows, or heads of rows."""
    if not 2 <= input.dim() <= 3:
        raise ValueError(f"{export}: input must have 2 to 3 dimensions, got shape {[*input.shape]}")


def check_vector(
    export: str, name: str, tensor: torch.Tensor, input: torch.Tensor, dtype: torch.dtype
) -> None:
    """``tensor`` is 1-D, as long as the last dimension of ``input``."""
    _check_device_and_dtype(export, name, tensor, input, dtype)
    if tensor.shape != input.shape[-1:]:
        raise ValueError(
            f"{export}: {name} must have shape {[*input.shape[-1:]]}, got {[*tensor.shape]}"
        )


def check_half(export: str, out: torch.Tensor, input: torch.Tensor) -> None:
    """``out`` has the shape of ``input`` with half the last dimension, and its dtype."""
    if input.dim() == 0:
        raise ValueError(f"{export}: input must have a last dimension, got []")
    if input.shape[-1] % 2:
        raise ValueError(f"{export}: input's last dimension must be even, got {input.shape[-1]}")
    _check_device_and_dtype(export, "out", out, input, input.dtype)
    if out.shape != (*input.shape[:-1], input.shape[-1] // 2):
        raise OutputShapeError(
            f"{export}: out must have input's shape with half the last dimension, got "
            f"{[*out.shape]} for input {[*input.shape]}"
        )


def check_other_memory(export: str, residual: torch.Tensor, input: torch.Tensor) -> None:
    """Both are written, so they must not be one tensor."""
    if input.numel() and residual.data_ptr() == input.data_ptr():
        raise ValueError(f"{export}: residual must not be the input's memory: both are written")


def _check_device_and_dtype(
    export: str, name: str, tensor: torch.Tensor, input: torch.Tensor, dtype: torch.dtype
) -> None:
    if tensor.device != input.device:
        raise ValueError(
            f"{export}: {name} must be on {input.device} as input, got {tensor.device}"
        )
    if tensor.dtype != dtype:
        wanted, got = (str(d).removeprefix("torch.") for d in (dtype, tensor.dtype))
        raise ValueError(f"{export}: {name} must be {wanted}, got {got}")
