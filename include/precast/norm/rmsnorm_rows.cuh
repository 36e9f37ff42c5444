// SPDX-License-Identifier: Apache-2.0
// The kernels of RMSNorm, and of all ops that fuse something with it.
//
//   x[r, c] = input[r, c]                         or, if the epilogue adds a residual,
//   x[r, c] = input[r, c] + residual[r, c]        (fp32; residual[r, c] = round(x[r, c]))
//   y[r, c] = x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * (weight[c] + weight_bias)
//
// An epilogue defines what a row reads besides input, and what becomes of y; norm/rmsnorm.cuh has
// the plain one. It is a class with
//
//   T, Params               the element type of input; parameters derived from RmsNormRowsParams
//   kAddsResidual           `second` is the residual
//   kReadsSecond            a second operand of input's shape is loaded with the row; always true
//                           with a residual
//   kWeightMayBeNull        a null weight counts as 1
//   kAddsWeightBias         weight_bias is added to the weights
//   kVecsOfFewRows, kVecsOfManyRows
//                           vectors a thread if a CTA has a row: 1, 2, or without second 4
//   second                  the row of the second operand
//   Epilogue(params, position)
//                           sets the row's pointers; reads no memory
//   prefetch()              prefetches what load_scalars() reads
//   load_scalars()          loads what the whole row shares, such as a scale
//   store<kAligned>(column, left, y, second)
//                           stores the eight values from `column` on, of which `left` or more exist
//   kStoresWholeWarp        instead of store(), RmsNormKernel calls store_warp(columns, y) with all
//                           vectors of a thread, on all lanes (norm/rmsnorm_block_quant.cuh)
//
// Layout   input, residual  [rows, hidden]  T, any two row strides, unit column stride
//          weight           [hidden]        T, contiguous
//          An output may be input, because each element is written by the thread that has read it.
// Threads  RmsNormKernel keeps a row in registers, kVecs 16-byte vectors a thread. A row belongs to
//          a group of 1 to 32 lanes (short rows: several rows a CTA, and in large launches two rows
//          and up to five vectors a lane), to a CTA, or to a cluster of CTAs (few long rows with a
//          second operand). Lane l of a warp takes vectors v with v % lanes == l % lanes; a warp of
//          a CTA takes 32 kVecs consecutive vectors. RmsNormLoopKernel takes all other rows: more
//          than 2048 vectors, unaligned pointers and strides, odd hidden sizes. A CTA reads its row
//          twice, the second time from L2.
// Source   Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/row_plan.cuh"
#include "precast/norm/rmsnorm_kernels.cuh"

