# SPDX-License-Identifier: Apache-2.0
"""Whether GPUs share memory over a fabric of NVLink switches that several hosts have in common."""

from __future__ import annotations

import ctypes

_FABRIC_HANDLES = 128  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
_BUS_ID_BYTES = 32


class _FabricInfo(ctypes.Structure):
    """``nvmlGpuFabricInfo_t``."""

    _fields_ = [
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]


def is_mnnvl_fabric_supported(device_idx: int) -> bool:
    """Return whether a GPU is part of a fabric of NVLink switches over several hosts.

    Engines ask for it to choose how memory is shared. precast itself works within one host and
    shares memory by file descriptors or IPC handles.

    Parameters
    ----------
    device_idx : int
        The index of a CUDA device.

    Returns
    -------
    bool
        False also where there is no driver or no such device.
    """
    try:
        driver, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    device, value = ctypes.c_int(), ctypes.c_int()
    bus = ctypes.create_string_buffer(_BUS_ID_BYTES)
    found = (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), device_idx) == 0
        and driver.cuDeviceGetAttribute(ctypes.byref(value), _FABRIC_HANDLES, device) == 0
        and driver.cuDeviceGetPCIBusId(bus, _BUS_ID_BYTES, device) == 0
    )
    return found and value.value != 0 and _is_in_cluster(nvml, bus.value)


def _is_in_cluster(nvml: ctypes.CDLL, bus: bytes) -> bool:
    """Whether the GPU of a PCI bus has been registered with a fabric.

    Why not by index: CUDA_VISIBLE_DEVICES changes the indices of CUDA, but not those of NVML.
    """
    if nvml.nvmlInit_v2() != 0:
        return False
    try:
        device, info = ctypes.c_void_p(), _FabricInfo()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(device)) != 0:
            return False
        if nvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(info)) != 0:
            return False
        return info.state >= _COMPLETED and any(info.cluster)
    finally:
        nvml.nvmlShutdown()
