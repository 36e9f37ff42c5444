// SPDX-License-Identifier: Apache-2.0
// The entry points of block-scaled e4m3 GEMMs, whatever kernels compute them.
#pragma once

#include <algorithm>

#include "core/multiprocessors.h"
#include "gemm/gemm_checks.h"

namespace precast {

constexpr int64_t kMostScales = 0xffffffff;

inline int64_t blocks_of(int64_t size, int rows_log2) {
  return (size + (int64_t(1) << rows_log2) - 1) >> rows_log2;
}

// The scales of a matrix with `rows` rows; [row blocks, depth blocks] if `k_major`, else the other
// way round, behind the groups if the matrix has some. Packed ones have an element for four blocks
// of the depth; those of a weight may be of each row, as DeepGEMM has them: a block's are the same.
PRECAST_ONE_COPY Fp8Scales scales_of(const TensorMatch& match, bool has_groups, int64_t groups,
                                     int64_t rows, int64_t depth, int rows_log2, bool k_major,
                                     bool may_be_of_rows) {
  const Arg& arg = match;
  const TensorView& t = arg.tensor;
  const int at = has_groups ? 1 : 0;
  const bool packed = same_dtype(t.dtype(), kInt32);
  int64_t row_blocks = blocks_of(rows, rows_log2);
  const int64_t depth_blocks = blocks_of(depth, kFp8BlockLog2 + (packed ? 2 : 0));
  const bool of_each_row = packed && may_be_of_rows && t.ndim() == at + 2 &&
                           t.size(k_major ? at : at + 1) == rows && rows != row_blocks;
  if (of_each_row) row_blocks = rows;
  const int64_t first = k_major ? row_blocks : depth_blocks;
  const int64_t second = k_major ? depth_blocks : row_blocks;
  if (has_groups) {
    match.shape({groups, first, second});
  } else {
    match.shape({first, second});
  }
  Fp8Scales scales = {};
  scales.data = static_cast<const float*>(data_of(t));
  scales.block_stride = t.stride(k_major ? at : at + 1);
  scales.depth_stride = t.stride(k_major ? at + 1 : at);
  scales.group_stride = has_groups ? t.stride(0) : 0;
  scales.rows_log2 = rows_log2;
  scales.packed = packed;
  PRECAST_CHECK(scales.block_stride >= 0 && scales.depth_stride >= 0 &&
                    row_blocks * scales.block_stride < kMostScales,
                ValueError)
      << arg.what() << " must span less than 2^32 - 1 elements, got strides "
      << to_string(t.strides()) << "; call .contiguous()";
  if (of_each_row) scales.block_stride <<= rows_log2;
  return scales;
}

// A call of one of the functions.
struct Fp8GemmCall {
  TensorMatch a, b, a_scale, b_scale, out;
  TokenGroups kind;
  const Arg* group_info;  // or null
  bool a_scale_k_major, b_scale_k_major;
  int64_t a_scale_rows;
  int64_t choice;
  bool enable_pdl;
};

// Checks dtypes, devices and shapes of the operands, and the dtypes of the scales.
PRECAST_ONE_COPY void check_operands(const Fp8GemmCall& call, int a_rank, int b_rank) {
  const Arg &a = call.a, &b = call.b;
  call.a.cuda().dtype(DType::e4m3).rank(a_rank, a_rank);
  call.b.same_device(a).dtype(DType::e4m3).rank(b_rank, b_rank);
  const int64_t columns = b.tensor.size(-2), depth = a.tensor.size(-1);
  if (b_rank == 2) {
    call.b.shape({columns, depth});
  } else {
    call.b.shape({a_rank == 3 ? a.tensor.size(0) : b.tensor.size(0), columns, depth});
  }
  for (const TensorMatch* match : {&call.a_scale, &call.b_scale}) {
    match->same_device(a);
    const Arg& scale = *match;
    const DLDataType dtype = scale.tensor.dtype();
    PRECAST_CHECK(same_dtype(dtype, kInt32) || same_dtype(dtype, to_dl(DType::f32)), ValueError)
        << scale.what() << " must be float32 or int32, got " << to_string(dtype);
  }
}

PRECAST_ONE_COPY void check_output(const Fp8GemmCall& call, DType dtype) {
  const Arg &a = call.a, &b = call.b;
  call.out.same_device(a).dtype(dtype);
  const int64_t tokens = a.tensor.size(-2), columns = b.tensor.size(-2);
  if (a.tensor.ndim() == 2) {
    call.out.shape({tokens, columns});
  } else {
    call.out.shape({a.tensor.size(0), tokens, columns});
  }
  call.out.elements_apart().apart(TensorMemory(a));
}

// Checks what the functions have in common, but for the dtypes, devices and shapes of all tensors
// but the scales, and launches the product. `expected_tokens` are those of a group.
template <typename Kernels>
void run_fp8_gemm(const Fp8GemmCall& call, int64_t groups, int64_t expected_tokens) {
  const Arg &a = call.a, &b = call.b, &out = call.out;
  const bool has_groups_of_a = a.tensor.ndim() == 3, has_groups_of_b = b.tensor.ndim() == 3;
  const int64_t tokens = a.tensor.size(-2), depth = a.tensor.size(-1), columns = b.tensor.size(-2);
  PRECAST_CHECK(depth > 0 && depth % 16 == 0 && depth <= kMostDepth, ValueError)
      << a.what() << " must have a positive multiple of 16 columns, got shape "
      << to_string(a.tensor.shape());
  PRECAST_CHECK(columns % 8 == 0 && columns <= kMostRows, ValueError)
      << b.what() << " must have a multiple of 8 rows, got shape " << to_string(b.tensor.shape());
  PRECAST_CHECK(tokens <= kMostRows, ValueError)
      << a.what() << " must have at most " << kMostRows << " rows, got shape "
      << to_string(a.tensor.shape());
  PRECAST_CHECK(call.a_scale_rows == 1 || call.a_scale_rows == kFp8Block, ValueError)
      << a.op << ": a_scale_rows must be 1 or " << kFp8Block << ", got " << call.a_scale_rows;
  PRECAST_CHECK(call.choice < 0 || Kernels::has_choice(call.choice, call.kind), ValueError)
      << a.op << ": choice must be -1 or " << Kernels::kChoices << ", got " << call.choice;
  const DLDataType of_a = Arg(call.a_scale).tensor.dtype();
  const Arg& b_scale = call.b_scale;
  PRECAST_CHECK(same_dtype(b_scale.tensor.dtype(), of_a), ValueError)
      << b_scale.what() << " must be " << to_string(of_a) << ", as a_scale is, got "
      << to_string(b_scale.tensor.dtype());
  Fp8GemmParams params = {};
  params.kind = call.kind;
  params.groups = static_cast<int>(groups);
  params.tokens = static_cast<int>(tokens);
  params.columns = static_cast<int>(columns);
  params.depth = static_cast<int>(depth);
  params.a = matrix_of(call.a);
  params.b = matrix_of(call.b);
  params.a_scale =
      scales_of(call.a_scale, has_groups_of_a, groups, tokens, depth,
                call.a_scale_rows == 1 ? 0 : kFp8BlockLog2, call.a_scale_k_major, false);
  params.b_scale = scales_of(call.b_scale, has_groups_of_b, groups, columns, depth, kFp8BlockLog2,
                             call.b_scale_k_major, true);
  call.out.unit_stride_output();
  check_rows_aligned(out);
  params.out = data_of(out.tensor);
  params.out_row_stride = out.tensor.stride(out.tensor.ndim() - 2);
  params.out_group_stride = has_groups_of_a ? out.tensor.stride(0) : 0;
  check_written({out}, {a, b, TensorMemory(call.a_scale), TensorMemory(call.b_scale)});
  if (call.group_info != nullptr) {
    check_contiguous(*call.group_info);
    check_written({out}, {*call.group_info});
    params.group_info = static_cast<const int32_t*>(data_of(call.group_info->tensor));
  }
  if (groups == 0 || tokens == 0 || columns == 0) return;
  call.a.aligned();
  call.b.aligned();
  call.out.aligned();
  launch_on(a, [&](cudaStream_t stream) {
    const int sms = multiprocessors(a.op, a.tensor.device().device_id);
    return Kernels::launch(params, static_cast<int>(std::max<int64_t>(call.choice, -1)),
                           static_cast<int>(expected_tokens), sms, call.enable_pdl, stream);
  });
}

// The exported functions. `Kernels` has
//
//   static DType dtype_o();                                   of the module's outputs
//   static constexpr const char* kChoices;                    what a choice may be, in errors
//   static bool has_choice(int64_t choice, TokenGroups kind);
//   static cudaError_t launch(const Fp8GemmParams& params, int choice, int expected_tokens, int
//   sms,
//                             bool enable_pdl, cudaStream_t stream);
//
// where a choice of -1 leaves it to the kernels, and a group has about `expected_tokens`.
template <typename Kernels>
struct Fp8GemmEntries {
  static void gemm_fp8_nt_groupwise(TensorView a, TensorView b, TensorView a_scale,
                                    TensorView b_scale, TensorView out, bool a_scale_k_major,
                                    bool b_scale_k_major, int64_t a_scale_rows, int64_t choice,
                                    bool enable_pdl) {
    const TensorMatcher match("gemm_fp8_nt_groupwise");
    const Fp8GemmCall call = {match(a, "a"),
                              match(b, "b"),
                              match(a_scale, "a_scale"),
                              match(b_scale, "b_scale"),
                              match(out, "out"),
                              TokenGroups::equal,
                              nullptr,
                              a_scale_k_major,
                              b_scale_k_major,
                              a_scale_rows,
                              choice,
                              enable_pdl};
    check_operands(call, 2, 2);
    check_output(call, Kernels::dtype_o());
    run_fp8_gemm<Kernels>(call, 1, a.size(0));
  }

