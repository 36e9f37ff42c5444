# SPDX-License-Identifier: Apache-2.0
"""Copies of a call's arguments that together do not fit into the L2 cache.

A benchmark that calls a kernel repeatedly on one set of buffers measures the cache if the buffers
fit into it. Here every call takes the next of several copies, so that the calls in between have
evicted its data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

#: The largest number of copies, however small the arguments are.
MOST_COPIES = 1 << 14


class Call(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def l2_bytes(device: torch.device | int | None = None) -> int:
    """Size of the L2 cache of a CUDA device (50 MiB if torch does not know)."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0)) or 50 << 20


def tensor_bytes(values: Sequence[Any]) -> int:
    """Bytes that the distinct tensors among some arguments occupy, gaps of strides not counted."""
    distinct = {id(v): v for v in values if isinstance(v, torch.Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


def copies_needed(bytes_per_call: int, cache_bytes: int, factor: float = 2.0) -> int:
    """How many copies exceed ``factor`` times the cache; from two to :data:`MOST_COPIES`.

    Two even for huge tensors: the end of one call's buffers is still cached when the next starts.
    Calls on less than 8 KB may find their data in L2: millions of copies would take minutes to
    make, and no graph holds as many calls.
    """
    if bytes_per_call <= 0:
        return 1
    return min(MOST_COPIES, max(2, math.ceil(factor * cache_bytes / bytes_per_call)))


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in new memory, with the same strides and the same offset modulo 256 bytes."""
    if tensor.numel() == 0:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride()))
    shift = tensor.data_ptr() % 256 // tensor.element_size()
    storage = torch.empty(shift + span, dtype=tensor.dtype, device=tensor.device)
    result = storage.as_strided(tensor.size(), tensor.stride(), shift)
    return result.copy_(tensor.detach())


def rotate(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, copies: int = 1
) -> list[Call]:
    """``copies`` sets of arguments, the first being the caller's own.

    A tensor that is passed twice (an op in place) stays one tensor in every copy.
    """
    kwargs = dict(kwargs or {})
    calls = [Call(tuple(args), kwargs)]
    for _ in range(copies - 1):
        known: dict[int, torch.Tensor] = {}

        def twin(value: Any, known: dict[int, torch.Tensor] = known) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in known:
                known[id(value)] = clone(value)
            return known[id(value)]

        calls.append(Call(tuple(map(twin, args)), {k: twin(v) for k, v in kwargs.items()}))
    return calls


def rotation_for(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    cold_l2_cache: bool = True,
    bytes_per_call: int | None = None,
) -> list[Call]:
    """The copies that keep L2 cold on the current device, or the caller's arguments alone.

    ``bytes_per_call`` is what a call touches of its arguments, if it is not all.
    """
    if not cold_l2_cache:
        return rotate(args, kwargs)
    moved = bytes_per_call or tensor_bytes([*args, *(kwargs or {}).values()])
    return rotate(args, kwargs, copies_needed(moved, l2_bytes()))
