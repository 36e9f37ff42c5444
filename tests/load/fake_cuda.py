# SPDX-License-Identifier: Apache-2.0
"""CPU tensors that claim to be on a GPU, so that the checks of the bindings run without one.

A DLPack capsule says where its memory is, and nobody verifies it. A binding that accepts such a
tensor fails at its first CUDA call, because this machine has no driver. On a machine with a GPU the
kernel would run on host memory, so the callers must skip there.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import torch
import tvm_ffi

CUDA = 2  # kDLCUDA
#: How a call ends that passes all checks.
NO_DRIVER = re.compile(r"cudaError(InsufficientDriver|NoDevice)")

#: DLPack's code and bits of each dtype.
DTYPES = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.bool: (6, 8),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [
    ("tensor", _Tensor),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
]

_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

#: What must live until the consumer of a capsule calls its deleter, by the capsule's address.
_alive: dict[int, tuple[object, ...]] = {}


@_Deleter
def _delete(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


class _Producer:
    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.tensor = tensor
        self.index = index

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.index

    def __dlpack__(self, **_: object) -> object:
        tensor = self.tensor
        numbers = ctypes.c_int64 * max(1, tensor.dim())
        shape, strides = numbers(*tensor.shape), numbers(*tensor.stride())
        device = _Device(CUDA, self.index)
        dtype = _DataType(*DTYPES[tensor.dtype], 1)
        described = _Tensor(tensor.data_ptr(), device, tensor.dim(), dtype, shape, strides, 0)
        managed = _Managed(described, None, _delete)
        address = ctypes.addressof(managed)
        _alive[address] = (managed, shape, strides, tensor)
        return _new_capsule(address, b"dltensor", None)


def on_cuda(tensor: torch.Tensor, index: int = 0) -> tvm_ffi.Tensor:
    """The memory, shape and strides of a CPU tensor as a tensor of the device ``cuda:index``."""
    return tvm_ffi.from_dlpack(_Producer(tensor, index))
