# SPDX-License-Identifier: Apache-2.0
"""Buffers that the GPUs of one host share, and the calls of the CUDA runtime that make them."""

# ruff: noqa: N803 (arguments have the runtime's names)

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from precast._base.torch import torch
from precast._op.mode import is_reference
from precast._ops.comm import host_memory

HANDLE_BYTES = 64
#: The functions of the runtime, with the types of their arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {}


class cudaIpcMemHandle_t(ctypes.Structure):  # noqa: N801 (the runtime's name)
    """What names an allocation of another process."""

    _fields_ = [("internal", ctypes.c_ubyte * HANDLE_BYTES)]

    def __bytes__(self) -> bytes:
        return bytes(self.internal)


_POINTER = ctypes.POINTER(ctypes.c_void_p)
_FUNCTIONS |= {
    "cudaSetDevice": (ctypes.c_int,),
    "cudaDeviceSynchronize": (),
    "cudaDeviceReset": (),
    "cudaMalloc": (_POINTER, ctypes.c_size_t),
    "cudaFree": (ctypes.c_void_p,),
    "cudaMemset": (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t),
    "cudaMemcpy": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "cudaIpcGetMemHandle": (ctypes.POINTER(cudaIpcMemHandle_t), ctypes.c_void_p),
    "cudaIpcOpenMemHandle": (_POINTER, cudaIpcMemHandle_t, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (ctypes.c_void_p,),
}
_COPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses say where they are.
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class CudaRTLibrary:
    """The CUDA runtime of this process, call by call.

    Methods have the names of the runtime's functions, return their results, and raise where those
    return an error.

    Parameters
    ----------
    so_file : str, optional
        The library. Default: the ``libcudart`` that the process has loaded.

    Raises
    ------
    RuntimeError
        If no ``libcudart`` is loaded, or from a method if its call fails.
    """

    def __init__(self, so_file: str | None = None) -> None:
        if so_file is None:
            so_file = _loaded_library("libcudart")
        if so_file is None:
            raise RuntimeError(
                "CudaRTLibrary: no libcudart is loaded in this process. Fix: use CUDA in torch "
                "first, or pass so_file"
            )
        self.lib = ctypes.CDLL(so_file)
        self.funcs: dict[str, Callable[..., int]] = {}
        for name, types in _FUNCTIONS.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = ctypes.c_int, types
            self.funcs[name] = function
        self.lib.cudaGetErrorString.restype = ctypes.c_char_p
        self.lib.cudaGetErrorString.argtypes = (ctypes.c_int,)
        # An error of a call that failed would otherwise be that of the next kernel launch, too.
        self._clear_error = self.lib.cudaGetLastError

    def _call(self, name: str, *args: Any) -> None:
        self.CUDART_CHECK(self.funcs[name](*args), name)

    def CUDART_CHECK(self, result: int, name: str = "") -> None:
        """Raise RuntimeError unless ``result`` is ``cudaSuccess``."""
        if result != 0:
            self._clear_error()
            what = f"{name}: " if name else ""
            raise RuntimeError(
                f"{what}CUDA runtime error {result}: {self.cudaGetErrorString(result)}"
            )

    def cudaGetErrorString(self, error: int) -> str:
        text: bytes = self.lib.cudaGetErrorString(error)
        return text.decode()

    def cudaSetDevice(self, device: int) -> None:
        self._call("cudaSetDevice", device)

    def cudaDeviceSynchronize(self) -> None:
        self._call("cudaDeviceSynchronize")

    def cudaDeviceReset(self) -> None:
        self._call("cudaDeviceReset")

    def cudaMalloc(self, size: int) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), size)
        return pointer

    def cudaFree(self, devPtr: ctypes.c_void_p) -> None:
        self._call("cudaFree", devPtr)

    def cudaMemset(self, devPtr: ctypes.c_void_p, value: int, count: int) -> None:
        self._call("cudaMemset", devPtr, value, count)

    def cudaMemcpy(self, dst: ctypes.c_void_p, src: ctypes.c_void_p, count: int) -> None:
        self._call("cudaMemcpy", dst, src, count, _COPY_DEFAULT)

    def cudaIpcGetMemHandle(self, devPtr: ctypes.c_void_p) -> cudaIpcMemHandle_t:
        handle = cudaIpcMemHandle_t()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), devPtr)
        return handle

    def cudaIpcOpenMemHandle(self, handle: cudaIpcMemHandle_t) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, _LAZY_PEER_ACCESS)
        return pointer

    def cudaIpcCloseMemHandle(self, devPtr: ctypes.c_void_p) -> None:
        self._call("cudaIpcCloseMemHandle", devPtr)


