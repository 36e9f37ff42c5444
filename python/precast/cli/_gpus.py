# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this process, from the driver: without torch and without a CUDA context."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_NO_DEVICE = 100


@dataclass(frozen=True)
class Gpu:
    """One GPU; ``index`` is torch's index (``CUDA_VISIBLE_DEVICES`` applies)."""

    index: int
    name: str
    capability: str
    memory: int

    @property
    def label(self) -> str:
        return f"cuda:{self.index} ({self.name}, {self.capability})"


def find_gpus() -> tuple[list[Gpu], str | None]:
    """The GPUs, and if there are none the reason."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], "no NVIDIA driver (libcuda.so.1 was not found)"
    code = driver.cuInit(0)
    if code == _NO_DEVICE:
        return [], "the driver sees no GPU"
    if code != 0:
        return [], f"the driver does not start: {_error(driver, code)}"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    found = [_gpu(driver, index) for index in range(count.value)]
    return found, None if found else "the driver sees no GPU"


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), device)
    memory = ctypes.c_size_t()
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    numbers = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    capability = f"{numbers[0]}.{numbers[1]}"
    return Gpu(index, name.value.decode(errors="replace"), capability, memory.value)


def _error(driver: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} (error {code})"


def driver_version() -> str | None:
    """The kernel driver's version, ``580.65.06``, or None."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else None
