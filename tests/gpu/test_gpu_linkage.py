# SPDX-License-Identifier: Apache-2.0
"""Device symbols of internal linkage, whose names the build fixes: each module has its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from precast.jit import gen_jit_spec

SOURCE = """
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

namespace {
__device__ int calls;
__constant__ int step = STEP;
__global__ void Count(int* out) { *out = calls += step; }
}  // namespace

static __device__ int doubled;
static __global__ void Twice(int* out) { *out = doubled += 2 * step; }

void count(tvm::ffi::TensorView out) { Count<<<1, 1>>>(static_cast<int*>(out.data_ptr())); }
void twice(tvm::ffi::TensorView out) { Twice<<<1, 1>>>(static_cast<int*>(out.data_ptr())); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count, count);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(twice, twice);
"""


@pytest.mark.jit
def test_hidden_symbols_of_two_modules_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host code finds them by name, and the same names in another module are others."""
    monkeypatch.setenv("PRECAST_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "hidden.cu"
    source.write_text(SOURCE)
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    modules = [
        gen_jit_spec(
            name,
            [source],
            arch=capability,
            exports=["count", "twice"],
            extra_cuda_cflags=[f"-DSTEP={step}"],
        ).build_and_load()
        for name, step in (("hidden_one", 1), ("hidden_ten", 10))
    ]
    out = torch.zeros((), dtype=torch.int32, device="cuda")
    seen = []
    for _ in range(3):
        for module in modules:
            for function in ("count", "twice"):
                module.get_function(function)(out)
                torch.cuda.synchronize()
                seen.append(int(out))
    assert seen == [1, 2, 10, 20, 2, 4, 20, 40, 3, 6, 30, 60]
