// SPDX-License-Identifier: Apache-2.0
// Chooses the cluster size, the CTA size and the shared memory of a sampling launch.
#pragma once

#include "precast/sampling/sampling.cuh"

#if !defined(__CUDACC_RTC__)
#include <atomic>  // Why: several threads may launch at the same time
#endif

namespace precast {

#if !defined(__CUDACC_RTC__) && defined(__CUDACC__)

struct SamplingPlan {
  bool on_chip;
  int ctas;           // CTAs of a cluster
  int threads;        // threads of a CTA
  size_t smem_bytes;  // dynamic shared memory of a CTA
};

inline int ceil_div(int x, int y) { return (x + y - 1) / y; }

// A row stays on chip (in shared memory) if it fits with three CTAs on each multiprocessor. A
// launch of many rows that are read only once streams them from global memory instead, with fewer
// CTAs a row, because then the CTAs of a cluster wait less for each other. `smem_limit` is the
// shared memory in bytes that one CTA may have.
inline SamplingPlan plan_sampling(uint32_t num_rows, int num_tiles, int num_sms, int smem_limit,
                                  bool reads_row_once) {
  constexpr int kTileBytes = kTileSize * sizeof(float);
  // an upper bound on the kernel's static shared memory
  constexpr int kStaticSmemBytes = 12 * 1024;
  const int max_ctas = kTargetHasClusters ? kMaxSamplerCtas : 1;
  const int tiles_per_chunk = ceil_div(num_tiles, kNumChunks);
  constexpr int kTargetTilesPerCta = 16;  // three CTAs then fit on a multiprocessor
  SamplingPlan plan = {};
  plan.ctas = 1;
  while (plan.ctas < max_ctas && num_tiles > plan.ctas * kTargetTilesPerCta) plan.ctas *= 2;
  // A launch of few rows gives each row more CTAs.
  while (plan.ctas < max_ctas && num_rows * plan.ctas * 2 <= uint32_t(num_sms) &&
         num_tiles >= plan.ctas * 4) {
    plan.ctas *= 2;
  }
  const bool streams = reads_row_once && num_rows * plan.ctas > 3 * uint32_t(num_sms);
  while (streams && plan.ctas > 1 && num_rows * plan.ctas > uint32_t(num_sms)) plan.ctas /= 2;
  const int max_cta_tiles = kNumChunks / plan.ctas * tiles_per_chunk;
  const int cta_tiles = num_tiles < max_cta_tiles ? num_tiles : max_cta_tiles;
  plan.smem_bytes =
      Sampler<f32, true>::header_floats(tiles_per_chunk, kNumChunks / plan.ctas) * sizeof(float);
  const auto fits = [&](int num_buffers) {
    return plan.smem_bytes + size_t(num_buffers) * kTileBytes + kStaticSmemBytes <=
           size_t(smem_limit);
  };
  plan.on_chip = !streams && fits(cta_tiles);
  constexpr int kMaxWarpsPerCta = kMaxThreadsPerCta / kWarpSize;
  int num_warps = ceil_div(cta_tiles, num_rows * plan.ctas > uint32_t(num_sms) ? 2 : 1);
  if (num_warps > kMaxWarpsPerCta) num_warps = kMaxWarpsPerCta;
  while (!plan.on_chip && num_warps > 1 && !fits(num_warps)) --num_warps;
  plan.threads = num_warps * kWarpSize;
  plan.smem_bytes += size_t(plan.on_chip ? cta_tiles : num_warps) * kTileBytes;
  return plan;
}

// Lets a kernel use all `smem_limit` bytes of shared memory that a CTA may have on `device`, which
// must be the current device. The attribute is set once for each device.
template <auto kKernel>
cudaError_t raise_smem_limit(int smem_limit, int device) {
  static std::atomic<uint64_t> allowed{0};
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
  if (allowed.load(std::memory_order_acquire) & bit) return cudaSuccess;
  cudaFuncAttributes attributes = {};
  cudaError_t status = cudaFuncGetAttributes(&attributes, kKernel);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
  }
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  smem_limit - static_cast<int>(attributes.sharedSizeBytes));
  }
  if (status == cudaSuccess) allowed.fetch_or(bit, std::memory_order_release);
  return status;
}

template <auto kKernel, typename Params>
cudaError_t launch_planned(const SamplingPlan& plan, const Params& params, int smem_limit,
                           int device, bool enable_pdl, cudaStream_t stream) {
  if (plan.smem_bytes > 32 * 1024) {
    const cudaError_t status = raise_smem_limit<kKernel>(smem_limit, device);
    if (status != cudaSuccess) return status;
  }
  return launch_clusters(kKernel, dim3(params.source.num_outputs * plan.ctas), dim3(plan.threads),
                         plan.ctas, plan.smem_bytes, enable_pdl, stream, params);
}

// Launches one of two kernels of an op for params.source: kOnChip keeps a row in shared memory,
// kStreaming reads it from global memory in each pass.
template <auto kOnChip, auto kStreaming, typename Params>
cudaError_t launch_sampling(Params params, bool enable_pdl, cudaStream_t stream,
                            bool reads_row_once = false) {
  RowSource& source = params.source;
  if (source.num_outputs == 0) return cudaSuccess;
  int device = 0, num_sms = 0, smem_limit = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&smem_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status != cudaSuccess) return status;
  source.num_tiles = ceil_div(source.vocab_size, kTileSize);
  source.tiles_per_chunk = ceil_div(source.num_tiles, kNumChunks);
  const SamplingPlan plan =
      plan_sampling(source.num_outputs, source.num_tiles, num_sms, smem_limit, reads_row_once);
  return plan.on_chip
             ? launch_planned<kOnChip>(plan, params, smem_limit, device, enable_pdl, stream)
             : launch_planned<kStreaming>(plan, params, smem_limit, device, enable_pdl, stream);
}

#endif

}  // namespace precast
