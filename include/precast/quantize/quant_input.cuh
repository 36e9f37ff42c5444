// SPDX-License-Identifier: Apache-2.0
// The input of a quantisation: a tensor, or the gated activation of one, which is never rounded in
// between.
#pragma once

#include "precast/activation/activation.cuh"
#include "precast/core/quant.cuh"
#include "precast/core/rows.cuh"

namespace precast {

// The tensors that every quantisation has. Each kernel adds its scales.
struct QuantTensors {
  const void* input;  // [rows, columns], or [rows, 2 * columns] with the gate first
  void* out;          // [rows, columns] codes
  RowStrides input_strides;
  RowStrides out_strides;
  Rows rows;
  int64_t columns;
};

#if defined(__CUDACC__)

// One vector of input between its load and its store. It is held as it was loaded, which takes the
// fewest registers; with kGated, gate() turns it into the fp32 values of silu(gate) * up. Why
// gate() is a step of its own: all loads of a thread should be in flight before the first one is
// waited for.
template <typename T, bool kGated>
struct QuantVec {
  static constexpr int kSize = Vec<T>::kSize;
  Vec<T> loaded;

  // `left` is the number of elements that exist. `columns` is not used.
  template <bool kAligned>
  __device__ __forceinline__ void load_from(const T* source, int64_t columns, int64_t left,
                                            L2Policy policy) {
    loaded = load<kAligned>(source, left, policy);
  }
  __device__ __forceinline__ void clear() { loaded = zero_vec<T>(); }
  __device__ __forceinline__ void gate() {}
  __device__ __forceinline__ uint32_t amax() const { return amax_bits(loaded); }

  template <typename Q, bool kAligned>
  __device__ __forceinline__ void store_to(Q* target, float reciprocal, int64_t left) const {
    float x[kSize];
    unpack(loaded, x);
    store_codes<Q, kAligned>(target, x, reciprocal, left);
  }
};

template <typename T>
struct QuantVec<T, true> {
  static constexpr int kSize = Vec<T>::kSize;
  Vec<T> gates;
  Vec<T> ups;
  float x[kSize];

  // The gate is at `source`, the other factor `columns` elements behind it.
  template <bool kAligned>
  __device__ __forceinline__ void load_from(const T* source, int64_t columns, int64_t left,
                                            L2Policy policy) {
    gates = load<kAligned>(source, left, policy);
    ups = load<kAligned>(source + columns, left, policy);
  }
  __device__ __forceinline__ void clear() { gates = ups = zero_vec<T>(); }
  __device__ __forceinline__ void gate() {
    float up[kSize];
    unpack(gates, x);
    unpack(ups, up);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = activate<Activation::silu>(x[i]) * up[i];
  }
  __device__ __forceinline__ uint32_t amax() const { return amax_bits(x); }

  template <typename Q, bool kAligned>
  __device__ __forceinline__ void store_to(Q* target, float reciprocal, int64_t left) const {
    store_codes<Q, kAligned>(target, x, reciprocal, left);
  }
};

template <typename T, bool kGated>
__device__ __forceinline__ void prefetch_vec(const T* source, int64_t columns) {
  prefetch_to_l2(source);
  if constexpr (kGated) prefetch_to_l2(source + columns);
}

// The row of a tensor in QuantTensors.
template <typename T>
__device__ __forceinline__ const T* input_row(const QuantTensors& t, const RowPosition& row) {
  return row.in<T>(t.input, t.input_strides);
}

template <typename Q>
__device__ __forceinline__ Q* out_row(const QuantTensors& t, const RowPosition& row) {
  return row.in<Q>(t.out, t.out_strides);
}

#if !defined(__CUDACC_RTC__)

// Whether every vector of the input starts at a multiple of 16 bytes, every vector of codes at a
// multiple of its own size, and no vector is partial.
template <typename T>
bool are_vector_aligned(const QuantTensors& t) {
  const int64_t codes = Vec<T>::kSize;  // also their size in bytes
  return t.columns % Vec<T>::kSize == 0 && rows_are_vector_aligned<T>(t.input, t.input_strides) &&
         reinterpret_cast<uint64_t>(t.out) % codes == 0 && t.out_strides.outer % codes == 0 &&
         t.out_strides.inner % codes == 0;
}

#endif

#endif  // __CUDACC__

}  // namespace precast
