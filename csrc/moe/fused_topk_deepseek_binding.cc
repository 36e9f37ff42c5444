// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of fused_topk_deepseek.
#include "core/ffi_export.h"
#include "core/number_checks.h"
#include "core/tensor_matcher.h"
#include "precast/moe/fused_topk_deepseek.cuh"

namespace precast {

// csrc/moe/fused_topk_deepseek.cu
extern const DType routing_dtype;
extern const DType routing_dtype_bias;
cudaError_t fused_topk_deepseek(const FusedTopKDeepSeekParams& params, bool enable_pdl,
                                cudaStream_t stream);

namespace {

constexpr DLDataType kInt16 = {kDLInt, 16, 1};

// Throws ValueError for numbers that do not fit the experts of the scores.
void check_sizes(const Arg& in, int64_t n_group, int64_t topk_group, int64_t topk) {
  const int64_t experts = in.tensor.size(1);
  PRECAST_CHECK(n_group >= 1 && n_group <= kMaxRoutingGroups && experts % n_group == 0, ValueError)
      << in.op << ": n_group must be from 1 to " << kMaxRoutingGroups << " and divide the "
      << experts << " experts, got " << n_group;
  const int64_t each = experts / n_group, most = max_experts_per_group(static_cast<int>(n_group));
  PRECAST_CHECK(each <= most, ValueError)
      << in.what() << " must have at most " << most << " experts in each of " << n_group
      << " groups, got " << each;
  PRECAST_CHECK(topk_group >= 1 && topk_group <= n_group, ValueError)
      << in.op << ": topk_group must be from 1 to n_group, " << n_group << ", got " << topk_group;
  const int64_t chosen = topk_group * each;
  const int64_t most_k = chosen < kMaxRoutingTopK ? chosen : kMaxRoutingTopK;
  PRECAST_CHECK(topk >= 1 && topk <= most_k, ValueError)
      << in.op << ": topk must be from 1 to " << most_k << " for " << topk_group << " groups of "
      << each << " experts, got " << topk;
}

void fused_topk_deepseek_entry(TensorView scores, TensorView bias, int64_t n_group,
                               int64_t topk_group, int64_t topk, double routed_scaling_factor,
                               TensorView topk_values, TensorView topk_indices,
                               bool launch_with_pdl, OptionalTensor routing_replay_out) {
  const char* op = "fused_topk_deepseek";
  const Arg in = PRECAST_ARG(op, scores);
  const Arg values = PRECAST_ARG(op, topk_values);
  const Arg indices = PRECAST_ARG(op, topk_indices);
  TensorMatch(in).cuda();
  check_not_nan(op, "routed_scaling_factor", routed_scaling_factor);
  TensorMatch(in).dtype(routing_dtype).rank(2, 2).unit_stride();
  const int64_t tokens = scores.size(0), experts = scores.size(1);
  const Arg by = PRECAST_ARG(op, bias);
  TensorMatch(by).same_device(in).dtype(routing_dtype_bias).shape({experts}).contiguous();
  PRECAST_CHECK(tokens <= 0x7fffffff, ValueError)
      << in.what() << " must have at most 2^31 - 1 rows, got shape " << to_string(scores.shape());
  TensorMatch(values).same_device(in).dtype(routing_dtype).shape({tokens, topk}).contiguous();
  TensorMatch(indices).same_device(in).dtype(kInt32).shape({tokens, topk}).contiguous();
  check_sizes(in, n_group, topk_group, topk);
  FusedTopKDeepSeekParams params = {};
  params.replay = TensorMatcher(op).optional<short>(
      routing_replay_out, "routing_replay_out", [&](const TensorMatch& match) {
        const Arg& replay = match;
        match.same_device(in).dtype(kInt16).rank(2, 2);
        PRECAST_CHECK(replay.tensor.size(0) >= tokens && replay.tensor.size(1) == topk, ValueError)
            << replay.what() << " must have shape [" << tokens << " or more, " << topk << "], got "
            << to_string(replay.tensor.shape());
        match.contiguous();
      });
  check_written({values, indices, {op, "routing_replay_out", routing_replay_out}}, {in, by});
  if (tokens == 0) return;

  params.scores = data_of(scores);
  params.bias = data_of(bias);
  params.values = data_of(topk_values);
  params.indices = static_cast<int32_t*>(data_of(topk_indices));
  params.stride = scores.stride(0);
  params.tokens = static_cast<uint32_t>(tokens);
  params.n_group = static_cast<int>(n_group);
  params.topk_group = static_cast<int>(topk_group);
  params.topk = static_cast<int>(topk);
  params.experts_per_group = static_cast<int>(experts / n_group);
  params.scale = static_cast<float>(routed_scaling_factor);
  launch_on(in, [&](cudaStream_t stream) {
    return fused_topk_deepseek(params, launch_with_pdl, stream);
  });
}

}  // namespace

PRECAST_EXPORT(fused_topk_deepseek, fused_topk_deepseek_entry)

}  // namespace precast
