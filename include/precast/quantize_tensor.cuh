// SPDX-License-Identifier: Apache-2.0
// Quantisation to 8 bits with one scale for the whole tensor, found on the way.
//
//   scale     = max(max |x|, eps) / max(Q)                     core/quant.cuh
//   out[r, c] = round(x[r, c] * (1 / scale))
//
// Layout   input  [rows, columns]  T, any two row strides
//          out    [rows, columns]  codes, any two row strides
//          scale  [1]              fp32
//          amaxes [kTensorCtas]    fp32 bits: between the two kernels
// Threads  up to kSmallTensorVecs vectors: one CTA keeps them in registers, one launch. Otherwise
//          TensorAmaxKernel leaves one maximum a CTA, and TensorQuantKernel, whose CTAs each reduce
//          those, quantises two vectors a thread, from the end of the tensor to its start: what was
//          read last is still in L2. No atomics and nothing to clear: the result is the same in
//          every run, and so is the launch in a graph.
// Traffic  reads input twice (once out of L2 as far as it fits), writes out once.
// Source   definition.
// Measured 2026-11-21 on an H200, bf16, [8192, 7168]: static_quant_fp8 40.6 us, 0.98 of the
//          elementwise ceiling; per_tensor_quant_fp8, which reads twice, 75.2 us, 0.89.
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/row_plan.cuh"
#include "precast/quantize_input.cuh"

namespace precast {

constexpr int kTensorCtas = 512;  // of the first kernel; also the length of `amaxes`
constexpr int kTensorThreads = 512;
constexpr int kTensorVecs = 2;  // a thread of the second kernel
constexpr int kSmallTensorVecsPerThread = 4;

struct TensorQuantParams {
  QuantTensors tensors;
  float* scale;      // [1]
  uint32_t* amaxes;  // [kTensorCtas]
  float eps;
  uint32_t amax_ctas;  // the launcher sets it
  Items items;         // the launcher sets it
};

#if defined(__CUDACC__)

// A vector of the tensor by its number.
template <typename T, typename Q, bool kAligned>
struct TensorItem {
  static constexpr int kSize = Vec<T>::kSize;
  const T* input;  // [kSize] of [columns]
  Q* out;          // [kSize] of [columns]
  int64_t left;

  __device__ __forceinline__ TensorItem(const TensorQuantParams& p, uint32_t item) {
    const QuantTensors& t = p.tensors;
    const ItemPosition at(p.items, item, kSize);
    const RowPosition row(t.rows, at.row);
    input = input_row<T>(t, row) + at.column;
    out = out_row<Q>(t, row) + at.column;
    left = t.columns - at.column;
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

template <typename T, typename Q, bool kAligned>
__global__ __launch_bounds__(kTensorThreads) void TensorAmaxKernel(
    const __grid_constant__ TensorQuantParams p) {
  constexpr int kUnroll = 4;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kTensorThreads;
  uint64_t item = static_cast<uint64_t>(blockIdx.x) * kTensorThreads + threadIdx.x;

  allow_next_grid();
  wait_for_previous_grid();

  const L2Policy policy = read_policy(true);
  uint32_t amax = 0u;
  for (; item + (kUnroll - 1) * step < p.items.count; item += kUnroll * step) {
    QuantVec<T, false> vecs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      vecs[i] = TensorItem<T, Q, kAligned>(p, static_cast<uint32_t>(item + i * step)).load(policy);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) amax = max(amax, vecs[i].amax());
  }
  for (; item < p.items.count; item += step) {
    const TensorItem<T, Q, kAligned> at(p, static_cast<uint32_t>(item));
    amax = max(amax, at.load(policy).amax());
  }
  __shared__ uint32_t scratch[kMaxWarps];
  amax = block_max(amax, scratch);
  if (threadIdx.x == 0) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p.amaxes + blockIdx.x), "r"(amax) : "memory");
  }
}

template <typename T, typename Q, bool kAligned>
__global__ __launch_bounds__(kTensorThreads) void TensorQuantKernel(
    const __grid_constant__ TensorQuantParams p) {
  const uint64_t first =
      static_cast<uint64_t>(blockIdx.x) * (kTensorThreads * kTensorVecs) + threadIdx.x;

  allow_next_grid();
  wait_for_previous_grid();

  const L2Policy policy = read_policy(true);
  QuantVec<T, false> vecs[kTensorVecs];
#pragma unroll
  for (int i = 0; i < kTensorVecs; ++i) {
    const uint64_t item = first + i * kTensorThreads;
    if (item < p.items.count) {
      const uint32_t from_end = p.items.count - 1 - static_cast<uint32_t>(item);
      vecs[i] = TensorItem<T, Q, kAligned>(p, from_end).load(policy);
    }
  }
  uint32_t amax = 0u;
  static_assert(kTensorCtas <= kTensorThreads, "one maximum a thread");
  if (threadIdx.x < p.amax_ctas) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(amax) : "l"(p.amaxes + threadIdx.x) : "memory");
  }
  __shared__ uint32_t scratch[kMaxWarps];
  amax = block_max(amax, scratch);
  const QuantScale scale = quant_scale<Q>(amax, p.eps, ScaleFormat::numbers);
