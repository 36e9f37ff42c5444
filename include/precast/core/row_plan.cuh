// SPDX-License-Identifier: Apache-2.0
// Which kernel and which launch shape suit an op that reduces rows, from run-time sizes.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/rows.cuh"

namespace precast {

// The kernels of such an op. `lanes`: 1 to 32 lanes a row, one vector each. `cta_n`: a CTA a row,
// n vectors a thread. `loop`: a CTA walks its row; `loop_elements`: and nothing is aligned.
enum class RowKernel { lanes, cta_1, cta_2, cta_4, loop, loop_elements };

// The most threads of a CTA that walks its row; fewer than kMaxThreads, for their registers.
constexpr int kLoopThreads = 512;

struct RowPlan {
  RowKernel kind;
  uint32_t ctas;
  int threads;                // a CTA
  int lanes;                  // that share a row, for RowKernel::lanes
  uint32_t prefetching_ctas;  // the first ones prefetch while the grid before may still run
  bool evict_last;            // for read_policy()
};

#if defined(__CUDACC__)

// The number in the grid of the group of lanes that this thread belongs to, for RowKernel::lanes.
// Why: lanes are a power of two, and a division at run time is what a kernel would start with.
__device__ __forceinline__ uint32_t row_of_lane_group(const RowPlan& plan) {
  const int shift = 31 - __clz(plan.lanes);
  return blockIdx.x * (blockDim.x >> shift) + (threadIdx.x >> shift);
}

#endif  // __CUDACC__

#if !defined(__CUDACC_RTC__)

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// What an op says of its rows.
struct RowShape {
  uint32_t rows;  // positive
  int hidden;     // positive
  int vec_size;   // elements of a vector
  int streams;    // how many times [rows, hidden] is read or written
  bool in_place;  // what is read is written
  bool aligned;   // hidden is whole vectors; all rows and parameters start at 16-byte boundaries
  int vecs_per_thread;   // 1, 2 or 4: what suits the op where there are many rows
  bool few_rows_too;     // vecs_per_thread holds for few rows, which else get one
  bool prefetches_rows;  // whole, by one thread each (core/prefetch.cuh)
};

// The choices were measured on H200 with bf16 rows of 4096 and 8192.
inline RowPlan plan_rows(const RowShape& shape) {
  const int vecs = (shape.hidden + shape.vec_size - 1) / shape.vec_size;
  const int64_t bytes = int64_t(shape.rows) * vecs * kVecBytes * shape.streams;
  const bool few_rows = shape.rows <= 256;  // latency is all
  RowPlan plan = {};
  plan.ctas = shape.rows;
  plan.lanes = 1;
  plan.evict_last = reads_evict_last(bytes, shape.in_place);
  // Why: prefetches of vectors by their threads do harm where L2 holds all rows: 1024 rows of 4096
  // took layernorm_quant 8.3 us instead of 6.0. Of whole rows they pay: 5.0 us.
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
    while (per_thread > 1 && vecs < 64 * per_thread) per_thread /= 2;  // two warps or more
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
