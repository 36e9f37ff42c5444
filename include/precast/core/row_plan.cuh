// SPDX-License-Identifier: Apache-2.0
// Which kernel and which launch shape suit an op that reduces rows, from run-time sizes.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/rows.cuh"

namespace precast {

// The kernels of such an op. `lanes`: 1 to 32 lanes a row, one vector each. `cta_n`: a CTA a row,
// n vectors a thread. `loop`: a CTA walks its row; `loop_elements`: and nothing is aligned.
enum class RowKernel { lanes, cta_1, cta_2, loop, loop_elements };

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

#if !defined(__CUDACC_RTC__)

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// `rows` and `hidden` positive; `streams`: how many times [rows, hidden] is read or written;
// `in_place`: what is read is written; `aligned`: hidden is a whole number of vectors of `vec_size`
// elements, and every row and parameter starts on a 16-byte boundary. The choices were measured on
// H200 with bf16 rows of 4096 and 8192.
inline RowPlan plan_rows(uint32_t rows, int hidden, int vec_size, int streams, bool in_place,
                         bool aligned) {
  const int vecs = (hidden + vec_size - 1) / vec_size;
  RowPlan plan = {};
  plan.ctas = rows;
  plan.lanes = 1;
  const bool few_rows = rows <= 256;
  const int64_t bytes = int64_t(rows) * vecs * kVecBytes * streams;
  plan.evict_last = reads_evict_last(bytes, in_place);
  plan.prefetching_ctas = few_rows ? rows : 0;
  if (!aligned || vecs > 2 * kMaxThreads) {
    plan.kind = aligned ? RowKernel::loop : RowKernel::loop_elements;
    plan.threads = vecs < kLoopThreads ? round_up(vecs, kWarpSize) : kLoopThreads;
  } else if (vecs <= kWarpSize) {
    plan.kind = RowKernel::lanes;
    plan.threads = 128;
    while (plan.lanes < vecs) plan.lanes *= 2;
    plan.ctas = (rows - 1) / (plan.threads / plan.lanes) + 1;
  } else {
    // One vector a thread where latency counts, and where the registers of more streams would leave
    // too few threads on a multiprocessor; otherwise two, for more bytes in flight a thread.
    const bool one = few_rows || vecs < 128 || (streams > 2 && plan.evict_last);
    const int per_thread = one && vecs <= kMaxThreads ? 1 : 2;
    plan.kind = per_thread == 1 ? RowKernel::cta_1 : RowKernel::cta_2;
    plan.threads = round_up((vecs + per_thread - 1) / per_thread, kWarpSize);
  }
  return plan;
}

#endif

}  // namespace precast
