// SPDX-License-Identifier: Apache-2.0
// Quantisation to 8 bits with one scale for the whole tensor, computed from its largest magnitude.
//
//   scale     = max(max |x|, eps) / max(Q)                     core/quant.cuh
//   out[r, c] = round(x[r, c] * (1 / scale))
//
// Layout   input  [rows, columns]  T, any two row strides
//          out    [rows, columns]  codes, any two row strides
//          scale  [1]              fp32
//          amaxes [kTensorCtas]    fp32 bits: the maximum of each CTA
// Threads  depend on the size, because the maximum must be known before the first code is written:
//          - ClusterTensorQuantKernel: one CTA, or clusters of 16, keep the tensor in registers;
//          - two passes: TensorAmaxKernel stores one maximum a CTA, and TensorQuantKernel quantises
//            from the end of the tensor to its start, because what was read last is still in L2;
//          - PersistentTensorQuantKernel (quantize/per_tensor_persistent.cuh): all CTAs are
//            resident and share a grid barrier, whose counter belongs to the launch. Tensors that
//            are not aligned take two passes instead.
//          No launch depends on memory that an earlier launch left, so that the result is the same
//          in every run and in every replay of a graph.
// Traffic  writes out once. Reads input twice, but from memory only what neither registers, shared
//          memory (24 MiB on an H200) nor L2 kept.
// Source   definition
// Measured 2026-11-21 on an H200, bf16, [8192, 7168]: static_quant_fp8 40.6 us, 0.98 of the
//          elementwise ceiling; per_tensor_quant_fp8 65.5 us, 1.02 with its input counted twice;
//          74.7 us, 0.89, with strided rows.
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/row_plan.cuh"
#include "precast/core/sm90/cluster.cuh"
#include "precast/quantize/per_tensor_persistent.cuh"

namespace precast {

constexpr int kQuantVecs = 2;  // vectors of a thread in the second of two passes
constexpr int kMaxClusterCtas = 16;

// The number of vectors up to which, or from which, each launch is used, as measured on an H200.
// [64, 4096] (32768 vectors) takes 2.4 us with clusters and 2.5 us in two passes, [64, 7168] 2.9
// either way; [512, 7168] (458752) 6.3 in two passes and 6.9 with the persistent kernel, [1024,
// 7168] 11.0 and 9.6.
constexpr uint32_t kOneCtaItems = 1024;
constexpr uint32_t kClusterItems = 40 << 10;
constexpr uint32_t kPersistentItems = 640 << 10;

#if defined(__CUDACC__)

// The first of two passes, which stores one maximum a CTA.
template <typename T, typename Q, TensorAccess kAccess>
__global__ __launch_bounds__(kTensorThreads) void TensorAmaxKernel(
    const __grid_constant__ TensorQuantParams p) {
  constexpr int kUnroll = kTensorUnroll;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kTensorThreads;
  uint64_t item = static_cast<uint64_t>(blockIdx.x) * kTensorThreads + threadIdx.x;

#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (item + i * step < p.items.count) {
      prefetch_to_l2(TensorVec<T, Q, kAccess>(p, static_cast<uint32_t>(item + i * step)).input);
    }
  }
  // In this order, the input of the second kernel is complete when that kernel starts.
  wait_on_dependent_grids();
  launch_dependent_grids();

  const L2Policy policy = read_policy(true);
  uint32_t amax = 0u;
  for (; item + (kUnroll - 1) * step < p.items.count; item += kUnroll * step) {
    QuantVec<T, false> vecs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      vecs[i] = TensorVec<T, Q, kAccess>(p, static_cast<uint32_t>(item + i * step)).load(policy);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) amax = max(amax, vecs[i].amax());
  }
  for (; item < p.items.count; item += step) {
    const TensorVec<T, Q, kAccess> at(p, static_cast<uint32_t>(item));
    amax = max(amax, at.load(policy).amax());
  }
  __shared__ uint32_t scratch[kMaxWarps];
  amax = block_max(amax, scratch);
  if (threadIdx.x == 0) store_amax(p, amax);
}

