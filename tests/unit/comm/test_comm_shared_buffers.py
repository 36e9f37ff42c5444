# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime by name, handles of the all-reduce, and constants that two files share."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

import precast
from precast._ops.comm import cuda_ipc, custom_all_reduce, handles, host_memory, vllm_handles
from precast.comm import (
    CommBackend,
    CudaRTLibrary,
    TorchDistBackend,
    create_shared_buffer,
    free_shared_buffer,
    vllm_dispose,
    vllm_get_graph_buffer_ipc_meta,
    vllm_init_custom_ar,
    vllm_meta_size,
    vllm_register_buffer,
    vllm_register_graph_buffers,
)
from precast.comm.cuda_ipc import cudaIpcMemHandle_t
from precast.comm.mnnvl import is_mnnvl_fabric_supported

ROOT = Path(__file__).resolve().parents[3]

FAKE = """
#include <stdlib.h>
#include <string.h>
static int last, freed;
typedef struct { unsigned char bytes[64]; } Handle;
int cudaSetDevice(int d) { return d == 0 ? 0 : (last = 101); }
int cudaDeviceSynchronize(void) { return 0; }
int cudaDeviceReset(void) { return 0; }
int cudaMalloc(void** p, size_t n) { *p = n < 1000 ? malloc(n) : 0; return *p ? 0 : (last = 2); }
int cudaFree(void* p) { free(p); ++freed; return 0; }
int cudaMemset(void* p, int x, size_t n) { memset(p, x, n); return 0; }
int cudaMemcpy(void* d, const void* s, size_t n, int kind) {
  if (kind == 4) memcpy(d, s, n);
  return 0;
}
int cudaIpcGetMemHandle(Handle* h, void* p) { memcpy(h, &p, sizeof p); h->bytes[63] = 9; return 0; }
int cudaIpcOpenMemHandle(void** p, Handle h, unsigned flags) {
  memcpy(p, &h, sizeof *p);
  return flags == 1 && h.bytes[63] == 9 ? 0 : 1;
}
int cudaIpcCloseMemHandle(void* p) { return 0; }
int cudaGetLastError(void) { int e = last; last = 0; return e; }
int pending(void) { return last; }
const char* cudaGetErrorString(int e) { return e == 2 ? "out of memory" : "another"; }
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cudart")
    (folder / "fake.c").write_text(FAKE)
    path = folder / "libcudart-0a1b2c.so.13"
    command = ["cc", "-shared", "-fPIC", "-o", str(path), str(folder / "fake.c")]
    subprocess.run(command, check=True)
    return path


def test_the_calls_of_the_runtime(library):
    runtime = CudaRTLibrary(str(library))
    runtime.cudaSetDevice(0)
    pointer = runtime.cudaMalloc(64)
    runtime.cudaMemset(pointer, 7, 64)
    other = runtime.cudaMalloc(64)
    runtime.cudaMemcpy(other, pointer, 64)
    assert ctypes.string_at(other.value, 64) == b"\x07" * 64
    handle = runtime.cudaIpcGetMemHandle(pointer)
    # As large as CUDA's, because it is passed by value.
    assert isinstance(handle, cudaIpcMemHandle_t) and len(bytes(handle)) == 64
    assert runtime.cudaIpcOpenMemHandle(handle).value == pointer.value
    runtime.cudaIpcCloseMemHandle(pointer)
    runtime.cudaDeviceSynchronize()
    for each in (pointer, other):
        runtime.cudaFree(each)
    runtime.CUDART_CHECK(0)


def test_an_error_names_the_call_and_is_not_left_behind(library):
    runtime = CudaRTLibrary(str(library))
    with pytest.raises(RuntimeError, match=r"^cudaMalloc: CUDA runtime error 2: out of memory$"):
        runtime.cudaMalloc(1 << 20)
    assert runtime.lib.pending() == 0
    with pytest.raises(RuntimeError, match=r"^cudaSetDevice: CUDA runtime error 101: another$"):
        runtime.cudaSetDevice(1)


def test_the_runtime_that_is_loaded(library, monkeypatch, tmp_path):
    ctypes.CDLL(str(library))
    found = cuda_ipc._loaded_library("libcudart")
    assert found is not None and re.search(r"/libcudart(-[0-9a-f]+)?\.so[.\d]*$", found)
    assert cuda_ipc._loaded_library("libcudart_none") is None
    monkeypatch.setattr(cuda_ipc, "_loaded_library", lambda name: None)
    with pytest.raises(RuntimeError, match="no libcudart is loaded in this process"):
        CudaRTLibrary()


@pytest.mark.parametrize("function", [create_shared_buffer, free_shared_buffer])
def test_buffers_need_process_groups(function):
    with pytest.raises(
        RuntimeError, match=rf"^{function.__name__}: torch\.distributed must be init"
    ):
        function([] if function is free_shared_buffer else 64)
    with pytest.raises(RuntimeError, match=r"^TorchDistBackend: torch\.distributed must be init"):
        TorchDistBackend()


def test_a_communicator_must_have_every_method():
    class Whole(CommBackend):
        Get_rank = Get_size = allgather = bcast = barrier = Split = lambda self: None

    Whole()
    for name in ("Get_rank", "Get_size", "allgather", "bcast", "barrier", "Split"):
        methods = {n: getattr(Whole, n) for n in CommBackend.__abstractmethods__ - {name}}
        with pytest.raises(TypeError, match=name):
            type("Part", (CommBackend,), methods)()


def test_a_fabric_needs_a_driver(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert is_mnnvl_fabric_supported(0) is False


@pytest.fixture
def memory():
    """Addresses of two ranks in this process, with room for signals and scratch."""
    with precast.reference_mode():
        made = [host_memory.allocate(vllm_meta_size() + 4096)[0] for _ in range(2)]
        yield made
    for address in made:
        host_memory.release(address)


def test_rows_of_a_handle(memory):
    """Graph inputs have their rows from the capture on; a buffer in between takes another."""
    table = torch.zeros(256, dtype=torch.uint8)
    fa = vllm_init_custom_ar(memory, table, 1, True)
    handle = handles.find("test", fa)
    for address in (1 << 12, 1 << 13):
        index = handle.next_row("test")
        handle.take_row()
        handle.captured.append((index, address))
    vllm_register_buffer(fa, memory)
    rows = table.view(torch.int64).view(4, 8)
    assert rows.tolist() == [[0] * 8, [0] * 8, [*memory, *[0] * 6], [0] * 8]
    assert handle.row_of[memory[1]] == table.data_ptr() + 128
    for peers, words in (
        ([[[]] * 3, [[]] * 3], "must be of 2 ranks, got 3 and 3"),
        ([[[0] * 64, [0] * 128], [[0], [0, 0]]], "every rank must have captured 2 calls"),
        ([[[0] * 128] * 2, [[0, 8], [0, 0]]], r"multiples of 16, got \[0, 8\] of rank 0"),
    ):
        with pytest.raises(ValueError, match=words):
            vllm_register_graph_buffers(fa, *peers)
    assert not rows[:2].any()
    opened = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_handles, "open_allocation", lambda h: opened.append(h) or 1 << 20)
        patch.setattr(vllm_handles, "close_allocation", opened.remove)
        vllm_register_graph_buffers(fa, [[5] * 128, [0] * 128], [[16, 32], [0, 0]])
        assert rows[:2, :2].tolist() == [[(1 << 20) + 16, 1 << 12], [(1 << 20) + 32, 1 << 13]]
        assert handle.captured == [] and opened == [bytes([5] * 64)]  # one allocation, opened once
        assert vllm_get_graph_buffer_ipc_meta(fa) == ([], [])
        opened[0] = 1 << 20
        vllm_dispose(fa)
        assert opened == []
    with pytest.raises(ValueError, match="must be a handle of vllm_init_custom_ar"):
        vllm_register_buffer(fa, memory)


def test_what_a_handle_refuses(memory):
    table = torch.zeros(64, dtype=torch.uint8)
    for arguments, words in (
        ((memory[:1], table, 0, True), "must have 2, 4, 6, 8 ranks, got 1"),
        ((memory, table, 2, True), "rank must be 0 to 1, got 2"),
        (([memory[0] + 8, memory[1]], table, 0, True), "multiples of 16"),
        (([memory[0], 0], table, 0, True), "multiples of 16"),
        ((memory, table[:32], 0, True), "rank_data must have 64 bytes"),
        ((memory, torch.zeros(8, 16)[:, ::2], 0, True), "rank_data must be contiguous"),
        (([memory[0] + 4112, memory[1]], table, 0, True), "= 8192 bytes, got 8176"),
    ):
        with pytest.raises(ValueError, match=words):
            vllm_init_custom_ar(*arguments)
    with pytest.raises(TypeError, match=r"rank_data must be a torch\.Tensor, got int"):
        vllm_init_custom_ar(memory, 0, 0, True)


def test_a_cpu_tensor_needs_reference_mode(memory):
    with pytest.raises(ValueError, match="rank_data must be a CUDA tensor, got cpu"):
        from precast._op import mode

        assert mode.is_reference()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_handles, "is_reference", lambda: False)
            vllm_init_custom_ar(memory, torch.zeros(64, dtype=torch.uint8), 0, True)


def test_constants_are_those_of_the_kernels():
    header = (ROOT / "include/precast/comm/peer_barrier.cuh").read_text()
    assert f"kMaxBarrierCtas = {custom_all_reduce.MAX_CTAS};" in header
    memory = (ROOT / "include/precast/comm/peer_memory.cuh").read_text()
    assert f"kMaxWorld = {handles.MAX_WORLD};" in memory
    signals = custom_all_reduce.MAX_CTAS * (handles.MAX_WORLD + 1) * 4
    assert signals <= vllm_meta_size()
    report = memory.partition("struct WaitReport {")[2].partition("};")[0]
    assert len(re.findall(r"^  u?int32_t \w+;", report, re.M)) == handles._REPORT_WORDS
