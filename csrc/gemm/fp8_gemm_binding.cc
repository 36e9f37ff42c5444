// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the block-scaled e4m3 GEMM.
#include <array>

#include "core/ffi_export.h"
#include "core/multiprocessors.h"
#include "core/tensor_matcher.h"
#include "precast/gemm/sm90/choose.cuh"

namespace precast {

// csrc/gemm/fp8_gemm.cu, csrc/gemm/fp8_gemm_swapped.cu
extern const DType fp8_gemm_dtype_o;
cudaError_t fp8_gemm(const Fp8GemmParams& params, const Fp8GemmChoice& choice, int sms,
                     bool enable_pdl, cudaStream_t stream);
cudaError_t fp8_gemm_swapped(const Fp8GemmParams& params, const Fp8GemmChoice& choice, int sms,
                             bool enable_pdl, cudaStream_t stream);

namespace {

constexpr int64_t kMostInt = 0x7fffffff;
// A block of the depth, and a tile of rows, may end behind the last one.
constexpr int64_t kMostDepth = kMostInt - kFp8Block;
constexpr int64_t kMostRows = kMostInt - 512;
constexpr int64_t kMostScales = 0xffffffff;

int64_t blocks_of(int64_t size, int rows_log2) {
  return (size + (int64_t(1) << rows_log2) - 1) >> rows_log2;
}

// Checks that rows start at multiples of 16 bytes, as TMA and wide stores need it.
void check_rows_aligned(const Arg& arg) {
  const TensorView& t = arg.tensor;
  const int64_t bytes = (t.dtype().bits + 7) / 8;
  bool aligned = true;
  for (int i = 0; i + 1 < t.ndim(); ++i) {
    const int64_t stride = t.stride(i) * bytes;
    aligned = aligned && (t.size(i) <= 1 || (stride > 0 && stride % kVecBytes == 0));
  }
  PRECAST_CHECK(aligned || t.numel() == 0, ValueError)
      << arg.what() << " must have rows that start at different multiples of " << kVecBytes
      << " bytes, got strides " << to_string(t.strides()) << "; pad the rows";
}

// An operand as TMA reads it.
Fp8Matrix matrix_of(const TensorMatch& match) {
  const Arg& arg = match;
  match.unit_stride();
  check_rows_aligned(arg);
  const TensorView& t = arg.tensor;
  const bool has_groups = t.ndim() == 3;
  return {data_of(t), t.stride(t.ndim() - 2), has_groups ? t.stride(0) : 0};
}

// The scales of a matrix with `rows` rows; [row blocks, depth blocks] if `k_major`, else the other
// way round, behind the groups if the matrix has some.
Fp8Scales scales_of(const TensorMatch& match, bool has_groups, int64_t groups, int64_t rows,
                    int64_t depth, int rows_log2, bool k_major) {
  const Arg& arg = match;
  int64_t row_blocks = blocks_of(rows, rows_log2);
  int64_t depth_blocks = blocks_of(depth, kFp8BlockLog2);
  const int64_t first = k_major ? row_blocks : depth_blocks;
  const int64_t second = k_major ? depth_blocks : row_blocks;
  if (has_groups) {
    match.shape({groups, first, second});
  } else {
    match.shape({first, second});
  }
  const TensorView& t = arg.tensor;
  const int at = has_groups ? 1 : 0;
  Fp8Scales scales = {};
  scales.data = static_cast<const float*>(data_of(t));
  scales.block_stride = t.stride(k_major ? at : at + 1);
  scales.depth_stride = t.stride(k_major ? at + 1 : at);
  scales.group_stride = has_groups ? t.stride(0) : 0;
  scales.rows_log2 = rows_log2;
  PRECAST_CHECK(scales.block_stride >= 0 && scales.depth_stride >= 0 &&
                    row_blocks * scales.block_stride < kMostScales,
                ValueError)
      << arg.what() << " must span less than 2^32 - 1 elements, got strides "
      << to_string(t.strides()) << "; call .contiguous()";
  return scales;
}

void check_choice(const char* op, int64_t number, TokenGroups kind) {
  PRECAST_CHECK(number < 0 || (number < kNumFp8Choices &&
                               is_legal(Fp8GemmChoice::of(static_cast<int>(number)), kind)),
                ValueError)
      << op << ": choice must be -1 or a tile and cluster for this kind of tokens below "
      << kNumFp8Choices << ", got " << number;
}

// What choose_fp8_gemm() says. Why a memory: the model takes longer than the rest of a call, and
// engines call with a few shapes again and again.
Fp8GemmChoice choice_for(const Fp8GemmProblem& problem) {
  struct Known {
    Fp8GemmProblem problem;
    Fp8GemmChoice choice;
  };
  constexpr size_t kKnown = 256;
  thread_local std::array<Known, kKnown> known = {};
  const uint32_t words[] = {
      static_cast<uint32_t>(problem.kind),   static_cast<uint32_t>(problem.groups),
      static_cast<uint32_t>(problem.tokens), static_cast<uint32_t>(problem.columns),
      static_cast<uint32_t>(problem.depth),  static_cast<uint32_t>(problem.sms)};
  uint32_t hash = 0;
  for (const uint32_t word : words) hash = (hash ^ word) * 0x9e3779b1u;
  Known& here = known[(hash >> 16) % kKnown];
  if (!(here.problem == problem)) here = {problem, choose_fp8_gemm(problem)};
  return here.choice;
}

// A call of one of the functions.
struct Call {
  TensorMatch a, b, a_scale, b_scale, out;
  TokenGroups kind;
  const Arg* group_info;  // or null
  bool a_scale_k_major, b_scale_k_major;
  int64_t a_scale_rows;
  int64_t choice;
  bool enable_pdl;
};

// Checks what the functions have in common, but for the dtypes, devices and shapes of all tensors
// but the scales, and launches the product. `expected_tokens` are those of a group.
void run(const Call& call, int64_t groups, int64_t expected_tokens) {
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
  check_choice(a.op, call.choice, call.kind);
  Fp8GemmParams params = {};
  params.kind = call.kind;
  params.groups = static_cast<int>(groups);
  params.tokens = static_cast<int>(tokens);
  params.columns = static_cast<int>(columns);
  params.depth = static_cast<int>(depth);
  params.a = matrix_of(call.a);
  params.b = matrix_of(call.b);
  params.a_scale = scales_of(call.a_scale, has_groups_of_a, groups, tokens, depth,
                             call.a_scale_rows == 1 ? 0 : kFp8BlockLog2, call.a_scale_k_major);
  params.b_scale = scales_of(call.b_scale, has_groups_of_b, groups, columns, depth, kFp8BlockLog2,
                             call.b_scale_k_major);
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
    Fp8GemmChoice choice = Fp8GemmChoice::of(static_cast<int>(call.choice < 0 ? 0 : call.choice));
    if (call.choice < 0) {
      choice = choice_for({call.kind, call.kind == TokenGroups::blocks ? 1 : params.groups,
                           static_cast<int>(expected_tokens), params.columns, params.depth, sms});
    }
    const auto launch = choice.shape().swapped ? fp8_gemm_swapped : fp8_gemm;
    return launch(params, choice, sms, call.enable_pdl, stream);
  });
}

