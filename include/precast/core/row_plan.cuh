// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel and the launch shape of an op that reduces rows.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/rows.cuh"

namespace precast {

// The kernels of such an op. `lanes`: 1 to 32 lanes share a row, one vector each. `cta_n`: a CTA
// has one row, n vectors a thread. `loop`: a CTA loops over its row. `loop_elements`: the same for
// unaligned rows.
enum class RowKernel { lanes, cta_1, cta_2, cta_4, loop, loop_elements };

// The largest CTA that loops over its row. It is smaller than kMaxThreads, because these kernels
// need more registers.
constexpr int kLoopThreads = 512;

struct RowPlan {
  RowKernel kind;
  uint32_t ctas;
  int threads;                // of a CTA
  int lanes;                  // lanes that share a row, for RowKernel::lanes
  uint32_t prefetching_ctas;  // the first CTAs prefetch while the previous grid may still run
  bool evict_last;            // for read_policy()
};

#if defined(__CUDACC__)

// Returns the index in the grid of the lane group that this thread belongs to, for
// RowKernel::lanes. Why a shift: the number of lanes is a power of two, and otherwise the kernel
// would start with a division.
__device__ __forceinline__ uint32_t row_of_lane_group(const RowPlan& plan) {
  const int shift = 31 - __clz(plan.lanes);
  return blockIdx.x * (blockDim.x >> shift) + (threadIdx.x >> shift);
}

#endif  // __CUDACC__

#if !defined(__CUDACC_RTC__)

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// The properties of an op's rows.
struct RowShape {
  uint32_t rows;  // positive
  int hidden;     // positive
  int vec_size;   // elements of a vector
  int streams;    // the number of tensors [rows, hidden] that are read or written
  bool in_place;  // the output overwrites the input
  bool aligned;   // rows are whole vectors; all rows and parameters start at multiples of 16 bytes
  int vecs_per_thread;  // 1, 2 or 4: the best choice for many rows
  // whether vecs_per_thread also applies to few rows; otherwise these use one vector
  bool few_rows_too;
  bool prefetches_rows;  // one thread prefetches a whole row (core/prefetch.cuh)
};

// The choices were measured on an H200 with bf16 rows of 4096 and 8192.
inline RowPlan plan_rows(const RowShape& shape) {
  const int vecs = (shape.hidden + shape.vec_size - 1) / shape.vec_size;
  const int64_t bytes = int64_t(shape.rows) * vecs * kVecBytes * shape.streams;
  const bool few_rows = shape.rows <= 256;  // such a launch is bound by latency
  RowPlan plan = {};
  plan.ctas = shape.rows;
  plan.lanes = 1;
  plan.evict_last = reads_evict_last(bytes, shape.in_place);
  // Why: if L2 holds all rows, prefetches of vectors by their threads are slower: for 1024 rows of
  // 4096 layernorm_quant took 8.3 us instead of 6.0. Prefetches of whole rows pay off: 5.0 us.
  const bool prefetches = shape.prefetches_rows || exceeds_l2(bytes);
  plan.prefetching_ctas = few_rows ? shape.rows : prefetches ? 256 : 0;
  if (!shape.aligned || vecs > 2 * kMaxThreads) {
    plan.kind = shape.aligned ? RowKernel::loop : RowKernel::loop_elements;
    plan.threads = vecs < kLoopThreads ? round_up(vecs, kWarpSize) : kLoopThreads;
  } else if (vecs <= kWarpSize) {
    plan.kind = RowKernel::lanes;
    plan.threads = 128;
    while (plan.lanes < vecs) plan.lanes *= 2;
    plan.ctas = (shape.rows - 1) / (plan.threads / plan.lanes) + 1;
  } else {
    int per_thread = few_rows && !shape.few_rows_too ? 1 : shape.vecs_per_thread;
    while (per_thread > 1 && vecs < 64 * per_thread) per_thread /= 2;  // at least two warps
    if (per_thread == 1 && vecs > kMaxThreads) per_thread = 2;
    plan.kind = per_thread == 1   ? RowKernel::cta_1
                : per_thread == 2 ? RowKernel::cta_2
                                  : RowKernel::cta_4;
    plan.threads = round_up((vecs + per_thread - 1) / per_thread, kWarpSize);
  }
  return plan;
}

#endif

}  // namespace precast
