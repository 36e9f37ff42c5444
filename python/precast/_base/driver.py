# SPDX-License-Identifier: Apache-2.0
"""Questions to the CUDA driver. No answer creates a CUDA context or needs torch."""

from __future__ import annotations

import ctypes
import functools

#: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_CAPABILITY_ATTRIBUTES = (75, 76)


@functools.cache
def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    value = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(value)) != 0 or value.value == 0:
        return None
    return value.value // 1000, value.value % 1000 // 10


def device_capabilities() -> list[str]:
    """Compute capabilities of the GPUs present, ``["9.0"]``; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        device, value, words = ctypes.c_int(), ctypes.c_int(), []
        if driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            for attribute in _CAPABILITY_ATTRIBUTES:
                driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
                words.append(str(value.value))
            found.append(".".join(words))
    return list(dict.fromkeys(found))
