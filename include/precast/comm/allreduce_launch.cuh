// SPDX-License-Identifier: Apache-2.0
// How an all-reduce is launched: one phase or two, how many CTAs, and in how many rounds.
//
// A message that does not fit the receive buffer goes in several launches, each a round of its own.
#pragma once

#include "precast/comm/allreduce_norm.cuh"

namespace precast {

enum class AllReduceStrategy : int { automatic = -1, two_shot = 0, one_shot = 1 };

struct AllReduceOptions {
  AllReduceStrategy strategy;
  AllReduceTuning tuning;
  int64_t one_shot_bytes;  // automatic: the largest message in one phase; -1 for the default
  bool checks_signatures;  // debug
  bool enable_pdl;
};

// Threads of the CTAs of a row together (a limit of cluster_sum), and the longest row of a norm.
constexpr int kMaxRowThreads = 1024;
constexpr int kMaxRowVecs = 2 * kMaxRowThreads;

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

inline int ceil_div(int64_t x, int64_t y) { return static_cast<int>((x + y - 1) / y); }

// Why these numbers: two phases send 2 / world of the bytes of one phase, and wait once more. For
// two GPUs one phase sends no more. For four, measured: 64 KiB take 2.8 us in one phase and 3.6 in
// two, 256 KiB 4.6 and 4.3 (H200). For eight, the same costs computed.
inline bool is_one_shot(int world, int64_t bytes, const AllReduceOptions& options) {
  if (options.strategy != AllReduceStrategy::automatic) {
    return options.strategy == AllReduceStrategy::one_shot;
  }
  if (options.one_shot_bytes >= 0) return bytes <= options.one_shot_bytes;
  return world == 2 || bytes <= (world == 4 ? 128 << 10 : 64 << 10);
}

// Limits a grid to half of a GPU.
inline cudaError_t limit_ctas(const CtaLimits& limits, AllReduceTuning* cut) {
  int device = 0, sms = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const int half = sms * limits.ctas / 2 * (limits.threads / cut->threads);
  if (cut->ctas == 0 || cut->ctas > half) cut->ctas = half;
  return status;
}

// Sets what the caller left open for rows of any length. Why: a multiprocessor sends few vectors
// the faster, the fewer it has of them. Two vectors a thread pay off where the link is the limit:
// 32 MiB take 98 us with 256 threads of two vectors, 101 us with 512 of one; 1 MiB 5.8 and 5.2 (two
// H200).
//
// The length of a row decides where vectors lie in the receive buffers, so it must not depend on
// the alignment of tensors, which ranks do not know of each other.
inline cudaError_t tune_plain(int64_t vecs, int world, bool two_shot, bool aligned,
                              AllReduceTuning* cut) {
  const int most = allreduce_limits(world, false, 1, two_shot, aligned).threads;
  const bool is_large = vecs > (two_shot ? 1 << 16 : 1 << 18);
  if (cut->threads == 0) {
    cut->threads = vecs <= 64 * 128 ? 128 : vecs <= 128 * 256 || is_large ? 256 : most;
  }
  if (cut->threads > most) cut->threads = most;
  if (cut->vecs == 0) cut->vecs = is_large ? 2 : 1;
  cut->cluster = 1;
  return limit_ctas(allreduce_limits(world, false, cut->vecs, two_shot, aligned), cut);
}

// Sets what the caller left open for whole rows of `row_vecs` vectors. Why: one vector a thread was
// the fastest at all sizes, in CTAs of 128 threads for few rows, larger ones for more (two and four
// H200). Longer rows take two. As with rows of any length, alignment must not matter: the order in
// which squares are added depends on the cut, and all ranks must have the same bits.
inline cudaError_t tune_rows(int64_t rows, int row_vecs, int world, bool two_shot, bool aligned,
                             AllReduceTuning* cut) {
  const int most = allreduce_limits(world, true, 1, two_shot, aligned).threads;
  constexpr int kMaxCluster = kMaxClusterSize > 1 ? 8 : 1;
  const int64_t vecs = rows * row_vecs;
  if (cut->cluster > kMaxCluster) cut->cluster = kMaxCluster;
  if (cut->vecs == 0) {
    const int row_threads = most * (cut->cluster > 0 ? cut->cluster : kMaxCluster);
    cut->vecs = row_vecs <= row_threads && row_vecs <= kMaxRowThreads ? 1 : 2;
  }
  if (cut->cluster == 0) {
    const int wanted = vecs <= 1 << 15 ? 128 : vecs <= 1 << 16 ? 256 : most;
    const int vecs_of_cta = cut->vecs * (wanted < most ? wanted : most);
    cut->cluster = 1;
    while (cut->cluster < kMaxCluster && row_vecs > vecs_of_cta * cut->cluster) cut->cluster *= 2;
  }
  cut->threads =
      (ceil_div(row_vecs, cut->vecs * cut->cluster) + kWarpSize - 1) / kWarpSize * kWarpSize;
  if (cut->threads > most || cut->threads * cut->cluster > kMaxRowThreads) {
    return cudaErrorInvalidConfiguration;
  }
  return limit_ctas(allreduce_limits(world, true, cut->vecs, two_shot, aligned), cut);
}

// What all ranks must agree on; never 0.
inline uint32_t launch_signature(const AllReduceParams& p, bool two_shot, int kind) {
  uint64_t hash = 0x9e3779b97f4a7c15u;
  for (const int64_t x : {p.count, int64_t(p.columns), p.rows, int64_t(two_shot), int64_t(kind)}) {
    hash = (hash ^ static_cast<uint64_t>(x)) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 33;
  }
  return static_cast<uint32_t>(hash) | 1u;
}

// Rows of `row_vecs` vectors that one round takes.
inline int64_t rows_of_round(int world, bool two_shot, int64_t row_vecs, int64_t region_bytes) {
  const int64_t part_vecs = ceil_div(ceil_div(row_vecs, kWarpSize), world) * kWarpSize;
  const int64_t vecs = two_shot ? (world - 1) * part_vecs + row_vecs : (world - 1) * row_vecs;
  return region_bytes / (vecs * kVecBytes);
}

// Reduces `p.count` elements of any shape.
template <typename T, int kWorld>
cudaError_t launch_allreduce(AllReduceParams p, const AllReduceOptions& options,
                             cudaStream_t stream) {
  constexpr int kSize = Vec<T>::kSize;
  const bool two_shot = !is_one_shot(kWorld, p.count * int64_t(sizeof(T)), options);
  const T* input = static_cast<const T*>(p.input);
  T* output = static_cast<T*>(p.output);
  for (int64_t left = p.count; left > 0;) {
    AllReduceTuning cut = options.tuning;
    cudaError_t status = tune_plain((left + kSize - 1) / kSize, kWorld, two_shot, p.aligned, &cut);
    if (status != cudaSuccess) return status;
    p.row_vecs = cut.threads * cut.vecs;
    p.columns = p.row_vecs * kSize;
    const int64_t most = rows_of_round(kWorld, two_shot, p.row_vecs, p.region_bytes) * p.columns;
    if (most == 0) return cudaErrorInvalidValue;
    p.count = left < most ? left : most;
    p.rows = (p.count + p.columns - 1) / p.columns;
    p.input = input;
    p.output = output;
    p.signature = options.checks_signatures ? launch_signature(p, two_shot, 0) : 0u;
    status = launch_allreduce_rows<StoreEpilogue<T>, kWorld>(p, two_shot, cut, options.enable_pdl,
                                                             stream);
    if (status != cudaSuccess) return status;
    input += p.count;
    output += p.count;
    left -= p.count;
  }
  return cudaSuccess;
}

template <typename T>
T* rows_further(T* pointer, int64_t bytes) {
  return pointer == nullptr ? nullptr
                            : reinterpret_cast<T*>(reinterpret_cast<intptr_t>(pointer) + bytes);
}

// Reduces `p.rows` rows of `p.columns`, and does what follows.
template <typename T, int kWorld>
cudaError_t launch_allreduce_norm(AllReduceNormParams p, const AllReduceOptions& options,
                                  cudaStream_t stream) {
  constexpr int kSize = Vec<T>::kSize;
  p.row_vecs = ceil_div(p.columns, kSize);
  p.inverse_hidden = 1.0f / static_cast<float>(p.columns);
  const bool two_shot = !is_one_shot(kWorld, p.rows * p.columns * int64_t(sizeof(T)), options);
  const int64_t most = rows_of_round(kWorld, two_shot, p.row_vecs, p.region_bytes);
  if (most == 0) return cudaErrorInvalidValue;
  for (int64_t left = p.rows; left > 0;) {
    p.rows = left < most ? left : most;
    p.count = p.rows * p.columns;
    AllReduceTuning cut = options.tuning;
    cudaError_t status = tune_rows(p.rows, p.row_vecs, kWorld, two_shot, p.aligned, &cut);
    if (status != cudaSuccess) return status;
    const int kind = 1 + static_cast<int>(p.mode);
    p.signature = options.checks_signatures ? launch_signature(p, two_shot, kind) : 0u;
    status = launch_allreduce_rows<NormEpilogue<T>, kWorld>(p, two_shot, cut, options.enable_pdl,
                                                            stream);
    if (status != cudaSuccess) return status;
    const int64_t bytes = p.count * int64_t(sizeof(T));
    p.input = rows_further(p.input, bytes);
    p.residual = rows_further(p.residual, bytes);
    p.residual_out = rows_further(p.residual_out, bytes);
    p.norm_out = rows_further(p.norm_out, bytes);
    p.quant_out = rows_further(p.quant_out, p.count);
    p.scales = rows_further(p.scales, p.rows * 4);  // words of a row stand `scale_stride` apart
    left -= p.rows;
  }
  return cudaSuccess;
}

#endif

}  // namespace precast
