// SPDX-License-Identifier: Apache-2.0
// Which kernel and which launch shape suit an op that reduces rows, from run-time sizes.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/rows.cuh"

namespace precast {

// The kernels of such an op. `lanes`: 1 to 32 lanes a row, one vector each. `cta_n`: a CTA a row,
// n vectors a thread. `loop`: a CTA walks its row; `loop_elements`: and nothing is aligned.
enum class RowKernel { lanes, cta_1, cta_2, cta_4, loop, loop_elements };

struct RowPlan {
  RowKernel kind;
  uint32_t ctas;
  int threads;  // a CTA
  int lanes;    // that share a row, for RowKernel::lanes
};

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// `rows` and `hidden` positive; `aligned`: hidden is a whole number of vectors of `vec_size`
// elements, and every row and parameter starts on a 16-byte boundary.
inline RowPlan plan_rows(uint32_t rows, int hidden, int vec_size, bool aligned) {
  const int vecs = (hidden + vec_size - 1) / vec_size;
  if (!aligned || vecs > 4 * kMaxThreads) {
    const int threads = vecs < kMaxThreads ? round_up(vecs, kWarpSize) : kMaxThreads;
    return {aligned ? RowKernel::loop : RowKernel::loop_elements, rows, threads, 1};
  }
  if (vecs <= kWarpSize) {
    int lanes = 1;
    while (lanes < vecs) lanes *= 2;
    constexpr int kThreads = 128;
    const uint32_t rows_per_cta = kThreads / lanes;
    return {RowKernel::lanes, (rows - 1) / rows_per_cta + 1, kThreads, lanes};
  }
  // Few rows: latency counts, so as many threads a row as there are vectors. Many rows: bytes in
  // flight count, so several vectors a thread.
  const bool few_rows = rows <= 256;
  const int wanted = few_rows ? 1 : vecs >= 512 ? 4 : vecs >= 256 ? 2 : 1;
  const int needed = (vecs + kMaxThreads - 1) / kMaxThreads;
  const int per_thread = wanted > needed ? wanted : needed == 3 ? 4 : needed;
  const int threads = round_up((vecs + per_thread - 1) / per_thread, kWarpSize);
  const RowKernel kind = per_thread == 1   ? RowKernel::cta_1
                         : per_thread == 2 ? RowKernel::cta_2
                                           : RowKernel::cta_4;
  return {kind, rows, threads, 1};
}

}  // namespace precast
