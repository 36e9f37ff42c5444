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
  int threads;      // a CTA
  int lanes;        // that share a row, for RowKernel::lanes
  bool prefetch;    // there are so few rows that latency is all
  bool exceeds_l2;  // see l2_policy()
};

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// `rows` and `hidden` positive; `streams` is how many tensors of [rows, hidden] are read or
// written; `aligned`: hidden is a whole number of vectors of `vec_size` elements, and every row and
// parameter starts on a 16-byte boundary. The numbers were measured on H200 with bf16 rows of 4096
// and 8192.
inline RowPlan plan_rows(uint32_t rows, int hidden, int vec_size, int streams, bool aligned) {
  const int vecs = (hidden + vec_size - 1) / vec_size;
  RowPlan plan = {};
  plan.ctas = rows;
  plan.lanes = 1;
  plan.prefetch = rows <= 256;
  plan.exceeds_l2 = int64_t(rows) * vecs > kBytesBeyondL2 / (kVecBytes * streams);
  if (!aligned || vecs > 4 * kMaxThreads) {
    plan.kind = aligned ? RowKernel::loop : RowKernel::loop_elements;
    plan.threads = vecs < kMaxThreads ? round_up(vecs, kWarpSize) : kMaxThreads;
  } else if (vecs <= kWarpSize) {
    plan.kind = RowKernel::lanes;
    plan.threads = 128;
    while (plan.lanes < vecs) plan.lanes *= 2;
    plan.ctas = (rows - 1) / (plan.threads / plan.lanes) + 1;
  } else {
    // One vector a thread where latency counts, and where the registers of more streams would leave
    // too few threads on a multiprocessor; otherwise two, for more bytes in flight a thread.
    const bool one = plan.prefetch || vecs < 128 || (streams > 2 && plan.exceeds_l2);
    const int per_thread = vecs > 2 * kMaxThreads ? 4 : vecs > kMaxThreads || !one ? 2 : 1;
    plan.kind = per_thread == 1   ? RowKernel::cta_1
                : per_thread == 2 ? RowKernel::cta_2
                                  : RowKernel::cta_4;
    plan.threads = round_up((vecs + per_thread - 1) / per_thread, kWarpSize);
  }
  return plan;
}

}  // namespace precast
