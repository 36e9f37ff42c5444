// SPDX-License-Identifier: Apache-2.0
// What the bindings of GEMMs share whose scales, if there are some, are those of rows: operands,
// and the launch.
#pragma once

#include <algorithm>

#include "core/multiprocessors.h"
#include "gemm/gemm_checks.h"
#include "precast/gemm/gemm_params.cuh"
#include "precast/gemm/gemm_tiles.cuh"

namespace precast {

// Whether a matrix with this many rows, `stride` elements apart, can be copied by 16 bytes.
inline bool has_copied_rows(int64_t rows, int64_t stride, int64_t bytes) {
  return rows <= 1 || (stride >= 0 && stride * bytes % kVecBytes == 0);
}

struct GemmWeight {
  GemmMatrix matrix;  // [weights, columns, depth], or [weights, depth, columns] if row-major
  bool row_major;
};

// The memory of an operand whose last two dimensions are `rows` and `columns`, in this order; the
// columns are contiguous.
PRECAST_ONE_COPY GemmMatrix rows_of(const Arg& arg) {
  const TensorView& t = arg.tensor;
  const int64_t bytes = (t.dtype().bits + 7) / 8;
  check_columns(arg, false);
  const bool has_groups = t.ndim() == 3;
  const bool fits = has_copied_rows(t.size(-2), t.stride(t.ndim() - 2), bytes) &&
                    (!has_groups || has_copied_rows(t.size(0), t.stride(0), bytes));
  PRECAST_CHECK(fits || t.numel() == 0, ValueError)
      << arg.what() << " must have rows that start at multiples of " << kVecBytes
      << " bytes, got strides " << to_string(t.strides()) << "; pad the rows";
  return {data_of(t), t.stride(t.ndim() - 2) * bytes, has_groups ? t.stride(0) * bytes : 0};
}

// A weight [depth, columns], or with groups before, in either order in memory unless
// `takes_row_major` is false.
PRECAST_ONE_COPY GemmWeight weight_of(const Arg& arg, bool takes_row_major) {
  const TensorView& t = arg.tensor;
  const int64_t bytes = (t.dtype().bits + 7) / 8, vector = kVecBytes / bytes;
  const int64_t depth = t.size(-2), columns = t.size(-1);
  const int64_t depth_stride = t.stride(t.ndim() - 2), column_stride = t.stride(t.ndim() - 1);
  const bool has_groups = t.ndim() == 3;
  const bool fits_groups = !has_groups || has_copied_rows(t.size(0), t.stride(0), bytes);
  const bool by_columns =
      (depth <= 1 || depth_stride == 1) && has_copied_rows(columns, column_stride, bytes);
  const bool by_rows = takes_row_major && (columns <= 1 || column_stride == 1) &&
                       columns % vector == 0 && has_copied_rows(depth, depth_stride, bytes);
  const char* legal = takes_row_major
                          ? " must have stride 1 in one of its last two dimensions, and "
                          : " must be column-major, with stride 1 in dimension -2 and ";
  PRECAST_CHECK((fits_groups && (by_columns || by_rows)) || t.numel() == 0, ValueError)
      << arg.what() << legal << "multiples of " << kVecBytes << " bytes in the others"
      << (takes_row_major ? " (whole rows of them if row-major)" : "") << ", got shape "
      << to_string(t.shape()) << " and strides " << to_string(t.strides())
      << "; pad it, or pass the transpose of a contiguous weight";
  const int64_t group_stride = has_groups ? t.stride(0) * bytes : 0;
  if (by_columns || !by_rows) {
    return {{data_of(t), column_stride * bytes, group_stride}, false};
  }
  return {{data_of(t), depth_stride * bytes, group_stride}, true};
}

// A call whose tensors' dtypes, devices and shapes have been checked.
struct GemmCall {
  const Arg& a;  // [tokens, depth], or [groups, tokens, depth]
  const Arg& out;
  GemmWeight b;
  const Arg& b_arg;
  int64_t columns;
  int64_t groups, weights;
  int64_t expected_tokens;  // of a group
  int64_t tactic;           // what the kernels number their tiles by, or -1
  bool enable_pdl;
};

// Checks sizes and memory, and launches the product. `params`, which is GemmParams or derives from
// it, has what only some calls have: scales, the bias, groups. `kernels` has
//
//   bool has_tactic(int64_t tactic, TokenGroups kind);  whether 0 or more is legal
//   const char* kTactics;                               what is, in errors
//   cudaError_t launch(const Params& params, bool row_major_b, int tactic, int expected_tokens,
//                      int sms, bool enable_pdl, cudaStream_t stream);
//
// where a tactic of -1 leaves it to the kernels.
template <typename Params, typename Kernels>
void run_gemm_by(const GemmCall& call, Params params, const Kernels& kernels) {
  const TensorView& a = call.a.tensor;
  const int64_t bytes = (a.dtype().bits + 7) / 8, vector = kVecBytes / bytes;
  const int64_t tokens = a.size(-2), depth = a.size(-1);
  PRECAST_CHECK(depth % vector == 0 && depth <= kMostDepth, ValueError)
      << call.a.what() << " must have a multiple of " << vector << " columns, got shape "
      << to_string(a.shape()) << "; pad with zeros";
  PRECAST_CHECK(tokens <= kMostRows, ValueError)
      << call.a.what() << " must have at most " << kMostRows << " rows, got shape "
      << to_string(a.shape());
  PRECAST_CHECK(call.columns <= kMostRows, ValueError)
      << call.out.what() << " must have at most " << kMostRows << " columns, got shape "
      << to_string(call.out.tensor.shape());
  PRECAST_CHECK(
      call.tactic == -1 || (call.tactic >= 0 && kernels.has_tactic(call.tactic, params.kind)),
      ValueError)
      << call.a.op << ": tactic must be -1 or " << kernels.kTactics << ", got " << call.tactic;
  params.a = rows_of(call.a);
  params.b = call.b.matrix;
  check_columns(call.out, true);
  check_written({call.out}, {call.a, call.b_arg});
  const TensorView& out = call.out.tensor;
  params.out = data_of(out);
  params.out_row_stride = out.stride(out.ndim() - 2);
  params.out_group_stride = out.ndim() == 3 ? out.stride(0) : 0;
  params.groups = static_cast<int>(call.groups);
  params.weights = static_cast<int>(call.weights);
  params.tokens = static_cast<int>(tokens);
  params.columns = static_cast<int>(call.columns);
  params.depth = static_cast<int>(depth);
  if (call.groups == 0 || tokens == 0 || call.columns == 0) return;
  check_vector_aligned(call.a);
  check_vector_aligned(call.b_arg);
  launch_on(call.a, [&](cudaStream_t stream) {
    const int sms = multiprocessors(call.a.op, a.device().device_id);
    return kernels.launch(params, call.b.row_major, static_cast<int>(call.tactic),
                          static_cast<int>(call.expected_tokens), sms, call.enable_pdl, stream);
  });
}

// The kernels for every GPU, which function(params, row_major_b, tile, enable_pdl, stream)
// launches.
template <typename Function>
struct MmaTiles {
  static constexpr const char* kTactics = "a tile below 4";
  static_assert(kNumGemmTiles == 4, "kTactics");
  const Function& function;

  static bool has_tactic(int64_t tactic, TokenGroups) { return tactic < kNumGemmTiles; }
  cudaError_t launch(const GemmParams& params, bool row_major_b, int tactic, int expected_tokens,
                     int sms, bool enable_pdl, cudaStream_t stream) const {
    const int tile = tactic >= 0
                         ? tactic
                         : choose_gemm_tile(params.groups, expected_tokens, params.columns, sms);
    return function(params, row_major_b, tile, enable_pdl, stream);
  }
};

template <typename Function>
void run_gemm(const GemmCall& call, const GemmParams& params, const Function& function) {
  run_gemm_by(call, params, MmaTiles<Function>{function});
}

// Where the rows of groups begin, or what they select: int32, or int64 as well.
inline const void* numbers_of(const TensorMatch& match, int64_t count, bool& is_int64) {
  match.index_dtype(is_int64).shape({count}).contiguous();
  return data_of(static_cast<const Arg&>(match).tensor);
}

}  // namespace precast
