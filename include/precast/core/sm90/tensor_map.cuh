// SPDX-License-Identifier: Apache-2.0
// Tensor maps: what the tensor memory accelerator (TMA) knows of a tensor in global memory. A
// kernel takes one as a __grid_constant__ parameter, so that a CUDA graph keeps it.
//
// Limits   1 to 5 dimensions, of which the first is contiguous; 16-byte aligned address and
//          strides, strides below 2^40 bytes, boxes of at most 256 elements in each dimension.
// Source   CUDA driver API, cuTensorMapEncodeTiled.
#pragma once

#include "precast/core/shared_address.cuh"

#if !defined(__CUDACC_RTC__)
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#endif

namespace precast {

// The type CUtensorMap of the driver, which code that is compiled at run time does not see.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap), "TensorMap");

constexpr int kMostTensorMapDims = 5;

// A tensor as TMA reads it, the innermost dimension first, and the box that one copy takes.
struct TensorMapShape {
  int dims = 0;
  uint64_t sizes[kMostTensorMapDims] = {};
  uint64_t strides[kMostTensorMapDims] = {};  // bytes; that of dimension 0 is not used
  uint32_t box[kMostTensorMapDims] = {};
  // How much L2 reads at once where something is missing. Which is faster differs: pages of keys
  // and values take 9 % longer with 256 bytes, the weight of a GEMM 2 % less.
  CUtensorMapL2promotion l2_bytes = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  bool is_swizzled = true;  // else boxes lie in shared memory as they are

  // The bytes from the first element to the end of the last one.
  uint64_t span(uint64_t element_bytes) const {
    uint64_t bytes = sizes[0] * element_bytes;
    for (int i = 1; i < dims; ++i) bytes += (sizes[i] - 1) * strides[i];
    return bytes;
  }

  // Adds a dimension. Why the stride of a single index is replaced: nothing reads it, and 0 is
  // not legal.
  TensorMapShape& dim(uint64_t size, uint64_t stride, uint32_t box_size) {
    sizes[dims] = size;
    strides[dims] = size > 1 ? stride : 16;
    box[dims++] = box_size;
    return *this;
  }
};

inline CUtensorMapDataType tensor_map_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

inline uint64_t tensor_map_element_bytes(DType dtype) {
  if (dtype == DType::f32) return 4;
  return dtype == DType::f16 || dtype == DType::bf16 ? 2 : 1;
}

// The encoder of the driver, or null. Why not linked: the driver is not there where modules are
// built and loaded without a GPU.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                     &status);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &status);
#endif
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return encoder;
}

// Encodes the map of a tensor at `data`. If it is swizzled, it is so over the innermost dimension
// of the box: 128, 64 or 32 bytes. What lies outside of the tensor reads as zeros. Takes about 0.1
// us, so nothing is kept between calls.
inline cudaError_t encode_tensor_map(TensorMap& map, DType dtype, const void* data,
                                     const TensorMapShape& shape) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr cuuint32_t kUnitStrides[kMostTensorMapDims] = {1, 1, 1, 1, 1};
  const uint64_t row_bytes = shape.box[0] * tensor_map_element_bytes(dtype);
  const CUtensorMapSwizzle swizzle = !shape.is_swizzled ? CU_TENSOR_MAP_SWIZZLE_NONE
                                     : row_bytes == 32  ? CU_TENSOR_MAP_SWIZZLE_32B
                                     : row_bytes == 64  ? CU_TENSOR_MAP_SWIZZLE_64B
                                                        : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult result =
      encode(reinterpret_cast<CUtensorMap*>(&map), tensor_map_type(dtype),
             static_cast<cuuint32_t>(shape.dims), const_cast<void*>(data), shape.sizes,
             shape.strides + 1, shape.box, kUnitStrides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             shape.l2_bytes, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  // Drivers up to 13.1 set a bit that is wrong for tensors of less than 128 KiB.
  static const bool has_defect = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version <= 13010;
  }();
  if (has_defect && shape.span(tensor_map_element_bytes(dtype)) < 128 * 1024) {
    map.words[1] &= ~(uint64_t(1) << 21);
  }
  return cudaSuccess;
}

#endif

#if defined(__CUDACC__)

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// What L2 gives up first.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Starts the copy of the box at these coordinates, the innermost first. One thread calls it;
// mbarrier_arrive_expect_tx() must announce the bytes of the whole box, also of what lies outside
// of the tensor.
__device__ __forceinline__ void copy_box(uint32_t target, const TensorMap* map, uint64_t* barrier,
                                         int c0, int c1, int c2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(target),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(shared_address(barrier))
      : "memory");
#endif
}

// The same with a policy of L2.
__device__ __forceinline__ void copy_box_by_policy(uint32_t target, const TensorMap* map,
                                                   uint64_t* barrier, uint64_t policy, int c0,
                                                   int c1, int c2, int c3) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(target),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void copy_box(uint32_t target, const TensorMap* map, uint64_t* barrier,
                                         int c0, int c1, int c2, int c3) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(target),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(barrier))
      : "memory");
#endif
}

__device__ __forceinline__ void copy_box(uint32_t target, const TensorMap* map, uint64_t* barrier,
                                         int c0, int c1, int c2, int c3, int c4) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(target),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(shared_address(barrier))
      : "memory");
#endif
}

// The same copy to the shared memory of several CTAs of the cluster, those whose bits are set in
// `ctas`. In each of them the box lies at `target`, and completes on the mbarrier at the address of
// `barrier`.
__device__ __forceinline__ void copy_box_to_ctas(uint32_t target, const TensorMap* map,
                                                 uint64_t* barrier, uint16_t ctas, int c0, int c1,
                                                 int c2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "h"(ctas)
      : "memory");
#endif
}

// Starts the copy of a box from shared memory to these coordinates of the tensor. What lies outside
// of the tensor is not written, but for the rest of 16 bytes that begin in it. One thread calls it,
// after fence_shared_for_async() and a barrier of those that have written the box; then
// commit_stores().
__device__ __forceinline__ void store_box(const TensorMap* map, uint32_t source, int c0, int c1,
                                          int c2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
#endif
}

// Ends a group of such copies of this thread.
__device__ __forceinline__ void commit_stores() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending groups of this thread have not read their shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_have_read() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

#endif  // __CUDACC__

}  // namespace precast