  // Tokens that say their group each: groups begin at multiples of 128.
  static void group_deepgemm_fp8_nt_groupwise(TensorView a, TensorView b, TensorView a_scale,
                                              TensorView b_scale, TensorView m_indices,
                                              TensorView out, int64_t choice, bool enable_pdl) {
    const TensorMatcher match("group_deepgemm_fp8_nt_groupwise");
    const Arg indices = match(m_indices, "m_indices");
    const Fp8GemmCall call = {match(a, "a"),
                              match(b, "b"),
                              match(a_scale, "a_scale"),
                              match(b_scale, "b_scale"),
                              match(out, "out"),
                              TokenGroups::blocks,
                              &indices,
                              true,
                              true,
                              1,
                              choice,
                              enable_pdl};
    check_operands(call, 2, 3);
    TensorMatch(indices).same_device(call.a).dtype(kInt32).shape({a.size(0)});
    check_output(call, Kernels::dtype_o());
    run_fp8_gemm<Kernels>(call, b.size(0), a.size(0));
  }

  // A number of tokens for each group, of which `a` has room for the most.
  static void batch_deepgemm_fp8_nt_groupwise(TensorView a, TensorView b, TensorView a_scale,
                                              TensorView b_scale, TensorView masked_m,
                                              TensorView out, int64_t expected_m, int64_t choice,
                                              bool enable_pdl) {
    const TensorMatcher match("batch_deepgemm_fp8_nt_groupwise");
    const Arg counts = match(masked_m, "masked_m");
    const Fp8GemmCall call = {match(a, "a"),
                              match(b, "b"),
                              match(a_scale, "a_scale"),
                              match(b_scale, "b_scale"),
                              match(out, "out"),
                              TokenGroups::counted,
                              &counts,
                              true,
                              true,
                              1,
                              choice,
                              enable_pdl};
    check_operands(call, 3, 3);
    TensorMatch(counts).same_device(call.a).dtype(kInt32).shape({a.size(0)});
    check_output(call, Kernels::dtype_o());
    PRECAST_CHECK(expected_m > 0, ValueError)
        << "batch_deepgemm_fp8_nt_groupwise: expected_m must be positive, got " << expected_m;
    run_fp8_gemm<Kernels>(call, a.size(0), std::min(expected_m, a.size(1)));
  }

  // Groups of consecutive tokens, from one number of m_indptr to the next.
  static void group_gemm_fp8_nt_groupwise(TensorView a, TensorView b, TensorView a_scale,
                                          TensorView b_scale, TensorView m_indptr, TensorView out,
                                          bool scales_k_major, int64_t choice, bool enable_pdl) {
    const TensorMatcher match("group_gemm_fp8_nt_groupwise");
    const Arg starts = match(m_indptr, "m_indptr");
    const Fp8GemmCall call = {match(a, "a"),
                              match(b, "b"),
                              match(a_scale, "a_scale"),
                              match(b_scale, "b_scale"),
                              match(out, "out"),
                              TokenGroups::ranges,
                              &starts,
                              scales_k_major,
                              scales_k_major,
                              1,
                              choice,
                              enable_pdl};
    check_operands(call, 2, 3);
    const int64_t groups = b.size(0);
    TensorMatch(starts).same_device(call.a).dtype(kInt32).shape({groups + 1});
    check_output(call, Kernels::dtype_o());
    run_fp8_gemm<Kernels>(call, groups, groups > 0 ? (a.size(0) + groups - 1) / groups : 0);
  }
};

}  // namespace precast