namespace precast {

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

constexpr int kClusterThreads = 128;  // of a CTA

// Returns how many CTAs share a row, one vector a thread; 1 for no cluster. Why: few rows leave
// most multiprocessors idle. fused_add_rmsnorm_quant took 1.9 us in clusters and 2.5 us in CTAs for
// 64 rows of 4096, 1.7 and 2.1 for 16 rows of 8192, but 1.6 and 1.3 for 16 rows of 4096, and 5.1
// and 3.3 for 128 rows of 8192 (H200, bf16).
inline int ctas_of_cluster(const RowShape& shape) {
  const int vecs = shape.hidden / shape.vec_size;
  const bool suits = shape.rows <= 64 && (vecs > 512 || (vecs == 512 && shape.rows > 16));
  return suits ? (vecs + kClusterThreads - 1) / kClusterThreads : 1;
}

// Returns the arguments of plan_rows() for an epilogue, which moves [rows, hidden] `streams` times.
// `aligned` says whether its own tensors are aligned; input and weight are checked here.
template <typename Epilogue>
RowShape rmsnorm_rows_shape(const RmsNormRowsParams& p, int streams, bool in_place, bool aligned) {
  using T = typename Epilogue::T;
  RowShape shape = {};
  shape.rows = p.rows.count;
  shape.hidden = p.hidden;
  shape.vec_size = Vec<T>::kSize;
  shape.streams = streams;
  shape.in_place = in_place;
  shape.aligned = aligned && p.hidden % Vec<T>::kSize == 0 &&
                  rows_are_vector_aligned<T>(p.weight, {}) &&
                  rows_are_vector_aligned<T>(p.input, p.input_strides);
  shape.vecs_per_thread =
      p.rows.count >= 4096 ? Epilogue::kVecsOfManyRows : Epilogue::kVecsOfFewRows;
  // Why: rows of 7168 as 896 threads leave 256 threads of a multiprocessor idle, which costs 4 % (7
  // bytes an element).
  const int vecs = (p.hidden + Vec<T>::kSize - 1) / Vec<T>::kSize;
  const int idle = kSmThreads % round_up(vecs, kWarpSize);
  if (shape.vecs_per_thread == 1 && idle > 160) shape.vecs_per_thread = 2;
  if (p.hidden > 4 * kFourVecsThreads * Vec<T>::kSize && shape.vecs_per_thread == 4) {
    shape.vecs_per_thread = 2;
  }
  // Why: without a second operand, 64 rows of 4096 took 1.6 us with two vectors a thread and 1.9 us
  // with one; one row took 1.3 and 1.1.
  shape.few_rows_too = !Epilogue::kReadsSecond && p.rows.count > 16;
  shape.prefetches_rows = true;
  return shape;
}

// Several vectors a lane, for many rows of up to 160 vectors.
struct LanesPlan {
  int vecs = 0;  // vectors a lane; 0 if this does not suit the rows
  int lanes = 0;
};

// Chooses the fewest idle lanes, then the most vectors a lane. Why: with a CTA or one vector a lane
// for each row, fused_rmsnorm_silu reached 0.24 of the elementwise ceiling on rows of 320 and 0.75
// on rows of 128 (H200, bf16); with this choice 0.93 and 0.95. Two operands of 128 reach 0.97 with
// one vector a lane.
inline LanesPlan plan_lanes(const RowShape& shape) {
  LanesPlan best;
  const int vecs = shape.hidden / shape.vec_size;
  const bool fills_the_gpu = uint64_t(shape.rows) * vecs >= 1u << 19;
  if (!shape.aligned || !fills_the_gpu) return best;
  int one_each = 1;  // lanes with one vector each
  while (one_each < vecs) one_each *= 2;
  for (const int per_lane : {5, 3, 2}) {
    int lanes = 4;
    while (lanes * per_lane < vecs) lanes *= 2;
    if (lanes > kWarpSize || lanes * per_lane > one_each) continue;
    if (best.vecs == 0 || lanes * per_lane < best.lanes * best.vecs) {
      best.vecs = per_lane;
      best.lanes = lanes;
    }
  }
  return best;
}

// Launches the kernel with an epilogue on every row on `stream`. There must be a row, and hidden
// must be positive.
template <typename Epilogue>
cudaError_t launch_rmsnorm_rows(typename Epilogue::Params p, const RowShape& shape, bool enable_pdl,
                                cudaStream_t stream) {
  p.plan = plan_rows(shape);
  p.inverse_hidden = 1.0f / static_cast<float>(p.hidden);
  const auto run = [&](void (*kernel)(typename Epilogue::Params)) {
    return launch(kernel, dim3(p.plan.ctas), dim3(p.plan.threads), enable_pdl, stream, p);
  };
  if constexpr (!Epilogue::kReadsSecond) {
    const LanesPlan several = plan_lanes(shape);
    if (several.vecs > 0) {
      constexpr int kRows = 2;
      const uint32_t rows_per_cta = kLanesThreads / several.lanes * kRows;
      p.plan.threads = kLanesThreads;
      p.plan.lanes = several.lanes;
      p.plan.ctas = (shape.rows - 1) / rows_per_cta + 1;
      return run(several.vecs == 2   ? RmsNormKernel<Epilogue, 2, kRows, false, true>
                 : several.vecs == 3 ? RmsNormKernel<Epilogue, 3, kRows, false, true>
                                     : RmsNormKernel<Epilogue, 5, kRows, false, true>);
    }
  }
  switch (p.plan.kind) {
    case RowKernel::lanes:
      return run(RmsNormKernel<Epilogue, 1, 1, false, true>);
    case RowKernel::cta_1:
      if constexpr (kMaxClusterSize > 1 && Epilogue::kReadsSecond) {
        const int ctas = ctas_of_cluster(shape);
        if (ctas > 1) {
          return launch_clusters(RmsNormKernel<Epilogue, 1, 1, true, true, true>,
                                 dim3(p.plan.ctas * ctas), dim3(kClusterThreads), ctas, 0,
                                 enable_pdl, stream, p);
        }
      }
      return run(RmsNormKernel<Epilogue, 1, 1, true, true>);
    case RowKernel::cta_2:
      // Why: launches of many rows in CTAs of more than 256 threads were faster without early
      // weights: 125 us against 129.
      if constexpr (!Epilogue::kReadsSecond) {
        const int max_value = shape.rows <= 256 ? kEarlyWeightThreads : kEarlyWeightThreads / 2;
        if (p.plan.threads <= max_value) return run(RmsNormKernel<Epilogue, 2, 1, true, true>);
      }
      return run(RmsNormKernel<Epilogue, 2, 1, true, false>);
    case RowKernel::cta_4:
      if constexpr (Epilogue::kVecsOfManyRows == 4) {
        return run(RmsNormKernel<Epilogue, 4, 1, true, false>);
      }
      break;
    case RowKernel::loop:
      return run(RmsNormLoopKernel<Epilogue, true>);
    case RowKernel::loop_elements:
      return run(RmsNormLoopKernel<Epilogue, false>);
  }
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC__

}  // namespace precast