template <typename T, typename Q, TensorAccess kAccess>
__global__ __launch_bounds__(kTensorThreads) void TensorQuantKernel(
    const __grid_constant__ TensorQuantParams p) {
  const uint64_t first =
      static_cast<uint64_t>(blockIdx.x) * (kTensorThreads * kQuantVecs) + threadIdx.x;

  launch_dependent_grids();

  // These loads may precede the wait. The previous kernel is TensorAmaxKernel of the same call, and
  // it let this one start only after its own wait, so the input is complete. We rely on the start
  // of a grid to invalidate L1; test_a_chain_reads_what_was_written_before checks that.
  const L2Policy policy = read_policy(true);
  QuantVec<T, false> vecs[kQuantVecs];
#pragma unroll
  for (int i = 0; i < kQuantVecs; ++i) {
    const uint64_t item = first + i * kTensorThreads;
    if (item < p.items.count) {
      const uint32_t from_end = p.items.count - 1 - static_cast<uint32_t>(item);
      vecs[i] = TensorVec<T, Q, kAccess>(p, from_end).load(policy);
    }
  }
  wait_on_dependent_grids();

  __shared__ uint32_t scratch[kMaxWarps];
  const QuantScale scale = quant_scale<Q>(load_amax(p, scratch), p.eps, ScaleFormat::numbers);
#pragma unroll
  for (int i = 0; i < kQuantVecs; ++i) {
    const uint64_t item = first + i * kTensorThreads;
    if (item < p.items.count) {
      const uint32_t from_end = p.items.count - 1 - static_cast<uint32_t>(item);
      TensorVec<T, Q, kAccess>(p, from_end).store(vecs[i], scale.reciprocal);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_scale(p.scale, ScaleFormat::numbers, 0, 0, 0, 1, scale);
  }
}

// One pass: each cluster keeps the whole tensor in registers, four vectors a thread, and quantises
// its share. Why more than one cluster: the work after the maximum has most of the instructions.
template <typename T, typename Q, TensorAccess kAccess>
__global__ __launch_bounds__(kMaxThreads) void ClusterTensorQuantKernel(
    const __grid_constant__ TensorQuantParams p) {
  constexpr int kVecs = kTensorUnroll;
  const uint32_t ctas = cluster_size();
  const uint32_t clusters = gridDim.x / ctas;  // a power of two, at most kVecs
  const uint32_t cluster = blockIdx.x / ctas;
  const uint32_t first = cluster_rank() * blockDim.x + threadIdx.x;
  const uint32_t step = ctas * blockDim.x;
  const auto is_stored_here = [&](uint32_t i) {
    return (i & (clusters - 1)) == cluster && first + i * step < p.items.count;
  };

  cluster_arrive_relaxed();
  launch_dependent_grids();
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (is_stored_here(i)) prefetch_to_l2(TensorVec<T, Q, kAccess>(p, first + i * step).input);
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  QuantVec<T, false> vecs[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t item = first + i * step;
    vecs[i].clear();
    if (item < p.items.count) vecs[i] = TensorVec<T, Q, kAccess>(p, item).load(policy);
  }
  uint32_t amax = 0u;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) amax = max(amax, vecs[i].amax());
  __shared__ uint32_t scratch[kMaxWarps];
  __shared__ uint32_t amaxes[kMaxClusterCtas];  // one of each CTA of the cluster
  amax = block_max(amax, scratch);
  cluster_wait();  // all CTAs of the cluster have started
  if (threadIdx.x < ctas) store_in_cluster(&amaxes[cluster_rank()], threadIdx.x, amax);
  cluster_arrive();
  cluster_wait();
  const uint32_t lane = threadIdx.x % kWarpSize;
  amax = warp_max(lane < ctas ? amaxes[lane] : 0u);

  const QuantScale scale = quant_scale<Q>(amax, p.eps, ScaleFormat::numbers);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (is_stored_here(i)) {
      TensorVec<T, Q, kAccess>(p, first + i * step).store(vecs[i], scale.reciprocal);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_scale(p.scale, ScaleFormat::numbers, 0, 0, 0, 1, scale);
  }
}

