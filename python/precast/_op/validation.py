# SPDX-License-Identifier: Apache-2.0
"""What reference mode refuses before it writes: what the bindings refuse, in their words.

Alignment and strides are the kernels' own affair; a reference takes any.
"""

from __future__ import annotations

from precast._base.dtypes import dtype_word
from precast._base.errors import OutputShapeError
from precast._base.torch import torch


def check_peer(
    export: str,
    name: str,
    tensor: torch.Tensor,
    peer: torch.Tensor,
    peer_name: str,
    may_be_peer: bool = True,
) -> None:
    """``tensor``, which is written, has the shape of ``peer`` and memory of its own, or is it."""
    check_same_device(export, name, tensor, peer, peer_name)
    if tensor.shape != peer.shape:
        raise ValueError(
            f"{export}: {name} must have {peer_name}'s shape {[*peer.shape]}, got {[*tensor.shape]}"
        )
    check_elements_apart(export, name, tensor)
    same = (
        tensor.data_ptr() == peer.data_ptr()
        and tensor.element_size() == peer.element_size()
        and _strides(tensor) == _strides(peer)
    )
    if may_be_peer and not same and not _memory_is_apart(tensor, peer):
        raise ValueError(
            f"{export}: {name} must be {peer_name} itself or not overlap its memory; call .clone()"
        )
    if not may_be_peer:
        check_memory_apart(export, name, tensor, peer, peer_name)


def check_rank(export: str, name: str, tensor: torch.Tensor, least: int, most: int | None) -> None:
    """``tensor`` has from ``least`` to ``most`` dimensions; None is no limit."""
    rank = tensor.dim()
    if least <= rank and (most is None or rank <= most):
        return
    if most is None:
        legal = f"at least {least}"
    else:
        legal = f"{least} to {most}" if least < most else str(most)
    plural = "" if (most or least) == 1 else "s"
    raise ValueError(
        f"{export}: {name} must have {legal} dimension{plural}, got shape {[*tensor.shape]}"
    )


def check_half(
    export: str, out: torch.Tensor, input: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """``out`` has the shape of ``input`` with half the last dimension, and its dtype or another."""
    if input.dim() == 0:
        raise ValueError(f"{export}: input must have a last dimension, got []")
    if input.shape[-1] % 2:
        raise ValueError(f"{export}: input's last dimension must be even, got {input.shape[-1]}")
    check_device_and_dtype(export, "out", out, input, dtype or input.dtype)
    if out.shape != (*input.shape[:-1], input.shape[-1] // 2):
        raise OutputShapeError(
            f"{export}: out must have input's shape with half the last dimension, got "
            f"{[*out.shape]} for input {[*input.shape]}"
        )
    check_elements_apart(export, "out", out)
    check_memory_apart(export, "out", out, input)


def check_contiguous(export: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError for the first of the tensors that is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{export}: {name} must be contiguous, got strides {[*tensor.stride()]} for shape "
                f"{[*tensor.shape]}; call .contiguous()"
            )


def check_memory_apart(
    export: str, name: str, tensor: torch.Tensor, other: torch.Tensor, other_name: str = "input"
) -> None:
    """``tensor``, which is written, shares no element with ``other``."""
    if not _memory_is_apart(tensor, other):
        raise ValueError(f"{export}: {name} must not overlap {other_name}'s memory; call .clone()")


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides in the order of the dimensions, of those that have more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


def _layout(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of the dimensions that have more than one element, nearest first."""
    return sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1)


def _extent(layout: list[tuple[int, int]]) -> int:
    return 1 + sum(stride * (size - 1) for stride, size in layout)


def check_elements_apart(export: str, name: str, out: torch.Tensor) -> None:
    """``out`` holds each element once."""
    layout = _layout(out)
    if out.numel() and any(s < _extent(layout[:i]) for i, (s, _) in enumerate(layout)):
        raise ValueError(
            f"{export}: {name} must not hold an element twice, got strides {[*out.stride()]} for "
            f"shape {[*out.shape]}"
        )


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses from the first byte to behind the last, which two tensors may share."""
    if not tensor.numel() or tensor.is_meta:  # A meta tensor has no memory.
        return 0, 0
    begin = tensor.data_ptr()
    return begin, begin + _extent(_layout(tensor)) * tensor.element_size()


def _memory_is_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """False where nothing proves it; slices of one packed tensor are told apart by strides."""
    (begin, end), (other_begin, other_end) = memory_of(a), memory_of(b)
    if begin >= other_end or other_begin >= end:
        return True
    layouts = [[(s * t.element_size(), n) for s, n in _layout(t)] for t in (a, b)]
    sizes = a.element_size(), b.element_size()
    distance = other_begin - begin

    def extents(period: int) -> list[int]:
        """Bytes over the dimensions within a period, from the first to behind the last."""
        return [
            size + sum(s * (n - 1) for s, n in layout if s < period)
            for layout, size in zip(layouts, sizes)
        ]

    strides = {s for layout in layouts for s, _ in layout if s > 0}
    for period in strides:
        if any(s % period for s in strides if s > period):
            continue
        phase, within = distance % period, extents(period)
        if phase >= within[0] and period - phase >= within[1]:
            return True
    return False


def check_same_device(
    export: str, name: str, tensor: torch.Tensor, other: torch.Tensor, other_name: str = "input"
) -> None:
    """``tensor`` is where ``other`` is."""
    if tensor.device != other.device:
        raise ValueError(
            f"{export}: {name} must be on {other.device} as {other_name}, got {tensor.device}"
        )


def check_dtype(export: str, name: str, tensor: torch.Tensor, *legal: torch.dtype) -> None:
    """``tensor`` has one of these element types."""
    if tensor.dtype not in legal:
        wanted = " or ".join(map(dtype_word, legal))
        raise ValueError(f"{export}: {name} must be {wanted}, got {dtype_word(tensor.dtype)}")


def check_device_and_dtype(
    export: str,
    name: str,
    tensor: torch.Tensor,
    other: torch.Tensor,
    dtype: torch.dtype,
    other_name: str = "input",
) -> None:
    """``tensor`` is where ``other`` is, and of this element type."""
    check_same_device(export, name, tensor, other, other_name)
    check_dtype(export, name, tensor, dtype)


def check_indices(
    export: str, name: str, tensor: torch.Tensor, size: int, other: torch.Tensor, other_name: str
) -> None:
    """``tensor`` is ``size`` int32 or int64 numbers where ``other`` is."""
    check_same_device(export, name, tensor, other, other_name)
    check_dtype(export, name, tensor, torch.int32, torch.int64)
    if tensor.shape != (size,):
        raise ValueError(f"{export}: {name} must have shape [{size}], got {[*tensor.shape]}")


def check_within(export: str, name: str, tensor: torch.Tensor, count: int, things: str) -> None:
    """All of ``tensor`` are from 0 to ``count`` - 1; kernels, which cannot wait, do not look."""
    wrong = tensor[(tensor < 0) | (tensor >= count)]
    if wrong.numel():
        raise IndexError(
            f"{export}: {name} must be from 0 to {count - 1}, as there are {count} {things}, got "
            f"{wrong[0].item()}"
        )


def check_one_number(
    export: str, name: str, tensor: torch.Tensor, other: torch.Tensor, other_name: str = "input"
) -> None:
    """``tensor`` is one float32, in any number of dimensions."""
    check_device_and_dtype(export, name, tensor, other, torch.float32, other_name)
    if tensor.numel() != 1:
        raise ValueError(f"{export}: {name} must hold one number, got shape {[*tensor.shape]}")