def _loaded_library(name: str) -> str | None:
    """The path of a shared library of this process, ``libcudart-<hash>.so.13`` included."""
    file = re.compile(rf".*/{re.escape(name)}(-[0-9a-f]+)?\.so[.\d]*")
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[-1]
            if file.fullmatch(path):
                return path
    return None


@functools.cache
def cudart() -> CudaRTLibrary:
    """The runtime that torch uses, with a context on torch's current device."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "memory that GPUs share needs a CUDA device, and torch sees none. Fix: run on a GPU, "
            "or set PRECAST_REFERENCE=1 to use memory of the host"
        )
    torch.cuda.init()
    return CudaRTLibrary()


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    size, pointer = ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_uint64)
    driver.cuMemGetAddressRange_v2.argtypes = (pointer, size, ctypes.c_uint64)
    return driver


def allocation_of(address: int) -> tuple[int, int]:
    """The start and the bytes of the device allocation that an address lies in.

    Raises
    ------
    ValueError
        If it lies in none.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
    if code != 0:
        raise ValueError(
            f"{address:#x} is no address of memory of a CUDA device that this process may use "
            f"(CUDA driver error {code})"
        )
    return base.value, size.value


def export_allocation(address: int) -> tuple[bytes, int]:
    """The IPC handle of the allocation of an address, and how far into it the address is.

    Raises
    ------
    RuntimeError
        If the allocation cannot be shared.
    """
    base, _ = allocation_of(address)
    try:
        handle = cudart().cudaIpcGetMemHandle(ctypes.c_void_p(base))
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}. The memory at {address:#x} cannot be shared with another process. Fix: make "
            f"it with cudaMalloc; torch does so unless PYTORCH_CUDA_ALLOC_CONF has "
            f"expandable_segments:True"
        ) from None
    return bytes(handle), address - base


def open_allocation(handle: bytes) -> int:
    """The address at which this process sees the allocation of an IPC handle."""
    pointer = cudart().cudaIpcOpenMemHandle(cudaIpcMemHandle_t.from_buffer_copy(handle))
    assert pointer.value is not None
    return pointer.value


def close_allocation(address: int) -> None:
    """Undo :func:`open_allocation`."""
    cudart().cudaIpcCloseMemHandle(ctypes.c_void_p(address))


def create_shared_buffer(size_in_bytes: int, group: Any | None = None) -> list[int]:
    """Allocate a buffer on every GPU of a group, and map all of them into every process.

    Collective: every process of the group must call it, with the same size, on a device of its
    own. Processes are of one host.

    Parameters
    ----------
    size_in_bytes : int
        Bytes of the buffer of each process. They are zeros.
    group : torch.distributed.ProcessGroup, optional
        Default: all processes.

    Returns
    -------
    list of int
        The device address of the buffer of each process, in the order of their numbers, as this
        process sees it. :func:`free_shared_buffer` frees them.

    Raises
    ------
    ValueError
        If the size is not the same positive number in all processes.
    RuntimeError
        In all processes, if one cannot allocate, share or open a buffer: too little memory,
        processes of several hosts, GPUs that cannot access each other.

    Notes
    -----
    The buffers are torch's current devices', and are not of torch's memory pool. In reference mode
    they are shared memory of the host, for which no GPU is needed. Waits for all processes.
    """
    group = _group_of("create_shared_buffer", group)
    memory = _HostMemory if is_reference() else _DeviceMemory
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    own, message = 0, ("", b"")
    try:
        if not isinstance(size_in_bytes, int) or size_in_bytes < 1:
            raise ValueError(f"size_in_bytes must be at least 1, got {size_in_bytes}")
        own, handle = memory.allocate(size_in_bytes)
        message = "", handle
    except (RuntimeError, ValueError, OSError) as error:
        message = str(error), b""
    # Why errors are exchanged, too: who raises alone leaves the others waiting.
    told = _gather((socket.gethostname(), size_in_bytes, *message), group, world)
    pointers = [own if peer == rank else 0 for peer in range(world)]
    failed = _first_error(told)
    if not failed:
        own_error = ""
        try:
            for peer in range(world):
                if peer != rank:
                    pointers[peer] = memory.open(told[peer][3], size_in_bytes)
        except (RuntimeError, OSError) as caught:
            own_error = (
                f"process {rank} cannot open the buffer of process {peer}: {caught}. Fix: use GPUs "
                f"that can access each other (nvidia-smi topo -p2p r), or NCCL"
            )
        failed = next(filter(None, _gather(own_error, group, world)), "")
    if failed:
        for peer, pointer in enumerate(pointers):
            if peer != rank and pointer:
                memory.close(pointer)
        torch.distributed.barrier(group)
        if own:
            memory.free(own)
        kind = ValueError if failed.startswith("size_in_bytes") else RuntimeError
        raise kind(f"create_shared_buffer: {failed}")
    return pointers