#if !defined(__CUDACC_RTC__)

using TensorKernel = void (*)(TensorQuantParams);

// The kernels for one type of input, of codes and of access. `persistent` may be null.
struct TensorKernels {
  TensorKernel cluster;
  TensorKernel amax;
  TensorKernel quant;
  TensorKernel persistent;
};

template <typename T, typename Q, TensorAccess kAccess>
TensorKernels tensor_kernels() {
  TensorKernels kernels = {ClusterTensorQuantKernel<T, Q, kAccess>, TensorAmaxKernel<T, Q, kAccess>,
                           TensorQuantKernel<T, Q, kAccess>, nullptr};
  // There is no persistent kernel for access by elements, which is not bound by memory.
  if constexpr (kAccess != TensorAccess::elements) {
    kernels.persistent = PersistentTensorQuantKernel<T, Q, kAccess>;
  }
  return kernels;
}

inline cudaError_t launch_cluster_tensor_quant(TensorKernel kernel, const TensorQuantParams& p,
                                               bool enable_pdl, cudaStream_t stream) {
  const bool one_cta = p.items.count <= kOneCtaItems;
  const int ctas = one_cta ? 1 : kMaxClusterSize;
  const int items = static_cast<int>(p.items.count);
  const int threads = round_up((items > 0 ? items - 1 : 0) / (ctas * kTensorUnroll) + 1, kWarpSize);
  // Two clusters take 2 to 4 % less time than one on an H200; four are no faster.
  return launch_clusters(kernel, dim3(one_cta ? 1 : 2 * ctas), dim3(threads), ctas, 0, enable_pdl,
                         stream, p);
}

inline cudaError_t launch_two_pass_tensor_quant(const TensorKernels& kernels, TensorQuantParams p,
                                                bool enable_pdl, cudaStream_t stream) {
  const auto ctas_of = [&](uint32_t items) { return (p.items.count - 1) / items + 1; };
  const uint32_t needed = ctas_of(kTensorThreads * kTensorUnroll);
  p.amax_ctas = needed < uint32_t(kTensorCtas) ? needed : uint32_t(kTensorCtas);
  const cudaError_t status =
      launch(kernels.amax, dim3(p.amax_ctas), dim3(kTensorThreads), enable_pdl, stream, p);
  if (status != cudaSuccess) return status;
  return launch(kernels.quant, dim3(ctas_of(kTensorThreads * kQuantVecs)), dim3(kTensorThreads),
                enable_pdl, stream, p);
}

// Launches one or two kernels on `stream`. The scale of an empty tensor is that of eps. Returns
// cudaErrorInvalidValue if the tensor has more than 2^32 vectors.
template <typename T, typename Q>
cudaError_t launch_tensor_quant(TensorQuantParams p, bool enable_pdl, cudaStream_t stream) {
  const QuantTensors& t = p.tensors;
  if (t.rows.count > 0 && t.columns > 0) {
    const ItemPlan plan = plan_items(t.rows.count, t.columns, Vec<T>::kSize);
    if (!plan.fits) return cudaErrorInvalidValue;
    p.items = plan.items;
  }
  const TensorKernels kernels = !are_vector_aligned<T>(t)
                                    ? tensor_kernels<T, Q, TensorAccess::elements>()
                                : t.rows.count > 1 ? tensor_kernels<T, Q, TensorAccess::rows>()
                                                   : tensor_kernels<T, Q, TensorAccess::flat>();
  if (p.items.count <= (kMaxClusterSize > 1 ? kClusterItems : kOneCtaItems)) {
    const cudaError_t status = launch_cluster_tensor_quant(kernels.cluster, p, enable_pdl, stream);
    if (!is_cluster_too_large(status)) return status;
  }
  if (p.items.count >= kPersistentItems && kernels.persistent) {
    const cudaError_t status =
        launch_persistent_tensor_quant(kernels.persistent, p, enable_pdl, stream);
    if (status != cudaErrorCooperativeLaunchTooLarge) return status;
  }
  return launch_two_pass_tensor_quant(kernels, p, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
