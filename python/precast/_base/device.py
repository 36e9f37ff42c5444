# SPDX-License-Identifier: Apache-2.0
"""Questions about CUDA devices; each answer is kept per device, and is False without a GPU."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

from precast._base.torch import torch

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


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for sm_90a run on the device."""
    index = device.index
    return device.type == "cuda" and _is_hopper(device_index(device) if index is None else index)


@functools.cache
def _is_hopper(index: int) -> bool:
    # Why not get_device_capability: TorchDynamo takes these properties for constants.
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor) == (9, 0)


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
