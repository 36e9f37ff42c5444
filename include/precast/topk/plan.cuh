// SPDX-License-Identifier: Apache-2.0
// How many CTAs of how many threads work on a row, and how much their lists hold.
#pragma once

#include "precast/topk/topk.cuh"

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <atomic>  // Why: launches may come from several threads
#endif

namespace precast {

#if !defined(__CUDACC_RTC__) && defined(__CUDACC__)

struct TopKPlan {
  int ctas;  // of a row
  int threads;
  int room;      // of a list
  int most;      // candidates that can be ordered by way of a second list
  size_t bytes;  // of shared memory
  bool whole;    // which holds the rows; then:
  int group;     // vectors
  int enough;    // groups of a CTA that may reach the floor
};

struct TopKLimits {
  int sms;
  int shared;  // dynamic bytes that a CTA may have
};

// Whether the clusters of that many CTAs are all there at once. Of large ones fewer are than there
// are SMs for: on H200 16 clusters of 8 take twice the time of 14.
inline bool all_at_once(uint32_t rows, int ctas, int sms) {
  return int64_t(rows) * ctas <= (ctas <= 2 ? sms : sms - sms / 8);
}

// Whether the shared memory of clusters that are all there at once holds the rows. `vecs`: of a
// row, `vec` elements each.
inline bool plan_whole(TopKPlan& plan, uint32_t rows, int size, int k, int vec, int vecs,
                       int padded, const TopKLimits& limits) {
  constexpr int kLeastPart = 2048;  // elements
  const int second = 8 * (k + kMostInBin);
  int ctas = kTargetHasClusters ? kMostCtas : 1;
  while (ctas > 1 && (!all_at_once(rows, ctas, limits.sms) || size < ctas * kLeastPart)) ctas /= 2;
  if (!all_at_once(rows, ctas, limits.sms)) return false;
  const int threads = ctas * kWholeThreads;
  const int each = (vecs + threads - 1) / threads;
  const int data = each * kWholeThreads * kVecBytes;
  const int behind = std::max(data, second);  // the row, and later what is put in order
  const int left = limits.shared - static_cast<int>(sizeof(ListShared)) - behind;
  const int room = std::min(kMaxSorted, left / 8) / 2 * 2;
  if (each * vec > kMostOfThread || room < padded) return false;
  // Four groups for one of the k largest: few of them share one, so that the floor is close.
  const int groups = std::min(each, (4 * k + threads - 1) / threads);
  plan.group = (each + groups - 1) / groups;
  // Unless all fit on the list.
  if (size > room && (threads * (each / plan.group) < 2 * k || room < k + k / 4 * 3)) return false;
  const int share = (k + ctas - 1) / ctas;
  plan.enough = std::max(share + share / 4, room / (2 * ctas));
  plan.ctas = ctas;
  plan.threads = kWholeThreads;
  plan.room = room;
  plan.bytes = sizeof(ListShared) + 8 * room + behind;
  plan.whole = true;
  return true;
}

// `vecs`: of a row, `vec` elements each.
inline TopKPlan plan_top_k(uint32_t rows, int size, int k, int vec, int vecs,
                           const TopKLimits& limits) {
  constexpr int kMost = kTargetHasClusters ? kMostCtas : 1;
  constexpr int kLeastPart = 8192;  // elements
  int padded = kLeastSorted;        // what sorting needs
  while (padded < k) padded *= 2;
  TopKPlan plan = {1, kLeastThreads, 0, 0, 0, false, 0, 0};
  if (plan_whole(plan, rows, size, k, vec, vecs, padded, limits)) return plan;
  const int available = (limits.shared - static_cast<int>(sizeof(ListShared))) / 8;  // candidates
  // Few rows: several CTAs each.
  while (plan.ctas < kMost && size >= plan.ctas * 2 * kLeastPart &&
         all_at_once(rows, plan.ctas * 2, limits.sms)) {
    plan.ctas *= 2;
  }
  if (plan.ctas > 1 && 2 * padded > available) plan.ctas = 1;
  // A part that is one tile then comes at once; otherwise two CTAs share an SM, or half of it does.
  if (size <= plan.ctas * kItems * kMaxThreads && int64_t(rows) * plan.ctas <= limits.sms) {
    plan.threads = kMaxThreads;
  }
  const int wanted = std::max({padded, 4096, std::min(4 * k, 12288)});
  int second = k + kMostInBin;
  if (plan.ctas == 1 && padded + second > available) second = 0;
  plan.room = std::min(wanted, plan.ctas > 1 ? available / 2 : available - second);
  plan.most = second > 0 && (plan.ctas == 1 || second <= plan.room) ? plan.room : 0;
  plan.bytes = sizeof(ListShared) + 8 * (plan.room + (plan.ctas > 1 ? plan.room : second));
  return plan;
}

template <typename T>
cudaError_t launch_top_k(TopKParams params, bool enable_pdl, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  int device = 0;
  TopKLimits limits = {};
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&limits.sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status =
        cudaDeviceGetAttribute(&limits.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status != cudaSuccess) return status;
  constexpr int kVec = Vec<T>::kSize;
  const bool aligned = reinterpret_cast<uint64_t>(params.input) % kVecBytes == 0 &&
                       (params.rows == 1 || params.stride % kVec == 0) &&
                       params.row_starts == nullptr;
  const int vecs = (params.size + kVec - 1) / kVec + (aligned ? 0 : 1);
  const TopKPlan plan = plan_top_k(params.rows, params.size, params.k, kVec, vecs, limits);
  const auto kernel = plan.whole ? TopKWholeKernel<T> : TopKKernel<T>;
  static std::atomic<uint64_t> raised_of[2] = {};  // the kernel's limit, a bit a device
  std::atomic<uint64_t>& raised = raised_of[plan.whole];
  const uint64_t bit = uint64_t(1) << (device & 63);
  if (device > 63 || !(raised.load(std::memory_order_relaxed) & bit)) {
    status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared);
    if (status != cudaSuccess) return status;
    raised.fetch_or(bit, std::memory_order_relaxed);
  }
  params.room = plan.room;
  params.most = plan.most;
  params.group = plan.group;
  params.enough = plan.enough;
  return launch_clusters(kernel, dim3(params.rows * plan.ctas), dim3(plan.threads), plan.ctas,
                         plan.bytes, enable_pdl, stream, params);
}

#endif

}  // namespace precast
