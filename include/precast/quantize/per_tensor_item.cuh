// SPDX-License-Identifier: Apache-2.0
// A tensor with one scale as items of 16 bytes, and the largest magnitudes that CTAs leave to each
// other: what the kernels of quantize/per_tensor.cuh share.
#pragma once

#include "precast/core/items.cuh"
#include "precast/quantize/input.cuh"

namespace precast {

constexpr int kTensorCtas = 512;  // at most, of a kernel that leaves maxima; the length of `amaxes`
constexpr int kTensorThreads = 512;
constexpr int kTensorUnroll = 4;  // vectors that a thread loads at once

struct TensorQuantParams {
  QuantTensors tensors;
  float* scale;      // [1]
  uint32_t* amaxes;  // [kTensorCtas]
  float eps;
  uint32_t amax_ctas;  // how many wrote to `amaxes`; this and the rest are set by the launcher
  int held_rounds;     // that fit into shared memory
  uint32_t l2_items;   // that are expected to stay in L2
  Items items;
};

#if defined(__CUDACC__)

// Where the vectors of a tensor are. `flat`: it is one row, as a contiguous tensor is, so that a
// number is a place: on H200 this takes 5 to 11 % less time than `rows` for 14 MB and more.
// `elements`: vectors are not aligned, or not whole.
enum class TensorAccess : int { flat, rows, elements };

// A vector of the tensor by its number.
template <typename T, typename Q, TensorAccess kAccess>
struct TensorItem {
  static constexpr int kSize = Vec<T>::kSize;
  static constexpr bool kAligned = kAccess != TensorAccess::elements;
  const T* input;  // [kSize] of [columns]
  Q* out;          // [kSize] of [columns]
  int64_t left;

  __device__ __forceinline__ TensorItem(const TensorQuantParams& p, uint32_t item) {
    const QuantTensors& t = p.tensors;
    if constexpr (kAccess == TensorAccess::flat) {
      input = static_cast<const T*>(t.input) + static_cast<int64_t>(item) * kSize;
      out = static_cast<Q*>(t.out) + static_cast<int64_t>(item) * kSize;
      left = kSize;
    } else {
      const ItemPosition at(p.items, item, kSize);
      const RowPosition row(t.rows, at.row);
      input = input_row<T>(t, row) + at.column;
      out = out_row<Q>(t, row) + at.column;
      left = t.columns - at.column;
    }
  }

  __device__ __forceinline__ QuantVec<T, false> load(L2Policy policy) const {
    QuantVec<T, false> vec;
    vec.template load_from<kAligned>(input, 0, left, policy);
    return vec;
  }

  __device__ __forceinline__ void store(const QuantVec<T, false>& vec, float reciprocal) const {
    vec.template store_to<Q, kAligned>(out, reciprocal, left);
  }
};

__device__ __forceinline__ void store_amax(const TensorQuantParams& p, uint32_t amax) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(p.amaxes + blockIdx.x), "r"(amax) : "memory");
}

// The largest of all; valid in every thread.
__device__ __forceinline__ uint32_t load_amax(const TensorQuantParams& p,
                                              uint32_t (&scratch)[kMaxWarps]) {
  uint32_t amax = 0u;
  for (uint32_t cta = threadIdx.x; cta < p.amax_ctas; cta += blockDim.x) {
    uint32_t one;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                 : "=r"(one)
                 : "l"(p.amaxes + cta)
                 : "memory");
    amax = max(amax, one);
  }
  return block_max(amax, scratch);
}

#endif  // __CUDACC__

}  // namespace precast
