// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel, the cluster size, the CTA size and the list capacity of a top-k launch.
#pragma once

#include "precast/topk/large_k.cuh"
#include "precast/topk/topk.cuh"

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <atomic>  // Why: several threads may launch at the same time
#endif

namespace precast {

#if !defined(__CUDACC_RTC__) && defined(__CUDACC__)

enum class TopKKernelKind : int { streaming, resident, large_k };

struct TopKPlan {
  int ctas;  // CTAs of a row; for a large k not in a cluster
  int threads;
  int list_capacity;      // in candidates
  int max_bucket_sorted;  // candidates that can be sorted with a second list
  size_t smem_bytes;      // dynamic shared memory of a CTA
  TopKKernelKind kind;
  // For rows that shared memory holds:
  int vecs_per_group;
  int enough_groups;  // groups of a CTA that may reach the threshold
};

struct TopKLimits {
  int num_sms;
  int smem_bytes;  // dynamic shared memory that a CTA may have
};

// Whether all clusters of that many CTAs can be resident at once. For large clusters this takes
// more SMs than they have CTAs: on an H200, 16 clusters of 8 take twice the time of 14.
inline bool fits_one_wave(uint32_t rows, int ctas, int num_sms) {
  return int64_t(rows) * ctas <= (ctas <= 2 ? num_sms : num_sms - num_sms / 8);
}

// Whether the rows fit in the shared memory of clusters that are all resident at once. A row has
// `vecs` vectors of `vec` elements.
inline bool plan_resident(TopKPlan& plan, uint32_t rows, int size, int k, int vec, int vecs,
                          int padded, const TopKLimits& limits) {
  constexpr int kMinItemsPerCta = 2048;
  const int sort_buffer = 8 * (k + kMaxInBin);
  int ctas = kTargetHasClusters ? kMaxCtasPerRow : 1;
  while (ctas > 1 &&
         (!fits_one_wave(rows, ctas, limits.num_sms) || size < ctas * kMinItemsPerCta)) {
    ctas /= 2;
  }
  if (!fits_one_wave(rows, ctas, limits.num_sms)) return false;
  const int threads = ctas * kResidentThreads;
  const int vecs_per_thread = (vecs + threads - 1) / threads;
  const int data = vecs_per_thread * kResidentThreads * kVecBytes;
  const int row_smem = std::max(data, sort_buffer);  // the row, and later the sorted list
  const int list_smem = limits.smem_bytes - static_cast<int>(sizeof(TopKStorage)) - row_smem;
  const int list_capacity = std::min(kMaxSorted, list_smem / 8) / 2 * 2;
  if (vecs_per_thread * vec > kMaxItemsOfThread || list_capacity < padded) return false;
  // Four groups for each of the k largest: seldom do two of these share a group, so that the
  // threshold is tight.
  const int groups = std::min(vecs_per_thread, (4 * k + threads - 1) / threads);
  plan.vecs_per_group = (vecs_per_thread + groups - 1) / groups;
  // The conditions do not matter if all elements fit on the list.
  if (size > list_capacity && (threads * (vecs_per_thread / plan.vecs_per_group) < 2 * k ||
                               list_capacity < k + k / 4 * 3)) {
    return false;
  }
  const int cta_share = (k + ctas - 1) / ctas;
  plan.enough_groups = std::max(cta_share + cta_share / 4, list_capacity / (2 * ctas));
  plan.ctas = ctas;
  plan.threads = kResidentThreads;
  plan.list_capacity = list_capacity;
  plan.smem_bytes = sizeof(TopKStorage) + 8 * list_capacity + row_smem;
  plan.kind = TopKKernelKind::resident;
  return true;
}

// A row has `vecs` vectors of `vec` elements.
inline TopKPlan plan_top_k(uint32_t rows, int size, int k, int vec, int vecs,
                           const TopKLimits& limits) {
  constexpr int kMaxCtas = kTargetHasClusters ? kMaxCtasPerRow : 1;
  constexpr int kMinItemsPerCta = 8192;
  TopKPlan plan = {1, kMinThreads, 0, 0, 0, TopKKernelKind::streaming, 0, 0};
  if (k > kMaxSorted) {
    plan.ctas = (k + kMaxSorted - 1) / kMaxSorted;
    plan.threads = kLargeKThreads;
    plan.smem_bytes = sizeof(TopKStorage) + 8 * kMaxSorted;
    plan.kind = TopKKernelKind::large_k;
    return plan;
  }
  int padded = kMinSortCapacity;  // the list capacity that sorting needs
  while (padded < k) padded *= 2;
  if (plan_resident(plan, rows, size, k, vec, vecs, padded, limits)) return plan;
  // in candidates
  const int available = (limits.smem_bytes - static_cast<int>(sizeof(TopKStorage))) / 8;
  // A launch of few rows gives each row several CTAs.
  while (plan.ctas < kMaxCtas && size >= plan.ctas * 2 * kMinItemsPerCta &&
         fits_one_wave(rows, plan.ctas * 2, limits.num_sms)) {
    plan.ctas *= 2;
  }
  if (plan.ctas > 1 && 2 * padded > available) plan.ctas = 1;
  // A part that fits in one tile is then loaded at once. Otherwise two CTAs share an SM.
  if (size <= plan.ctas * kItemsPerThread * kMaxThreads &&
      int64_t(rows) * plan.ctas <= limits.num_sms) {
    plan.threads = kMaxThreads;
  }
  const int preferred = std::max({padded, 4096, std::min(4 * k, 12288)});
  int sort_buffer = k + kMaxInBin;
  if (plan.ctas == 1 && padded + sort_buffer > available) sort_buffer = 0;
  plan.list_capacity = std::min(preferred, plan.ctas > 1 ? available / 2 : available - sort_buffer);
  plan.max_bucket_sorted = sort_buffer > 0 && (plan.ctas == 1 || sort_buffer <= plan.list_capacity)
                               ? plan.list_capacity
                               : 0;
  plan.smem_bytes = sizeof(TopKStorage) +
                    8 * (plan.list_capacity + (plan.ctas > 1 ? plan.list_capacity : sort_buffer));
  return plan;
}

template <typename T>
cudaError_t launch_top_k(TopKParams params, bool enable_pdl, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  int device = 0;
  TopKLimits limits = {};
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status =
        cudaDeviceGetAttribute(&limits.smem_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status != cudaSuccess) return status;
  constexpr int kVec = Vec<T>::kSize;
  const bool aligned = reinterpret_cast<uint64_t>(params.input) % kVecBytes == 0 &&
                       (params.rows == 1 || params.stride % kVec == 0) &&
                       params.row_starts == nullptr;
  const int vecs = (params.size + kVec - 1) / kVec + (aligned ? 0 : 1);
  const TopKPlan plan = plan_top_k(params.rows, params.size, params.k, kVec, vecs, limits);
  const bool is_large = plan.kind == TopKKernelKind::large_k;
  const auto kernel = is_large                                ? TopKLargeKernel<T>
                      : plan.kind == TopKKernelKind::resident ? TopKResidentKernel<T>
                                                              : TopKKernel<T>;
  // one bit a device: the shared memory limit of the kernel is raised
  static std::atomic<uint64_t> raised_of_kernel[3] = {};
  std::atomic<uint64_t>& raised_devices = raised_of_kernel[static_cast<int>(plan.kind)];
  const uint64_t bit = uint64_t(1) << (device & 63);
  if (device > 63 || !(raised_devices.load(std::memory_order_relaxed) & bit)) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  limits.smem_bytes);
    if (status != cudaSuccess) return status;
    raised_devices.fetch_or(bit, std::memory_order_relaxed);
  }
  params.list_capacity = plan.list_capacity;
  params.max_bucket_sorted = plan.max_bucket_sorted;
  params.vecs_per_group = plan.vecs_per_group;
  params.enough_groups = plan.enough_groups;
  // Any order is one of them, and the parts of a large k need one.
  if (is_large && params.order == TopKOrder::any) params.order = TopKOrder::by_place;
  return launch_clusters(kernel, dim3(params.rows * plan.ctas), dim3(plan.threads),
                         is_large ? 1 : plan.ctas, plan.smem_bytes, enable_pdl, stream, params);
}

#endif

}  // namespace precast
