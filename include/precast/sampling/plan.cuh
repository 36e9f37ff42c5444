// SPDX-License-Identifier: Apache-2.0
// How many CTAs and threads work on a row.
#pragma once

#include "precast/sampling/sampling.cuh"

#if !defined(__CUDACC_RTC__)
#include <atomic>  // Why: launches may come from several threads
#endif

namespace precast {

#if !defined(__CUDACC_RTC__) && defined(__CUDACC__)

struct SamplingPlan {
  bool on_chip;
  int ctas;       // of a cluster
  int threads;    // of a CTA
  size_t shared;  // dynamic bytes
};

inline int divide_up(int x, int y) { return (x + y - 1) / y; }

// Rows stay on chip where they fit, three CTAs a multiprocessor. Many rows that are read but once
// do not: the fewer CTAs a row has then, the less they wait for each other. `memory`: bytes of
// shared memory that a CTA may have.
inline SamplingPlan plan_sampling(uint32_t rows, int slabs, int sms, int memory, bool reads_once) {
  constexpr int kSlabBytes = kSlab * sizeof(float);
  constexpr int kOwnBytes = 12 * 1024;  // of the kernel's own variables, and more
  const int most = kTargetHasClusters ? kMaxCtas : 1;
  const int group = divide_up(slabs, kGroups);  // slabs
  constexpr int kSlabsOfCta = 16;               // three CTAs a multiprocessor
  SamplingPlan plan = {};
  plan.ctas = 1;
  while (plan.ctas < most && slabs > plan.ctas * kSlabsOfCta) plan.ctas *= 2;
  // Few rows: more CTAs each.
  while (plan.ctas < most && rows * plan.ctas * 2 <= uint32_t(sms) && slabs >= plan.ctas * 4) {
    plan.ctas *= 2;
  }
  const bool walks = reads_once && rows * plan.ctas > 3 * uint32_t(sms);
  while (walks && plan.ctas > 1 && rows * plan.ctas > uint32_t(sms)) plan.ctas /= 2;
  const int most_of_cta = kGroups / plan.ctas * group;
  const int count = slabs < most_of_cta ? slabs : most_of_cta;
  plan.shared = Sampler<f32, true>::numbers_ahead(group, kGroups / plan.ctas) * sizeof(float);
  const auto fits = [&](int copies) {
    return plan.shared + size_t(copies) * kSlabBytes + kOwnBytes <= size_t(memory);
  };
  plan.on_chip = !walks && fits(count);
  constexpr int kMostWarps = kRowThreads / kWarpSize;
  int warps = divide_up(count, rows * plan.ctas > uint32_t(sms) ? 2 : 1);
  if (warps > kMostWarps) warps = kMostWarps;
  while (!plan.on_chip && warps > 1 && !fits(warps)) --warps;
  plan.threads = warps * kWarpSize;
  plan.shared += size_t(plan.on_chip ? count : warps) * kSlabBytes;
  return plan;
}

// Lets a kernel have all of the `memory` bytes of shared memory that a CTA may have on `device`,
// which is current. Once a device.
template <auto kKernel>
cudaError_t allow_shared(int memory, int device) {
  static std::atomic<uint64_t> allowed{0};
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
  if (allowed.load(std::memory_order_acquire) & bit) return cudaSuccess;
  cudaFuncAttributes own = {};
  cudaError_t status = cudaFuncGetAttributes(&own, kKernel);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
  }
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  memory - static_cast<int>(own.sharedSizeBytes));
  }
  if (status == cudaSuccess) allowed.fetch_or(bit, std::memory_order_release);
  return status;
}

template <auto kKernel, typename Params>
cudaError_t launch_planned(const SamplingPlan& plan, const Params& params, int memory, int device,
                           bool enable_pdl, cudaStream_t stream) {
  if (plan.shared > 32 * 1024) {
    const cudaError_t status = allow_shared<kKernel>(memory, device);
    if (status != cudaSuccess) return status;
  }
  return launch_clusters(kKernel, dim3(params.source.outputs * plan.ctas), dim3(plan.threads),
                         plan.ctas, plan.shared, enable_pdl, stream, params);
}

// Launches the kernel of an op for rows on chip, or the one that reads them again, for
// params.source.
template <auto kOnChip, auto kWalking, typename Params>
cudaError_t launch_sampling(Params params, bool enable_pdl, cudaStream_t stream,
                            bool reads_once = false) {
  RowSource& source = params.source;
  if (source.outputs == 0) return cudaSuccess;
  int device = 0, sms = 0, memory = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status != cudaSuccess) return status;
  source.slabs = divide_up(source.vocab, kSlab);
  source.slabs_of_group = divide_up(source.slabs, kGroups);
  const SamplingPlan plan = plan_sampling(source.outputs, source.slabs, sms, memory, reads_once);
  return plan.on_chip ? launch_planned<kOnChip>(plan, params, memory, device, enable_pdl, stream)
                      : launch_planned<kWalking>(plan, params, memory, device, enable_pdl, stream);
}

#endif

}  // namespace precast
