// SPDX-License-Identifier: Apache-2.0
// What the kernels of quantize/per_tensor.cuh share: the parameters, the vectors of a tensor by
// their index, and the exchange of the CTAs' maxima.
#pragma once

#include "precast/core/items.cuh"
#include "precast/quantize/quant_input.cuh"

namespace precast {

// an upper bound on the CTAs of a kernel that stores maxima; the length of `amaxes`
constexpr int kTensorCtas = 512;
constexpr int kTensorThreads = 512;
constexpr int kTensorUnroll = 4;  // vectors that a thread loads at once

struct TensorQuantParams {
  QuantTensors tensors;
  float* scale;      // [1]
  uint32_t* amaxes;  // [kTensorCtas]
  float eps;
  uint32_t amax_ctas;  // CTAs that store to `amaxes`; set by the launcher, like the following
  int smem_rounds;     // rounds of vectors that fit in shared memory
  uint32_t l2_items;   // vectors that are expected to stay in L2
  Items items;
};

#if defined(__CUDACC__)

// How vectors are addressed. `flat`: the tensor is one row, as every contiguous tensor is, so that
// the index gives the address: on an H200 this takes 5 to 11 % less time than `rows` for 14 MB and
// more. `elements`: vectors are not aligned, or not whole.
enum class TensorAccess : int { flat, rows, elements };

// A vector of the tensor by its index.
template <typename T, typename Q, TensorAccess kAccess>
struct TensorVec {
  static constexpr int kSize = Vec<T>::kSize;
  static constexpr bool kAligned = kAccess != TensorAccess::elements;
  const T* input;  // [kSize] of [columns]
  Q* out;          // [kSize] of [columns]
  int64_t left;

  __device__ __forceinline__ TensorVec(const TensorQuantParams& p, uint32_t item) {
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

// Returns the largest maximum of all CTAs. It is valid in every thread.
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
