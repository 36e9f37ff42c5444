// SPDX-License-Identifier: Apache-2.0
// How an all-reduce is cut: one phase or two, CTAs of how many threads, and rows of a round.
//
// It is plain arithmetic, which a host compiler compiles, too.
#pragma once

#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"

namespace precast {

enum class AllReduceStrategy : int { automatic = -1, two_shot = 0, one_shot = 1 };

// Threads of the CTAs of a row together (the warps of a RowReducer), and the longest row of a norm.
constexpr int kMaxRowThreads = 1024;
constexpr int kMaxRowVecs = 2 * kMaxRowThreads;

// How a launch is cut; 0 leaves a choice to the launcher. Benchmarks and tests set them.
struct AllReduceTuning {
  int threads;
  int vecs;     // of a thread
  int cluster;  // CTAs of a row
  int ctas;     // at most
};

// Threads of a CTA at most. Why no other number for two phases or unaligned rows: it decides in
// which order the squares of a row are added, and ranks do not know of each other's alignment.
constexpr int allreduce_threads(int world) { return world == 2 ? 512 : 256; }

// How many CTAs of so many threads fit a multiprocessor. A thread has 64 registers (two GPUs) or
// 128, twice as many where two vectors of eight ranks, or of a norm, need them.
constexpr int allreduce_ctas(int world, bool norm, int vecs) {
  return vecs == 2 && (world == 8 || (norm && world == 2)) ? 1 : 2;
}
constexpr int kAllReduceAnyCtas = 2;  // the same of the kernel for any rows

// Whether the kernel for any rows must take these. The others hold their vectors in registers.
constexpr bool needs_any_kernel(bool aligned, int vecs) { return !aligned || vecs > 2; }

#if !defined(__CUDACC_RTC__)

inline int ceil_div(int64_t x, int64_t y) { return static_cast<int>((x + y - 1) / y); }

// Why these numbers: two phases send 2 / world of the bytes of one phase, and wait once more. For
// two GPUs one phase sends no more, so they have no other. For four, measured: 64 KiB take 2.8 us
// in one phase and 3.6 in two, 256 KiB 4.6 and 4.3 (H200). For eight, the same costs computed.
//
// `one_shot_bytes` is the largest message in one phase, -1 for the default.
inline bool is_one_shot(int world, int64_t bytes, AllReduceStrategy strategy,
                        int64_t one_shot_bytes) {
  if (world == 2) return true;
  if (strategy != AllReduceStrategy::automatic) return strategy == AllReduceStrategy::one_shot;
  if (one_shot_bytes >= 0) return bytes <= one_shot_bytes;
  return bytes <= (world == 4 ? 128 << 10 : 64 << 10);
}

// Sets what the caller left open for rows of any length. Why: a multiprocessor sends few vectors
// the faster, the fewer it has of them. Two vectors a thread pay off where the link is the limit:
// 32 MiB take 98 us with 256 threads of two vectors, 101 us with 512 of one; 1 MiB 5.8 and 5.2 (two
// H200).
//
// The length of a row decides where vectors lie in the receive buffers, so it must not depend on
// the alignment of tensors, which ranks do not know of each other.
inline void cut_plain(int64_t vecs, int world, bool two_shot, AllReduceTuning* cut) {
  const int most = allreduce_threads(world);
  const bool is_large = vecs > (two_shot ? 1 << 16 : 1 << 18);
  if (cut->threads == 0) {
    cut->threads = vecs <= 64 * 128 ? 128 : vecs <= 128 * 256 || is_large ? 256 : most;
  }
  if (cut->threads > most) cut->threads = most;
  if (cut->vecs == 0) cut->vecs = is_large ? 2 : 1;
  cut->cluster = 1;
}

// Sets what the caller left open for whole rows of `row_vecs` vectors, at most kMaxRowVecs. Returns
// false if they do not fit what the caller has set. Why: one vector a thread was the fastest at all
// sizes, in CTAs of 128 threads for few rows, larger ones for more (two and four H200). Longer rows
// take two, and more without clusters. As with rows of any length, alignment must not matter: the
// order in which squares are added depends on the cut, and all ranks must have the same bits.
inline bool cut_rows(int64_t rows, int row_vecs, int world, int most_ctas, AllReduceTuning* cut) {
  const int most = allreduce_threads(world);
  const int64_t vecs = rows * row_vecs;
  if (cut->cluster > most_ctas) cut->cluster = most_ctas;
  if (cut->vecs == 0) {
    const int row_threads = most * (cut->cluster > 0 ? cut->cluster : most_ctas);
    cut->vecs = ceil_div(row_vecs, row_threads < kMaxRowThreads ? row_threads : kMaxRowThreads);
  }
  if (cut->cluster == 0) {
    const int wanted = vecs <= 1 << 15 ? 128 : vecs <= 1 << 16 ? 256 : most;
    const int vecs_of_cta = cut->vecs * (wanted < most ? wanted : most);
    cut->cluster = 1;
    while (cut->cluster < most_ctas && row_vecs > vecs_of_cta * cut->cluster) cut->cluster *= 2;
  }
  cut->threads =
      (ceil_div(row_vecs, cut->vecs * cut->cluster) + kWarpSize - 1) / kWarpSize * kWarpSize;
  return cut->threads <= most && cut->threads * cut->cluster <= kMaxRowThreads;
}

// CTAs that take half of a GPU with `sms` multiprocessors, so that two grids may run at once. Why
// at most 8 on a multiprocessor: some have room for 16 only.
inline int ctas_of_half(int sms, int world, bool norm, bool aligned, const AllReduceTuning& cut) {
  const int fit = needs_any_kernel(aligned, cut.vecs) ? kAllReduceAnyCtas
                                                      : allreduce_ctas(world, norm, cut.vecs);
  const int parts = allreduce_threads(world) / cut.threads;
  return sms * fit / 2 * (parts < 8 ? parts : 8);
}

// Rows of `row_vecs` vectors that one round takes.
inline int64_t rows_of_round(int world, bool two_shot, int64_t row_vecs, int64_t region_bytes) {
  const int64_t part_vecs = ceil_div(ceil_div(row_vecs, kWarpSize), world) * kWarpSize;
  const int64_t vecs = two_shot ? (world - 1) * part_vecs + row_vecs : (world - 1) * row_vecs;
  return region_bytes / (vecs * kVecBytes);
}

#endif

}  // namespace precast
