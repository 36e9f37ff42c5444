// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the products of low-rank adapters: with tables of addresses, as engines
// keep them, and with the weights of one or two slices as tensors.
#include <limits>

#include "core/ffi_export.h"
#include "moe/expert_checks.h"
#include "precast/moe/bgmv_moe_expand.cuh"
#include "precast/moe/bgmv_moe_shrink.cuh"

namespace precast {

// csrc/moe/bgmv_moe.cu
extern const DType bgmv_moe_dtype;
cudaError_t bgmv_moe_shrink(const BgmvMoeShrinkParams& params, bool enable_pdl,
                            cudaStream_t stream);
cudaError_t bgmv_moe_expand(const BgmvMoeExpandParams& params, bool enable_pdl,
                            cudaStream_t stream);

namespace {

constexpr int64_t kMaxLoraSlices = 65535, kMaxLoraRank = 65528;

// The pairs of a call, on the device of `in`.
LoraPairs pairs_of(const TensorMatch& tokens, const TensorMatch& experts, const TensorMatch& loras,
                   const Arg& in) {
  const Arg& token_arg = tokens;
  const Arg& lora_arg = loras;
  tokens.same_device(in).dtype(kInt64).rank(1, 1).contiguous();
  const int64_t pairs = token_arg.tensor.size(0);
  PRECAST_CHECK(pairs <= kMostExpertRows, ValueError)
      << token_arg.what() << " must have at most " << kMostExpertRows << " elements, got shape "
      << to_string(token_arg.tensor.shape());
  experts.same_device(in).dtype(kInt64).shape({pairs}).contiguous();
  loras.same_device(in).dtype(kInt64).rank(1, 1).contiguous();
  PRECAST_CHECK(lora_arg.tensor.size(0) <= kMostExpertRows, ValueError)
      << lora_arg.what() << " must have at most " << kMostExpertRows << " elements, got shape "
      << to_string(lora_arg.tensor.shape());
  return {tokens.data<const int64_t>(), experts.data<const int64_t>(), loras.data<const int64_t>(),
          lora_arg.tensor.size(0), static_cast<uint32_t>(pairs)};
}

void check_lora_rank(const Arg& arg, int64_t rank) {
  PRECAST_CHECK(rank % kLoraVector == 0 && rank <= kMaxLoraRank, ValueError)
      << arg.what() << " must have a rank that is a multiple of 8 and at most " << kMaxLoraRank
      << ", got shape " << to_string(arg.tensor.shape());
}

// Weights whose addresses a table [slices, experts] holds.
LoraWeights table_of(const TensorMatch& table, const Arg& in, int64_t slices, int64_t lora_stride) {
  const Arg& arg = table;
  table.same_device(in).dtype(kInt64).rank(2, 2);
  table.shape({slices, arg.tensor.size(1)}).contiguous();
  PRECAST_CHECK(slices <= kMaxLoraSlices, ValueError)
      << arg.what() << " must have at most " << kMaxLoraSlices << " rows, got shape "
      << to_string(arg.tensor.shape());
  PRECAST_CHECK(lora_stride >= 0 && lora_stride % kLoraVector == 0, ValueError)
      << arg.op << ": lora_stride must be a multiple of 8 and at least 0, got " << lora_stride;
  LoraWeights weights = {};
  weights.table = table.data<const int64_t>();
  weights.lora_stride = lora_stride;
  weights.experts = arg.tensor.size(1);
  weights.loras = std::numeric_limits<int64_t>::max();
  return weights;
}

// Weights of one slice: [adapters, experts, a, b], of which [a, b] is contiguous.
LoraWeights weights_of(const TensorMatch& match, const Arg& in) {
  const Arg& arg = match;
  const TensorView& t = arg.tensor;
  match.same_device(in).dtype(bgmv_moe_dtype).rank(4, 4);
  bool fits = (t.size(3) <= 1 || t.stride(3) == 1) && (t.size(2) <= 1 || t.stride(2) == t.size(3));
  for (int i = 0; i < 2; ++i) {
    fits = fits && (t.size(i) <= 1 || (t.stride(i) >= 0 && t.stride(i) % kLoraVector == 0));
  }
  PRECAST_CHECK(fits || t.numel() == 0, ValueError)
      << arg.what() << " must have contiguous matrices at multiples of " << kVecBytes
      << " bytes, got strides " << to_string(t.strides()) << "; call .contiguous()";
  if (t.numel() > 0) match.aligned();
  LoraWeights weights = {};
  weights.bases[0] = data_of(t);
  weights.expert_stride = t.stride(1);
  weights.lora_stride = t.stride(0);
  weights.experts = t.size(1);
  weights.loras = t.size(0);
  return weights;
}

// Checks that a matrix has a row for each token or pair.
void check_lora_rows(const Arg& arg, int64_t least, const char* of) {
  PRECAST_CHECK(arg.tensor.size(0) >= least, ValueError)
      << arg.what() << " must have a row for each of the " << least << " " << of << ", got shape "
      << to_string(arg.tensor.shape());
}

// Checks the scratch that lists the pairs of each token; null without it.
int32_t* token_pairs_of(const char* op, const OptionalTensor& scratch, const Arg& in,
                        int64_t tokens) {
  return TensorMatcher(op).optional<int32_t>(scratch, "token_pairs", [&](const TensorMatch& match) {
    match.same_device(in).dtype(kInt32).shape({tokens, kTokenPairsRow}).contiguous();
  });
}

void shrink_entry(TensorView y, TensorView x, TensorView w_ptr, TensorView sorted_token_ids,
                  TensorView expert_ids, TensorView lora_indices, int64_t lora_stride,
                  bool per_pair_input, bool enable_pdl) {
  const TensorMatcher match("bgmv_moe_shrink");
  const TensorMatch to = match(y, "y"), from = match(x, "x"), table = match(w_ptr, "w_ptr");
  const TensorMatch tokens = match(sorted_token_ids, "sorted_token_ids");
  const TensorMatch experts = match(expert_ids, "expert_ids");
  const TensorMatch loras = match(lora_indices, "lora_indices");
  to.cuda().dtype(bgmv_moe_dtype).rank(3, 3).contiguous();
  const int64_t slices = y.size(0), rank = y.size(2);
  check_lora_rank(to, rank);
  from.same_device(to).dtype(bgmv_moe_dtype);
  check_expert_matrix(from, kLoraVector, false);
  BgmvMoeShrinkParams params = {};
  params.weights = table_of(table, to, slices, lora_stride);
  params.pairs = pairs_of(tokens, experts, loras, to);
  to.shape({slices, int64_t(params.pairs.pairs), rank});
  check_lora_rows(from, per_pair_input ? params.pairs.pairs : params.pairs.tokens,
                  per_pair_input ? "pairs" : "tokens");
  check_written({TensorMemory(to)}, {TensorMemory(from), TensorMemory(table), TensorMemory(tokens),
                                     TensorMemory(experts), TensorMemory(loras)});
  if (y.numel() == 0) return;

  params.x = data_of(x);
  params.y = data_of(y);
  params.x_stride = x.stride(0);
  params.columns = x.size(1);
  params.rank = static_cast<int>(rank);
  params.slices = static_cast<uint32_t>(slices);
  params.per_pair_input = per_pair_input;
  params.accumulates = true;
  launch_on(to, [&](cudaStream_t s) { return bgmv_moe_shrink(params, enable_pdl, s); });
}

void expand_entry(TensorView y, TensorView x, TensorView w_ptr, TensorView sorted_token_ids,
                  TensorView expert_ids, TensorView topk_weights, TensorView lora_indices,
                  TensorView slice_start_loc, int64_t output_size, int64_t lora_stride,
                  bool finalize, OptionalTensor token_pairs, bool enable_pdl) {
  const char* op = "bgmv_moe_expand";
  const TensorMatcher match(op);
  const TensorMatch to = match(y, "y"), from = match(x, "x"), table = match(w_ptr, "w_ptr");
  const TensorMatch tokens = match(sorted_token_ids, "sorted_token_ids");
  const TensorMatch experts = match(expert_ids, "expert_ids");
  const TensorMatch scales = match(topk_weights, "topk_weights");
  const TensorMatch loras = match(lora_indices, "lora_indices");
  const TensorMatch starts = match(slice_start_loc, "slice_start_loc");
  to.cuda().dtype(DType::f32).rank(2, 2).unit_stride_output().elements_apart();
  from.same_device(to).dtype(bgmv_moe_dtype).rank(3, 3).contiguous();
  const int64_t slices = x.size(0), rank = x.size(2);
  check_lora_rank(from, rank);
  BgmvMoeExpandParams params = {};
  params.weights = table_of(table, to, slices, lora_stride);
  params.pairs = pairs_of(tokens, experts, loras, to);
  const int64_t pairs = params.pairs.pairs;
  from.shape({slices, pairs, rank});
  if (x.numel() > 0) from.aligned();
  scales.same_device(to).dtype(DType::f32).shape({pairs}).contiguous();
  starts.same_device(to).dtype(kInt64).shape({slices}).contiguous();
  PRECAST_CHECK(output_size >= 1 && output_size <= y.size(1), ValueError)
      << op << ": output_slices must be from 1 to the " << y.size(1) << " columns of y, got "
      << output_size;
  check_lora_rows(to, finalize ? params.pairs.tokens : pairs, finalize ? "tokens" : "pairs");
  params.token_pairs = token_pairs_of(op, token_pairs, to, params.pairs.tokens);
  check_written(
      {TensorMemory(to), {op, "token_pairs", token_pairs}},
      {TensorMemory(from), TensorMemory(table), TensorMemory(tokens), TensorMemory(experts),
       TensorMemory(scales), TensorMemory(loras), TensorMemory(starts)});
  if (pairs == 0 || params.pairs.tokens == 0 || slices == 0 || rank == 0) return;

  params.x = data_of(x);
  params.scales = scales.data<const float>();
  params.starts = starts.data<const int64_t>();
  params.y = data_of(y);
  params.y_stride = y.stride(0);
  params.columns = y.size(1);
  params.features = output_size;
  params.rank = static_cast<int>(rank);
  params.slices = static_cast<uint32_t>(slices);
  params.per_pair = !finalize;
  if (!finalize) params.token_pairs = nullptr;
  launch_on(to, [&](cudaStream_t s) { return bgmv_moe_expand(params, enable_pdl, s); });
}

// Adds the weights of a second slice, which have the shape and strides of the first one's.
void add_slice(const OptionalTensor& more, const TensorMatcher& match, const char* name,
               const TensorMatch& first, LoraWeights& weights) {
  const Arg& of = first;
  weights.bases[1] = match.optional<void>(more, name, [&](const TensorMatch& second) {
    const Arg& arg = second;
    second.same_device(of).dtype(bgmv_moe_dtype).shape_of(of);
    bool fits = true;
    for (int i = 0; i < 4; ++i) {
      fits = fits && (of.tensor.size(i) <= 1 || arg.tensor.stride(i) == of.tensor.stride(i));
    }
    PRECAST_CHECK(fits, ValueError) << arg.what() << " must have the strides of " << of.name
                                    << ", got " << to_string(arg.tensor.strides());
    if (arg.tensor.numel() > 0) second.aligned();
  });
}

// Both products of one slice, or of two that are alike, with an output that is overwritten.
void whole_entry(TensorView x, TensorView lora_a_weights, OptionalTensor more_a_weights,
                 TensorView lora_b_weights, OptionalTensor more_b_weights,
                 TensorView sorted_token_ids, TensorView expert_ids, TensorView lora_indices,
                 TensorView topk_weights, int64_t first_column, TensorView shrunk, TensorView out,
                 OptionalTensor token_pairs, bool enable_pdl) {
  const char* op = "bgmv_moe";
  const TensorMatcher match(op);
  const TensorMatch from = match(x, "x");
  const TensorMatch a = match(lora_a_weights, "lora_a_weights");
  const TensorMatch b = match(lora_b_weights, "lora_b_weights");
  const TensorMatch tokens = match(sorted_token_ids, "sorted_token_ids");
  const TensorMatch experts = match(expert_ids, "expert_ids");
  const TensorMatch loras = match(lora_indices, "lora_indices");
  const TensorMatch scales = match(topk_weights, "topk_weights");
  const TensorMatch middle = match(shrunk, "shrunk");
  const TensorMatch to = match(out, "out");
  from.cuda().dtype(bgmv_moe_dtype);
  check_expert_matrix(from, kLoraVector, false);
  BgmvMoeShrinkParams down = {};
  BgmvMoeExpandParams up = {};
  down.weights = weights_of(a, from);
  const int64_t columns = x.size(1), rank = lora_a_weights.size(2);
  a.shape({lora_a_weights.size(0), lora_a_weights.size(1), rank, columns});
  check_lora_rank(a, rank);
  add_slice(more_a_weights, match, "more_a_weights", a, down.weights);
  up.weights = weights_of(b, from);
  const int64_t features = lora_b_weights.size(2);
  b.shape({down.weights.loras, down.weights.experts, features, rank});
  add_slice(more_b_weights, match, "more_b_weights", b, up.weights);
  PRECAST_CHECK(more_a_weights.has_value() == more_b_weights.has_value(), ValueError)
      << op << ": more_b_weights must be given with more_a_weights, and only then";
  const int64_t slices = more_a_weights.has_value() ? 2 : 1;
  up.pairs = down.pairs = pairs_of(tokens, experts, loras, from);
  const int64_t pairs = up.pairs.pairs, rows = up.pairs.tokens;
  check_lora_rows(from, rows, "tokens");
  scales.same_device(from).dtype(DType::f32).shape({pairs}).contiguous();
  middle.same_device(from).dtype(bgmv_moe_dtype).shape({slices, pairs, rank}).contiguous();
  if (shrunk.numel() > 0) middle.aligned();
  to.same_device(from).dtype(bgmv_moe_dtype).rank(2, 2).unit_stride_output().elements_apart();
  to.shape({rows, out.size(1)});
  const int64_t most = out.size(1) - slices * features;
  PRECAST_CHECK(first_column >= 0 && first_column <= most, ValueError)
      << op << ": first_column must be from 0 to " << most << ", got " << first_column;
  up.token_pairs = token_pairs_of(op, token_pairs, from, rows);
  check_written({TensorMemory(middle), TensorMemory(to), {op, "token_pairs", token_pairs}},
                {TensorMemory(from),
                 TensorMemory(a),
                 {op, "more_a_weights", more_a_weights},
                 TensorMemory(b),
                 {op, "more_b_weights", more_b_weights},
                 TensorMemory(tokens),
                 TensorMemory(experts),
                 TensorMemory(loras),
                 TensorMemory(scales)});

  down.x = data_of(x);
  down.y = data_of(shrunk);
  down.x_stride = x.stride(0);
  down.columns = columns;
  down.rank = up.rank = static_cast<int>(rank);
  down.slices = up.slices = static_cast<uint32_t>(slices);
  up.x = data_of(shrunk);
  up.scales = scales.data<const float>();
  up.y = data_of(out);
  up.y_stride = out.stride(0);
  up.columns = out.size(1);
  up.first_column = first_column;
  up.features = features;
  up.overwrites = true;
  if (pairs == 0) up.token_pairs = nullptr;
  up.behind_shrink = shrunk.numel() > 0 && up.token_pairs == nullptr;
  launch_on(from, [&](cudaStream_t stream) {
    if (shrunk.numel() > 0) {
      const cudaError_t error = bgmv_moe_shrink(down, enable_pdl, stream);
      if (error != cudaSuccess) return error;
    }
    if (rows == 0 || features == 0) return cudaSuccess;
    return bgmv_moe_expand(up, enable_pdl, stream);
  });
}

}  // namespace

PRECAST_EXPORT(bgmv_moe_shrink, shrink_entry)
PRECAST_EXPORT(bgmv_moe_expand, expand_entry)
PRECAST_EXPORT(bgmv_moe, whole_entry)

}  // namespace precast