// Checks dtypes, devices and shapes of the operands, and the dtypes of the scales.
void check_operands(const Call& call, int a_rank, int b_rank) {
  const Arg &a = call.a, &b = call.b;
  call.a.cuda().dtype(DType::e4m3).rank(a_rank, a_rank);
  call.b.same_device(a).dtype(DType::e4m3).rank(b_rank, b_rank);
  const int64_t columns = b.tensor.size(-2), depth = a.tensor.size(-1);
  if (b_rank == 2) {
    call.b.shape({columns, depth});
  } else {
    call.b.shape({a_rank == 3 ? a.tensor.size(0) : b.tensor.size(0), columns, depth});
  }
  call.a_scale.same_device(a).dtype(DType::f32);
  call.b_scale.same_device(a).dtype(DType::f32);
}

void check_output(const Call& call) {
  const Arg &a = call.a, &b = call.b;
  call.out.same_device(a).dtype(fp8_gemm_dtype_o);
  const int64_t tokens = a.tensor.size(-2), columns = b.tensor.size(-2);
  if (a.tensor.ndim() == 2) {
    call.out.shape({tokens, columns});
  } else {
    call.out.shape({a.tensor.size(0), tokens, columns});
  }
  call.out.elements_apart().apart(TensorMemory(a));
}

void gemm_fp8_nt_groupwise_entry(TensorView a, TensorView b, TensorView a_scale, TensorView b_scale,
                                 TensorView out, bool a_scale_k_major, bool b_scale_k_major,
                                 int64_t a_scale_rows, int64_t choice, bool enable_pdl) {
  const TensorMatcher match("gemm_fp8_nt_groupwise");
  const Call call = {match(a, "a"),
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
  check_output(call);
  run(call, 1, a.size(0));
}

// Tokens that say their group each: groups begin at multiples of 128.
void group_deepgemm_fp8_nt_groupwise_entry(TensorView a, TensorView b, TensorView a_scale,
                                           TensorView b_scale, TensorView m_indices, TensorView out,
                                           int64_t choice, bool enable_pdl) {
  const TensorMatcher match("group_deepgemm_fp8_nt_groupwise");
  const Arg indices = match(m_indices, "m_indices");
  const Call call = {match(a, "a"),
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
  check_output(call);
  run(call, b.size(0), a.size(0));
}

// A number of tokens for each group, of which `a` has room for the most.
void batch_deepgemm_fp8_nt_groupwise_entry(TensorView a, TensorView b, TensorView a_scale,
                                           TensorView b_scale, TensorView masked_m, TensorView out,
                                           int64_t expected_m, int64_t choice, bool enable_pdl) {
  const TensorMatcher match("batch_deepgemm_fp8_nt_groupwise");
  const Arg counts = match(masked_m, "masked_m");
  const Call call = {match(a, "a"),
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
  check_output(call);
  PRECAST_CHECK(expected_m > 0, ValueError)
      << "batch_deepgemm_fp8_nt_groupwise: expected_m must be positive, got " << expected_m;
  run(call, a.size(0), std::min(expected_m, a.size(1)));
}

// Groups of consecutive tokens, from one number of m_indptr to the next.
void group_gemm_fp8_nt_groupwise_entry(TensorView a, TensorView b, TensorView a_scale,
                                       TensorView b_scale, TensorView m_indptr, TensorView out,
                                       bool scales_k_major, int64_t choice, bool enable_pdl) {
  const TensorMatcher match("group_gemm_fp8_nt_groupwise");
  const Arg starts = match(m_indptr, "m_indptr");
  const Call call = {match(a, "a"),
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
  check_output(call);
  run(call, groups, groups > 0 ? (a.size(0) + groups - 1) / groups : 0);
}

}  // namespace

PRECAST_EXPORT(gemm_fp8_nt_groupwise, gemm_fp8_nt_groupwise_entry)
PRECAST_EXPORT(group_deepgemm_fp8_nt_groupwise, group_deepgemm_fp8_nt_groupwise_entry)
PRECAST_EXPORT(batch_deepgemm_fp8_nt_groupwise, batch_deepgemm_fp8_nt_groupwise_entry)
PRECAST_EXPORT(group_gemm_fp8_nt_groupwise, group_gemm_fp8_nt_groupwise_entry)

}  // namespace precast
