// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the products of few rows.
#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "precast/gemm/tinygemm.cuh"

namespace precast {

// csrc/gemm/tinygemm.cu
cudaError_t tinygemm(const TinyGemmParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void tinygemm_bf16_entry(TensorView input, TensorView weight, TensorView out, OptionalTensor bias,
                         bool use_pdl) {
  const TensorMatcher match("tinygemm_bf16");
  const TensorMatch in = match(input, "input");
  const TensorMatch by = match(weight, "weight");
  const TensorMatch to = match(out, "out");
  in.cuda().rank(2, 2).dtype(DType::bf16).contiguous();
  const int64_t rows = input.size(0), depth = input.size(1);
  by.same_device(in).rank(2, 2).dtype(DType::bf16);
  const int64_t columns = weight.size(0);
  by.shape({columns, depth}).contiguous();
  PRECAST_CHECK(columns % kTinyColumns == 0, ValueError)
      << "tinygemm_bf16: weight must have a multiple of " << kTinyColumns << " rows, got shape "
      << to_string(weight.shape());
  PRECAST_CHECK(depth % 8 == 0 && depth <= kMaxTinyDepth, ValueError)
      << "tinygemm_bf16: input must have a multiple of 8 columns up to " << kMaxTinyDepth
      << ", got shape " << to_string(input.shape());
  to.same_device(in).dtype(DType::bf16).shape({rows, columns}).contiguous();
  const int64_t row_tiles = (rows + kTinyRows - 1) / kTinyRows;
  PRECAST_CHECK(row_tiles <= kMaxTinyTiles && columns <= kMaxTinyTiles &&
                    row_tiles * (columns / kTinyColumns) <= kMaxTinyTiles,
                ValueError)
      << "tinygemm_bf16: out must have at most " << kMaxTinyTiles
      << " tiles of 8 rows and 16 columns, got shape " << to_string(out.shape());
  TinyGemmParams params = {};
  params.bias = match.optional<const void>(bias, "bias", [&](const TensorMatch& vector) {
    vector.same_device(in).dtype(DType::bf16).shape({columns}).contiguous();
  });
  check_written({TensorMemory(to)},
                {TensorMemory(in), TensorMemory(by), {"tinygemm_bf16", "bias", bias}});
  if (rows == 0 || columns == 0) return;
  in.aligned();
  by.aligned();
  params.input = in.data<const void>();
  params.weight = by.data<const void>();
  params.out = data_of(out);
  params.rows = static_cast<uint32_t>(rows);
  params.columns = static_cast<uint32_t>(columns);
  params.depth = static_cast<int>(depth);
  launch_on(in, [&](cudaStream_t stream) { return tinygemm(params, use_pdl, stream); });
}

// A router: the weight is [depth, columns] with unit stride along the depth.
void run_router(const char* op, const TensorView& mat_a, const TensorView& mat_b,
                const TensorView& out, int64_t columns, DType out_dtype, bool launch_with_pdl) {
  constexpr int64_t kDepth = 7168, kMostRows = 16;
  const TensorMatcher match(op);
  const TensorMatch in = match(mat_a, "mat_a");
  const TensorMatch by = match(mat_b, "mat_b");
  const TensorMatch to = match(out, "out");
  in.cuda().rank(2, 2).dtype(DType::bf16);
  const int64_t rows = mat_a.size(0);
  PRECAST_CHECK(rows >= 1 && rows <= kMostRows, ValueError)
      << op << ": mat_a must have 1 to " << kMostRows << " rows, got shape "
      << to_string(mat_a.shape());
  in.shape({rows, kDepth}).contiguous();
  by.same_device(in).dtype(DType::bf16).shape({kDepth, columns});
  PRECAST_CHECK(mat_b.stride(0) == 1 && mat_b.stride(1) == kDepth, ValueError)
      << op << ": mat_b must have strides [1, " << kDepth << "], got " << to_string(mat_b.strides())
      << "; pass the transpose of a contiguous weight";
  to.same_device(in).dtype(out_dtype).shape({rows, columns}).contiguous();
  check_written({TensorMemory(to)}, {TensorMemory(in), TensorMemory(by)});
  in.aligned();
  by.aligned();
  TinyGemmParams params = {};
  params.input = in.data<const void>();
  params.weight = by.data<const void>();
  params.out = data_of(out);
  params.rows = static_cast<uint32_t>(rows);
  params.columns = static_cast<uint32_t>(columns);
  params.depth = static_cast<int>(kDepth);
  params.out_is_f32 = out_dtype == DType::f32;
  launch_on(in, [&](cudaStream_t stream) { return tinygemm(params, launch_with_pdl, stream); });
}

void router_n128_entry(TensorView mat_a, TensorView mat_b, TensorView out, bool launch_with_pdl) {
  run_router("mm_M1_16_K7168_N128", mat_a, mat_b, out, 128, DType::bf16, launch_with_pdl);
}

void router_n256_entry(TensorView mat_a, TensorView mat_b, TensorView out, bool launch_with_pdl) {
  run_router("mm_M1_16_K7168_N256", mat_a, mat_b, out, 256, DType::f32, launch_with_pdl);
}

}  // namespace

PRECAST_EXPORT(tinygemm_bf16, tinygemm_bf16_entry)
PRECAST_EXPORT(mm_m1_16_k7168_n128, router_n128_entry)
PRECAST_EXPORT(mm_m1_16_k7168_n256, router_n256_entry)

}  // namespace precast
