// SPDX-License-Identifier: Apache-2.0
// What the micro-benchmarks share. A pool is a tensor of rows of 256 bytes in global memory; random
// places of a small one are in L2, those of a large one are not. Each launch has one CTA for each
// row of `clocks` [ctas, roles], to which the roles write how many clocks they took.
#pragma once

#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "precast/core/sm90/mbarrier.cuh"
#include "precast/core/sm90/tensor_map.cuh"

namespace micro {

using namespace precast;
using tvm::ffi::TensorView;

constexpr int kRowBytes = 256, kPanelBytes = 128;
constexpr int kTileRows = 128, kTileBytes = kTileRows * kRowBytes;  // K or V of d128, 128 tokens

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorName(status);
}

template <typename Params>
void launch_on_all(void (*kernel)(Params), int threads, int shared, const TensorView& clocks,
                   const Params& params) {
  const DLDevice device = clocks.device();
  const auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "shared memory");
  kernel<<<static_cast<unsigned>(clocks.size(0)), threads, shared, stream>>>(params);
  check(cudaGetLastError(), "launch");
}

inline long long* clocks_of(const TensorView& clocks) {
  return static_cast<long long*>(clocks.data_ptr());
}

// A pool as [1, 2 panels, rows, 128 bytes], of which a box has all panels.
inline TensorMap pool_map(const TensorView& pool, int box_rows) {
  TensorMapShape shape;
  shape.dim(kPanelBytes, 0, kPanelBytes)
      .dim(pool.size(0), kRowBytes, static_cast<uint32_t>(box_rows))
      .dim(kRowBytes / kPanelBytes, kPanelBytes, kRowBytes / kPanelBytes)
      .dim(1, 0, 1);
  TensorMap map;
  check(encode_tensor_map(map, DType::i8, pool.data_ptr(), shape), "tensor map");
  return map;
}

// Place number `draw` of this CTA, of so many places.
__device__ __forceinline__ uint32_t random_place(uint32_t draw, uint32_t places) {
  uint32_t x = ((blockIdx.x << 22) + draw) * 0x9e3779b1u;
  x = (x ^ x >> 15) * 0x85ebca77u;
  return __umulhi(x ^ x >> 13, places);
}

}  // namespace micro