#pragma unroll
  for (int i = 0; i < kTensorVecs; ++i) {
    const uint64_t item = first + i * kTensorThreads;
    if (item < p.items.count) {
      const uint32_t from_end = p.items.count - 1 - static_cast<uint32_t>(item);
      TensorItem<T, Q, kAligned>(p, from_end).store(vecs[i], scale.reciprocal);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_scale(p.scale, ScaleFormat::numbers, 0, 0, 0, 1, scale);
  }
}

// The whole tensor by one CTA.
template <typename T, typename Q, bool kAligned>
__global__ __launch_bounds__(kMaxThreads) void SmallTensorQuantKernel(
    const __grid_constant__ TensorQuantParams p) {
  allow_next_grid();
  wait_for_previous_grid();

  const L2Policy policy = read_policy(true);
  QuantVec<T, false> vecs[kSmallTensorVecsPerThread];
  uint32_t amax = 0u;
#pragma unroll
  for (int i = 0; i < kSmallTensorVecsPerThread; ++i) {
    const uint32_t item = threadIdx.x + i * blockDim.x;
    vecs[i].clear();
    if (item < p.items.count) vecs[i] = TensorItem<T, Q, kAligned>(p, item).load(policy);
  }
#pragma unroll
  for (int i = 0; i < kSmallTensorVecsPerThread; ++i) amax = max(amax, vecs[i].amax());
  __shared__ uint32_t scratch[kMaxWarps];
  amax = block_max(amax, scratch);
  const QuantScale scale = quant_scale<Q>(amax, p.eps, ScaleFormat::numbers);
#pragma unroll
  for (int i = 0; i < kSmallTensorVecsPerThread; ++i) {
    const uint32_t item = threadIdx.x + i * blockDim.x;
    if (item < p.items.count) {
      TensorItem<T, Q, kAligned>(p, item).store(vecs[i], scale.reciprocal);
    }
  }
  if (threadIdx.x == 0) store_scale(p.scale, ScaleFormat::numbers, 0, 0, 0, 1, scale);
}

#if !defined(__CUDACC_RTC__)

// Launches on `stream`, once or twice. An empty tensor has the scale of eps. cudaErrorInvalidValue
// if the tensor has more than 2^32 vectors.
template <typename T, typename Q>
cudaError_t launch_tensor_quant(TensorQuantParams p, bool enable_pdl, cudaStream_t stream) {
  const QuantTensors& t = p.tensors;
  if (t.rows.count > 0 && t.columns > 0) {
    const ItemPlan plan = plan_items(t.rows.count, t.columns, Vec<T>::kSize);
    if (!plan.fits) return cudaErrorInvalidValue;
    p.items = plan.items;
  }
  const bool aligned = are_vector_aligned<T>(t);
  const uint32_t count = p.items.count;
  if (count <= uint32_t(kMaxThreads * kSmallTensorVecsPerThread)) {
    const int threads = count >= kMaxThreads ? kMaxThreads
                        : count > 0          ? round_up(static_cast<int>(count), kWarpSize)
                                             : kWarpSize;
    const auto kernel =
        aligned ? SmallTensorQuantKernel<T, Q, true> : SmallTensorQuantKernel<T, Q, false>;
    return launch(kernel, dim3(1), dim3(threads), enable_pdl, stream, p);
  }
  const auto ctas_of = [&](uint32_t items) { return (count - 1) / items + 1; };
  const uint32_t needed = ctas_of(kTensorThreads);
  p.amax_ctas = needed < uint32_t(kTensorCtas) ? needed : uint32_t(kTensorCtas);
  const cudaError_t status =
      launch(aligned ? TensorAmaxKernel<T, Q, true> : TensorAmaxKernel<T, Q, false>,
             dim3(p.amax_ctas), dim3(kTensorThreads), enable_pdl, stream, p);
  if (status != cudaSuccess) return status;
  return launch(aligned ? TensorQuantKernel<T, Q, true> : TensorQuantKernel<T, Q, false>,
                dim3(ctas_of(kTensorThreads * kTensorVecs)), dim3(kTensorThreads), enable_pdl,
                stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