def _first_error(told: list[Any]) -> str:
    """What is wrong with what the processes tell of themselves, or nothing."""
    sizes = [size for _, size, _, _ in told]
    hosts = sorted({host for host, _, _, _ in told})
    if len(hosts) > 1:
        return f"processes must be of one host, got {', '.join(hosts)}. Fix: use NCCL across hosts"
    if len(set(sizes)) > 1:
        return f"size_in_bytes must be the same in all processes, got {sizes}"
    for rank, (_, _, error, _) in enumerate(told):
        if error:
            return error if error.startswith("size_in_bytes") else f"process {rank}: {error}"
    return ""


def free_shared_buffer(pointers: list[int], group: Any | None = None) -> None:
    """Free the buffers of :func:`create_shared_buffer`.

    Collective: every process of the group must call it, after all kernels that use a buffer have
    ended.

    Parameters
    ----------
    pointers : list of int
        What :func:`create_shared_buffer` returned. None and an empty list free nothing.
    group : torch.distributed.ProcessGroup, optional
        The group of that call.

    Raises
    ------
    RuntimeError
        If an address is none of a buffer, after the other buffers are freed.

    Notes
    -----
    No process frees its buffer before all others have unmapped it. Waits for all processes.
    """
    group = _group_of("free_shared_buffer", group)
    rank = torch.distributed.get_rank(group)
    errors: list[str] = []
    for peer, pointer in enumerate(pointers or ()):
        if peer != rank and pointer:
            _release(_memory_of(pointer).close, pointer, errors)
    torch.distributed.barrier(group)
    if pointers and rank < len(pointers) and pointers[rank]:
        _release(_memory_of(pointers[rank]).free, pointers[rank], errors)
    torch.distributed.barrier(group)
    if errors:
        raise RuntimeError(f"free_shared_buffer: {'; '.join(errors)}")


def _release(function: Callable[[int], None], pointer: int, errors: list[str]) -> None:
    try:
        function(pointer)
    except RuntimeError as error:
        errors.append(f"{pointer:#x}: {error}")


class _DeviceMemory:
    """Memory of the current device."""

    @staticmethod
    def allocate(size: int) -> tuple[int, bytes]:
        runtime = cudart()
        pointer = runtime.cudaMalloc(size)
        assert pointer.value is not None
        try:
            runtime.cudaMemset(pointer, 0, size)
            runtime.cudaDeviceSynchronize()  # A peer may write as soon as it knows of the buffer.
            return pointer.value, bytes(runtime.cudaIpcGetMemHandle(pointer))
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                runtime.cudaFree(pointer)
            raise

    @staticmethod
    def open(handle: bytes, size: int) -> int:
        return open_allocation(handle)

    @staticmethod
    def close(pointer: int) -> None:
        close_allocation(pointer)

    @staticmethod
    def free(pointer: int) -> None:
        cudart().cudaFree(ctypes.c_void_p(pointer))


class _HostMemory(_DeviceMemory):
    """Memory of the host, in reference mode."""

    allocate = staticmethod(host_memory.allocate)
    open = staticmethod(host_memory.open_handle)
    close = staticmethod(host_memory.release)
    free = staticmethod(host_memory.release)


def _memory_of(pointer: int) -> type[_DeviceMemory]:
    return _HostMemory if host_memory.find(pointer) else _DeviceMemory


def _group_of(function: str, group: Any | None) -> Any | None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise RuntimeError(
            f"{function}: torch.distributed must be initialised. Fix: call "
            f"torch.distributed.init_process_group() first"
        )
    return group


def _gather(data: Any, group: Any | None, world: int) -> list[Any]:
    gathered: list[Any] = [None] * world
    torch.distributed.all_gather_object(gathered, data, group=group)
    return gathered
