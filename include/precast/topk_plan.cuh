// SPDX-License-Identifier: Apache-2.0
// How many CTAs of how many threads work on a row, and how much their lists hold.
#pragma once

#include "precast/topk.cuh"

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#if defined(TOPK_EXPERIMENT)
#include <cstdlib>
#endif
#include <atomic>  // Why: launches may come from several threads
#endif

namespace precast {

#if !defined(__CUDACC_RTC__) && defined(__CUDACC__)

struct TopKPlan {
  int ctas;  // of a row
  int threads;
  int room;    // of a list
  int most;    // candidates that are ordered by way of a second one
  size_t bytes;
  bool whole;  // the CTAs of a row hold it
  int group;   // vectors, then
  int enough;  // groups
};

#if defined(TOPK_EXPERIMENT)
inline int experiment(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text == nullptr || *text == 0 ? otherwise : atoi(text);
}
#else
inline int experiment(const char*, int otherwise) { return otherwise; }
#endif

// Whether rows fit into the shared memory of clusters that are all there at once. `vec`: elements.
inline bool plan_whole(TopKPlan& plan, uint32_t rows, int size, int k, int vec, int vecs, int padded, int sms,
                       int shared, int shared_of_sm) {
  constexpr int kMost = kTargetHasClusters ? kMostCtas : 1;
  constexpr int kBehind = 1024;  // bytes that the system takes of each CTA
  const int only_ctas = experiment("PT_CTAS", 0), only_threads = experiment("PT_THREADS", 0);
  if (!experiment("PT_WHOLE", 1)) return false;
  for (int ctas = kMost; ctas > 0; ctas /= 2) {
    for (int threads : {kLeastThreads}) {
      if (only_ctas && only_ctas != ctas) continue;
      if (only_threads && only_threads != threads) continue;
      const int at_once = 1;
      const int places = at_once * (ctas <= 2 ? sms : sms - sms / 8);
      if (int64_t(rows) * ctas > places) continue;
      if (ctas > 1 && size < ctas * 2048) continue;
      const int each = (vecs + ctas * threads - 1) / (ctas * threads);
      if (each * vec > 64) continue;
      const int data = each * threads * kVecBytes;
      const int limit =
          (at_once == 1 ? shared : std::min(shared, shared_of_sm / at_once - kBehind)) -
          static_cast<int>(sizeof(ListShared));
      const int sorted = 8 * (k + kMostInBin);
      const int behind = std::max(data, sorted);  // the row, and what is sorted later
      const int room = std::min(kMaxSorted, (limit - behind) / 8) / 2 * 2;
      if (room < padded) continue;
      const int share = (k + ctas - 1) / ctas;
      const int groups = std::min(each, (experiment("PT_GROUPS", 4) * k + ctas * threads - 1) / (ctas * threads));
      plan.group = (each + groups - 1) / groups;
      const int64_t maxima = int64_t(ctas) * threads * (each / plan.group);
      if (room < size && (maxima < 2 * k || room < 7 * k / 4)) continue;
      plan.ctas = ctas;
      plan.threads = threads;
      plan.whole = true;
      plan.room = room;
      plan.enough = std::max(share + share / 4, room / (2 * ctas));
      plan.bytes = sizeof(ListShared) + 8 * room + behind;
      return true;
    }
  }
  return false;
}

// `shared`: dynamic bytes that a CTA may have.
inline TopKPlan plan_top_k(uint32_t rows, int size, int k, int vec, int vecs, int sms, int shared,
                           int shared_of_sm) {
  constexpr int kMost = kTargetHasClusters ? kMostCtas : 1;
  constexpr int kLeastPart = 8192;                                            // elements
  const int available = (shared - static_cast<int>(sizeof(ListShared))) / 8;  // candidates
  int padded = kLeastSorted;                                                          // what sorting needs
  while (padded < k) padded *= 2;
  TopKPlan plan = {1, kLeastThreads, 0, 0, 0, false, 0, 0};
  if (plan_whole(plan, rows, size, k, vec, vecs, padded, sms, shared, shared_of_sm)) return plan;
  // Few rows: several CTAs each. Of large clusters fewer fit at once than there are SMs for: on
  // H200 16 clusters of 8 take twice the time of 14.
  while (plan.ctas < kMost && size >= plan.ctas * 2 * kLeastPart &&
         int64_t(rows) * plan.ctas * 2 <= (plan.ctas == 1 ? sms : sms - sms / 8)) {
    plan.ctas *= 2;
  }
  plan.ctas = experiment("PT_SCTAS", plan.ctas);
  if (plan.ctas > 1 && 2 * padded > available) plan.ctas = 1;
  // A part that is one tile then comes at once; otherwise two CTAs share an SM, or half of it does.
  if (size <= plan.ctas * kItems * kMaxThreads && int64_t(rows) * plan.ctas <= sms) {
    plan.threads = kMaxThreads;
  }
  plan.threads = experiment("PT_STHREADS", plan.threads);
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
  int device = 0, sms = 0, shared = 0, shared_of_sm = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&shared_of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                    device);
  }
  if (status != cudaSuccess) return status;
  constexpr int kVec = Vec<T>::kSize;
  const bool aligned = reinterpret_cast<uint64_t>(params.input) % kVecBytes == 0 &&
                       params.stride % kVec == 0 && params.row_starts == nullptr;
  const int vecs = (params.size + kVec - 1) / kVec + (aligned ? 0 : 1);
  const TopKPlan plan = plan_top_k(params.rows, params.size, params.k, kVec, vecs, sms, shared,
                                   shared_of_sm);
  const auto kernel = plan.whole ? TopKWholeKernel<T> : TopKKernel<T>;
  static std::atomic<uint64_t> raised_of[2];  // the kernel's limit, a bit a device
  std::atomic<uint64_t>& raised = raised_of[plan.whole];
  const uint64_t bit = uint64_t(1) << (device & 63);
  if (device > 63 || !(raised.load(std::memory_order_relaxed) & bit)) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
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
