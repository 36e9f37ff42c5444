// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of top-k.
#include <utility>

#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "precast/topk/topk.cuh"

namespace precast {

// csrc/topk/topk.cu
extern const DType topk_dtype;
cudaError_t top_k_rows(const TopKParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

// Checks the arguments that all entry points share, and sets their parameters.
TopKParams params_of(const Arg& in, int64_t k, bool deterministic, int64_t tie_break,
                     const char* k_name = "k") {
  TensorMatch(in).cuda().dtype(topk_dtype).rank(2, 2).unit_stride();
  const TensorView& input = in.tensor;
  PRECAST_CHECK(input.size(1) <= kMaxColumns, ValueError)
      << in.what() << " must have at most " << kMaxColumns << " columns, got shape "
      << to_string(input.shape());
  PRECAST_CHECK(input.size(0) <= 0x0fffffff, ValueError)
      << in.what() << " must have at most 2^28 - 1 rows, got shape " << to_string(input.shape());
  PRECAST_CHECK(k >= 1, ValueError) << in.op << ": " << k_name << " must be at least 1, got " << k;
  PRECAST_CHECK(k <= kMaxColumns, ValueError)
      << in.op << ": " << k_name << " must be at most " << kMaxColumns << ", got " << k;
  PRECAST_CHECK(tie_break >= 0 && tie_break <= 2, ValueError)
      << in.op << ": tie_break must be 0, 1 or 2, got " << tie_break;
  TopKParams params = {};
  params.input = data_of(input);
  params.stride = input.stride(0);
  params.rows = static_cast<uint32_t>(input.size(0));
  params.size = static_cast<int32_t>(input.size(1));
  params.k = static_cast<int32_t>(k);
  params.order = deterministic ? TopKOrder::by_place : TopKOrder::any;
  params.prefer_last = tie_break == 2;
  return params;
}

// Checks a contiguous result [rows, k] of `dtype` that must share no memory with the input.
void check_result(const Arg& out, DLDataType dtype, const Arg& in, int64_t k) {
  TensorMatch(out)
      .dtype(dtype)
      .same_device(in)
      .shape({in.tensor.size(0), k})
      .contiguous()
      .apart(in);
}

// Returns one int32 for each row, or null.
const int32_t* per_row(const Arg& in, const char* name, const OptionalTensor& tensor) {
  return TensorMatcher(in.op).optional<const int32_t>(tensor, name, [&](const TensorMatch& match) {
    match.dtype(kInt32).same_device(in).shape({in.tensor.size(0)}).contiguous();
  });
}

void launch_checked(const Arg& in, const TopKParams& params, bool enable_pdl) {
  if (params.rows == 0) return;
  launch_on(in, [&](cudaStream_t stream) { return top_k_rows(params, enable_pdl, stream); });
}

void top_k_export(TensorView input, int64_t k, bool sorted, bool deterministic, int64_t tie_break,
                  TensorView values, TensorView indices, bool enable_pdl) {
  const char* op = "top_k";
  const Arg in = PRECAST_ARG(op, input);
  const Arg chosen = PRECAST_ARG(op, values);
  const Arg at = PRECAST_ARG(op, indices);
  TopKParams params = params_of(in, k, deterministic, tie_break);
  PRECAST_CHECK(k <= input.size(1), ValueError)
      << op << ": k must be at most input's " << input.size(1) << " columns, got " << k;
  check_result(chosen, to_dl(topk_dtype), in, k);
  check_result(at, kInt64, in, k);
  check_memory_apart(at, chosen);
  params.mode = TopKMode::values;
  if (sorted) params.order = TopKOrder::by_value;
  params.values = data_of(values);
  params.indices = static_cast<int64_t*>(data_of(indices));
  launch_checked(in, params, enable_pdl);
}

void top_k_ragged_transform_export(TensorView input, TensorView offsets, TensorView lengths,
                                   int64_t k, bool deterministic, int64_t tie_break,
                                   OptionalTensor row_starts, TensorView out, bool enable_pdl) {
  const char* op = "top_k_ragged_transform";
  const Arg in = PRECAST_ARG(op, input);
  const Arg to = PRECAST_ARG(op, out);
  TopKParams params = params_of(in, k, deterministic, tie_break);
  params.mode = TopKMode::ragged;
  params.offsets = per_row(in, "offsets", offsets);
  params.lengths = per_row(in, "lengths", lengths);
  params.row_starts = per_row(in, "row_starts", row_starts);
  check_result(to, kInt32, in, k);
  check_written(
      {to}, {PRECAST_ARG(op, offsets), PRECAST_ARG(op, lengths), {op, "row_starts", row_starts}});
  params.out = static_cast<int32_t*>(data_of(out));
  launch_checked(in, params, enable_pdl);
}

void top_k_page_table_transform_export(TensorView input, TensorView src_page_table,
                                       TensorView lengths, int64_t k, OptionalTensor row_to_batch,
                                       bool deterministic, int64_t tie_break,
                                       OptionalTensor row_starts,
                                       OptionalTensor page_table_row_starts, int64_t page_size,
                                       TensorView out, OptionalTensor out_raw_indices,
                                       bool enable_pdl) {
  const char* op = "top_k_page_table_transform";
  const Arg in = PRECAST_ARG(op, input);
  const Arg table = PRECAST_ARG(op, src_page_table);
  const Arg to = PRECAST_ARG(op, out);
  TopKParams params = params_of(in, k, deterministic, tie_break);
  params.mode = TopKMode::paged;
  TensorMatch(table).same_device(in).dtype(kInt32).rank(2, 2).unit_stride();
  PRECAST_CHECK(row_to_batch.has_value() || src_page_table.size(0) >= input.size(0), ValueError)
      << table.what() << " must have a row for each of input's " << input.size(0) << ", got shape "
      << to_string(src_page_table.shape()) << "; or pass row_to_batch";
  PRECAST_CHECK(page_size >= 1 && page_size <= 1 << 30 && (page_size & (page_size - 1)) == 0,
                ValueError)
      << op << ": page_size must be a positive power of two no greater than 2**30, got "
      << page_size;
  PRECAST_CHECK(page_size == 1 || !row_starts.has_value() || page_table_row_starts.has_value(),
                ValueError)
      << op << ": page_table_row_starts is required with page_size > 1 and row_starts";
  params.lengths = per_row(in, "lengths", lengths);
  params.row_to_batch = per_row(in, "row_to_batch", row_to_batch);
  params.row_starts = per_row(in, "row_starts", row_starts);
  params.page_starts = page_table_row_starts.has_value()
                           ? per_row(in, "page_table_row_starts", page_table_row_starts)
                           : params.row_starts;
  params.table = static_cast<const int32_t*>(data_of(src_page_table));
  params.table_stride = src_page_table.stride(0);
  params.page_bits = __builtin_ctzll(page_size);
  check_result(to, kInt32, in, k);
  params.out = static_cast<int32_t*>(data_of(out));
  params.raw = TensorMatcher(op).optional<int32_t>(
      out_raw_indices, "out_raw_indices",
      [&](const TensorMatch& raw) { check_result(raw, kInt32, in, k); });
  check_written({to, {op, "out_raw_indices", out_raw_indices}},
                {table,
                 PRECAST_ARG(op, lengths),
                 {op, "row_to_batch", row_to_batch},
                 {op, "row_starts", row_starts},
                 {op, "page_table_row_starts", page_table_row_starts}});
  launch_checked(in, params, enable_pdl);
}

void top_k_varlen_export(TensorView logits, TensorView seq_lens, int64_t top_k,
                         int64_t compress_ratio, int64_t next_n, bool deterministic,
                         TensorView out_indices, OptionalTensor out_values, bool enable_pdl) {
  const char* op = "top_k_varlen";
  const Arg in = PRECAST_ARG(op, logits);
  const Arg lengths = PRECAST_ARG(op, seq_lens);
  const Arg to = PRECAST_ARG(op, out_indices);
  check_cuda(in);
  constexpr int64_t kMost = 0x7fffffff;
  for (const auto& [name, value] :
       {std::pair<const char*, int64_t>{"compress_ratio", compress_ratio}, {"next_n", next_n}}) {
    PRECAST_CHECK(value >= 1 && value <= kMost, ValueError)
        << op << ": " << name << " must be from 1 to " << kMost << ", got " << value;
  }
  TopKParams params = params_of(in, top_k, deterministic, 0, "top_k");
  TensorMatch(lengths).same_device(in).dtype(kInt32).rank(1, 1).contiguous();
  PRECAST_CHECK(logits.size(0) == seq_lens.size(0) * next_n, ValueError)
      << in.what() << " must have next_n = " << next_n << " rows for each of the "
      << seq_lens.size(0) << " numbers of seq_lens, got " << logits.size(0);
  check_result(to, kInt32, in, top_k);
  params.values = TensorMatcher(op).optional<void>(
      out_values, "out_values",
      [&](const TensorMatch& values) { check_result(values, to_dl(topk_dtype), in, top_k); });
  check_written({to, {op, "out_values", out_values}}, {lengths});
  params.mode = TopKMode::ragged;
  params.lengths = static_cast<const int32_t*>(data_of(seq_lens));
  params.next_n = FastDivmod(static_cast<uint32_t>(next_n));
  params.compress_ratio = static_cast<int32_t>(compress_ratio);
  params.out = static_cast<int32_t*>(data_of(out_indices));
  launch_checked(in, params, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(top_k, top_k_export)
PRECAST_EXPORT(top_k_varlen, top_k_varlen_export)
PRECAST_EXPORT(top_k_ragged_transform, top_k_ragged_transform_export)
PRECAST_EXPORT(top_k_page_table_transform, top_k_page_table_transform_export)

}  // namespace precast
