# SPDX-License-Identifier: Apache-2.0
"""What reference mode refuses before it writes: what the bindings refuse, in their words.

Alignment and strides are the kernels' own affair; a reference takes any.
"""

from __future__ import annotations

from precast._torch import torch
from precast.errors import OutputShapeError


def check_peer(
    export: str, name: str, tensor: torch.Tensor, input: torch.Tensor, may_be_input: bool = True
) -> None:
    """``tensor``, which is written, is like ``input`` and lies elsewhere, or may be it."""
    _check_device_and_dtype(export, name, tensor, input, input.dtype)
    if tensor.shape != input.shape:
        raise ValueError(
            f"{export}: {name} must have input's shape {[*input.shape]}, got {[*tensor.shape]}"
        )
    _check_elements_apart(export, name, tensor)
    same = tensor.data_ptr() == input.data_ptr() and _strides(tensor) == _strides(input)
    if may_be_input and not same and not _memory_is_apart(tensor, input):
        raise ValueError(
            f"{export}: {name} must be input itself or not overlap its memory; call .clone()"
        )
    if not may_be_input:
        _check_memory_apart(export, name, tensor, input)


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
    _check_elements_apart(export, "out", out)
    _check_memory_apart(export, "out", out, input)


def _check_memory_apart(export: str, name: str, tensor: torch.Tensor, input: torch.Tensor) -> None:
    """``tensor``, which is written, shares no element with ``input``."""
    if not _memory_is_apart(tensor, input):
        raise ValueError(f"{export}: {name} must not overlap input's memory; call .clone()")


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides in the order of the dimensions, of those that have more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


def _layout(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of the dimensions that have more than one element, nearest first."""
    return sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1)


def _extent(layout: list[tuple[int, int]]) -> int:
    return 1 + sum(stride * (size - 1) for stride, size in layout)


def _check_elements_apart(export: str, name: str, out: torch.Tensor) -> None:
    layout = _layout(out)
    if out.numel() and any(s < _extent(layout[:i]) for i, (s, _) in enumerate(layout)):
        raise ValueError(
            f"{export}: {name} must not hold an element twice, got strides {[*out.stride()]} for "
            f"shape {[*out.shape]}"
        )


def _memory_is_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """False where nothing proves it; slices of one packed tensor are told apart by strides."""
    size = a.element_size()
    layouts = _layout(a), _layout(b)
    ends = [t.data_ptr() + _extent(layout) * size for t, layout in zip((a, b), layouts)]
    if not a.numel() or not b.numel() or ends[0] <= b.data_ptr() or ends[1] <= a.data_ptr():
        return True
    strides = [stride for stride, _ in layouts[0]]
    distance, rest = divmod(b.data_ptr() - a.data_ptr(), size)
    if rest or strides != [stride for stride, _ in layouts[1]]:
        return False
    for i, stride in enumerate(strides):
        if stride > 0 and all(far % stride == 0 for far in strides[i:]):
            phase = distance % stride
            if phase >= _extent(layouts[0][:i]) and stride - phase >= _extent(layouts[1][:i]):
                return True
    return False


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
