// SPDX-License-Identifier: Apache-2.0
// How many CTAs of how many threads work on a row, and how much their lists hold.
#pragma once

#include "precast/topk.cuh"

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <atomic>  // Why: launches may come from several threads
#endif

namespace precast {

#if !defined(__CUDACC_RTC__) && defined(__CUDACC__)

struct TopKPlan {
  int ctas;  // of a row
  int threads;
  int room;  // of a list
};

// `shared`: dynamic bytes that a CTA may have.
inline TopKPlan plan_top_k(uint32_t rows, int size, int k, int sms, int shared) {
  constexpr int kMost = kTargetHasClusters ? kMostCtas : 1;
  constexpr int kLeastPart = 8192;                                            // elements
  const int available = (shared - static_cast<int>(sizeof(ListShared))) / 8;  // candidates
  int padded = kFew;                                                          // what sorting needs
  while (padded < k) padded *= 2;
  TopKPlan plan = {1, kLeastThreads, 0};
  // Few rows: several CTAs each. Of large clusters fewer fit at once than there are SMs for: on
  // H200 16 clusters of 8 take twice the time of 14.
  while (plan.ctas < kMost && size >= plan.ctas * 2 * kLeastPart &&
         int64_t(rows) * plan.ctas * 2 <= (plan.ctas == 1 ? sms : sms - sms / 8)) {
    plan.ctas *= 2;
  }
  if (plan.ctas > 1 && 2 * padded > available) plan.ctas = 1;
  // A part that is one tile then comes at once; otherwise two CTAs share an SM, or half of it does.
  if (size <= plan.ctas * kItems * kMaxThreads && int64_t(rows) * plan.ctas <= sms) {
    plan.threads = kMaxThreads;
  }
  const int wanted = std::max({padded, 4096, std::min(4 * k, 12288)});
  plan.room = std::min(wanted, available / (plan.ctas > 1 ? 2 : 1));
  return plan;
}

template <typename T>
cudaError_t launch_top_k(TopKParams params, bool enable_pdl, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const auto kernel = TopKKernel<T>;
  int device = 0, sms = 0, shared = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status != cudaSuccess) return status;
  static std::atomic<uint64_t> raised{0};  // the kernel's limit, a bit a device
  const uint64_t bit = uint64_t(1) << (device & 63);
  if (device > 63 || !(raised.load(std::memory_order_relaxed) & bit)) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (status != cudaSuccess) return status;
    raised.fetch_or(bit, std::memory_order_relaxed);
  }
  const TopKPlan plan = plan_top_k(params.rows, params.size, params.k, sms, shared);
  params.room = plan.room;
  const size_t bytes = sizeof(ListShared) + sizeof(uint64_t) * plan.room * (plan.ctas > 1 ? 2 : 1);
  return launch_clusters(kernel, dim3(params.rows * plan.ctas), dim3(plan.threads), plan.ctas,
                         bytes, enable_pdl, stream, params);
}

#endif

}  // namespace precast
