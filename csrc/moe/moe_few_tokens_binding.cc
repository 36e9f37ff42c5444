// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of a mixture of experts of few tokens: with experts that the caller chose,
// and with logits.
#include "core/ffi_export.h"
#include "core/multiprocessors.h"
#include "moe/expert_checks.h"
#include "precast/moe/few_tokens.cuh"

namespace precast {

// csrc/moe/moe_few_tokens.cu
extern const DType moe_few_tokens_dtype;
extern const DType moe_few_tokens_dtype_weights;
cudaError_t moe_few_tokens(const MoeFewTokensParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

bool has_scales() { return moe_few_tokens_dtype_weights == DType::e4m3; }

// The sizes of a call, which `hidden` and `inter` bind.
struct FewSizes {
  int64_t tokens, slots, experts, hidden, inter;
};

// Throws ValueError for sizes that the kernels do not take.
void check_few_sizes(const char* op, const FewSizes& s) {
  PRECAST_CHECK(s.tokens <= kFewTokens, ValueError)
      << op << ": there must be at most " << kFewTokens << " tokens, got " << s.tokens;
  PRECAST_CHECK(s.slots >= 1 && s.tokens * s.slots <= kMaxFewPairs, ValueError)
      << op << ": all tokens must have from 1 to " << kMaxFewPairs << " slots, got "
      << s.tokens * s.slots;
  PRECAST_CHECK(s.experts >= 1 && s.experts <= kMaxFewExperts, ValueError)
      << op << ": there must be from 1 to " << kMaxFewExperts << " experts, got " << s.experts;
  const int64_t item = has_scales() ? 1 : 2;
  for (const int64_t size : {s.hidden, s.inter}) {
    PRECAST_CHECK(size > 0 && size % kExpertGroup == 0, ValueError)
        << op << ": the hidden and the intermediate size must be positive multiples of "
        << kExpertGroup << ", got " << s.hidden << " and " << s.inter;
  }
  PRECAST_CHECK(kFewTokens * s.hidden * item <= kMaxFewShared &&
                    s.tokens * s.slots * s.inter * item <= kMaxFewShared,
                ValueError)
      << op << ": eight tokens, and the activations of all slots, must have at most "
      << kMaxFewShared << " bytes, got " << kFewTokens * s.hidden * item << " and "
      << s.tokens * s.slots * s.inter * item;
}

// Weights and their scales, which are there with e4m3 alone.
struct FewWeights {
  TensorMatch fc1, fc2;
  OptionalTensor fc1_scale, fc2_scale;
  const char* fc1_scale_name;
  const char* fc2_scale_name;
};

// Checks weights, and what is written; fills in what both entry points have in common.
MoeFewTokensParams few_params(const TensorMatcher& match, const Arg& x, const FewSizes& s,
                              const FewWeights& weights) {
  MoeFewTokensParams params = {};
  weights.fc1.same_device(x).dtype(moe_few_tokens_dtype_weights);
  weights.fc1.shape({s.experts, 2 * s.inter, s.hidden}).contiguous().aligned();
  weights.fc2.same_device(x).dtype(moe_few_tokens_dtype_weights);
  weights.fc2.shape({s.experts, s.hidden, s.inter}).contiguous().aligned();
  const auto scale = [&](const OptionalTensor& t, const char* name, int64_t rows, int64_t columns) {
    PRECAST_CHECK(t.has_value() == has_scales(), ValueError)
        << x.op << ": " << name << " must be given with float8_e4m3fn weights, and only then";
    return match.optional<const float>(t, name, [&](const TensorMatch& it) {
      it.same_device(x).dtype(DType::f32);
      it.shape({s.experts, rows / kExpertGroup, columns / kExpertGroup}).contiguous();
    });
  };
  params.fc1_scale = scale(weights.fc1_scale, weights.fc1_scale_name, 2 * s.inter, s.hidden);
  params.fc2_scale = scale(weights.fc2_scale, weights.fc2_scale_name, s.hidden, s.inter);
  params.x = data_of(x.tensor);
  params.fc1 = weights.fc1.data<const void>();
  params.fc2 = weights.fc2.data<const void>();
  params.tokens = static_cast<int>(s.tokens);
  params.slots = static_cast<int>(s.slots);
  params.experts = static_cast<int>(s.experts);
  params.hidden = static_cast<int>(s.hidden);
  params.inter = static_cast<int>(s.inter);
  const int64_t steps = s.inter * (has_scales() ? 1 : 2) / kFewStepBytes;
  params.splits = few_splits(params.slots, static_cast<int>(steps));
  return params;
}

// Launches both kernels. Why the number of multiprocessors is asked for here: it takes a driver,
// and what is wrong with the arguments is said before that.
void launch_few_tokens(const Arg& x, MoeFewTokensParams& params, bool enable_pdl) {
  launch_on(x, [&](cudaStream_t stream) {
    params.sms = multiprocessors(x.op, x.tensor.device().device_id);
    return moe_few_tokens(params, enable_pdl, stream);
  });
}

void few_tokens_entry(TensorView input, TensorView token_selected_experts,
                      OptionalTensor token_final_scales, TensorView fc1_expert_weights,
                      TensorView fc2_expert_weights, OptionalTensor fc1_scale,
                      OptionalTensor fc2_scale, int64_t first_expert, TensorView h,
                      TensorView output, bool enable_pdl) {
  const TensorMatcher match("moe_few_tokens");
  const TensorMatch in = match(input, "input");
  const TensorMatch selected = match(token_selected_experts, "token_selected_experts");
  const TensorMatch fc1 = match(fc1_expert_weights, "fc1_expert_weights");
  const TensorMatch fc2 = match(fc2_expert_weights, "fc2_expert_weights");
  const TensorMatch scratch = match(h, "h"), to = match(output, "output");
  in.cuda().dtype(moe_few_tokens_dtype).rank(2, 2).contiguous().aligned();
  selected.same_device(in).dtype(kInt32).rank(2, 2);
  fc2.rank(3, 3);
  const FewSizes s = {input.size(0), token_selected_experts.size(1), fc2_expert_weights.size(0),
                      input.size(1), fc2_expert_weights.size(2)};
  selected.shape({s.tokens, s.slots}).contiguous();
  check_few_sizes("moe_few_tokens", s);
  PRECAST_CHECK(first_expert >= 0 && first_expert <= 0x7fffffff, ValueError)
      << "moe_few_tokens: first_expert must be from 0 to 2^31 - 1, got " << first_expert;
  MoeFewTokensParams params =
      few_params(match, in, s, {fc1, fc2, fc1_scale, fc2_scale, "fc1_scale", "fc2_scale"});
  params.weights = match.optional<const float>(
      token_final_scales, "token_final_scales", [&](const TensorMatch& it) {
        it.same_device(in).dtype(DType::f32).shape({s.tokens, s.slots}).contiguous();
      });
  scratch.same_device(in).dtype(has_scales() ? DType::f32 : moe_few_tokens_dtype);
  scratch.shape({s.tokens * s.slots, s.inter}).contiguous();
  to.same_device(in).dtype(moe_few_tokens_dtype).shape({s.tokens, s.hidden}).contiguous();
  check_written({TensorMemory(scratch), TensorMemory(to)},
                {TensorMemory(in),
                 TensorMemory(selected),
                 {"moe_few_tokens", "token_final_scales", token_final_scales},
                 TensorMemory(fc1),
                 TensorMemory(fc2),
                 {"moe_few_tokens", "fc1_scale", fc1_scale},
                 {"moe_few_tokens", "fc2_scale", fc2_scale}});
  if (s.tokens == 0) return;
  scratch.aligned();

  params.selected = selected.data<const int32_t>();
  params.h = data_of(h);
  params.out = data_of(output);
  params.first_expert = static_cast<int>(first_expert);
  params.gate_row = params.inter;
  params.tile_rows = 8;
  launch_few_tokens(in, params, enable_pdl);
}

void mono_moe_entry(TensorView activations_in, TensorView router_logits,
                    TensorView expert_weights_up, TensorView expert_scales_up,
                    TensorView expert_weights_down, TensorView expert_scales_down, int64_t top_k,
                    bool is_softmax, bool renormalize, bool is_interleaved, TensorView out,
                    TensorView scratchpad, bool enable_pdl) {
  const char* op = "mono_moe";
  const TensorMatcher match(op);
  const TensorMatch in = match(activations_in, "activations_in");
  const TensorMatch logits = match(router_logits, "router_logits");
  const TensorMatch up = match(expert_weights_up, "expert_weights_up");
  const TensorMatch down = match(expert_weights_down, "expert_weights_down");
  const Arg down_arg = down;
  const Arg up_scale = PRECAST_ARG(op, expert_scales_up);
  const Arg down_scale = PRECAST_ARG(op, expert_scales_down);
  const TensorMatch to = match(out, "out"), scratch = match(scratchpad, "scratchpad");
  const Arg scratch_arg = scratch;
  in.cuda().dtype(moe_few_tokens_dtype).rank(2, 2).contiguous().aligned();
  down.rank(3, 3);
  const FewSizes s = {activations_in.size(0), top_k, expert_weights_down.size(0),
                      activations_in.size(1), expert_weights_down.size(2)};
  PRECAST_CHECK(s.experts <= kMaxRoutedExperts && s.experts % 8 == 0, ValueError)
      << down_arg.what() << " must have a multiple of 8 experts, at most " << kMaxRoutedExperts
      << ", got " << s.experts;
  PRECAST_CHECK(top_k >= 1 && top_k <= kMaxRoutedTopK && top_k <= s.experts, ValueError)
      << op << ": top_k must be in [1, " << kMaxRoutedTopK << "], got " << top_k;
  check_few_sizes(op, s);
  logits.same_device(in).dtype(moe_few_tokens_dtype);
  logits.shape({s.tokens, s.experts}).contiguous().aligned();
  MoeFewTokensParams params =
      few_params(match, in, s,
                 {up, down, OptionalTensor(expert_scales_up), OptionalTensor(expert_scales_down),
                  "expert_scales_up", "expert_scales_down"});
  to.same_device(in).dtype(moe_few_tokens_dtype).shape({s.tokens, s.hidden}).contiguous();
  scratch.same_device(in).dtype(kUint8).rank(1, 1).contiguous();
  const int64_t bytes = s.tokens * s.slots * s.inter * 4;
  PRECAST_CHECK(scratchpad.size(0) >= bytes, ValueError)
      << scratch_arg.what() << " must have at least " << bytes << " bytes, got shape "
      << to_string(scratchpad.shape()) << ". Fix: pass alloc_scratchpad()";
  check_written({TensorMemory(to), TensorMemory(scratch)},
                {TensorMemory(in), TensorMemory(logits), TensorMemory(up), TensorMemory(down),
                 TensorMemory(up_scale), TensorMemory(down_scale)});
  if (s.tokens == 0) return;
  scratch.aligned();

  params.logits = data_of(router_logits);
  params.h = data_of(scratchpad);
  params.out = data_of(out);
  params.gate_first = true;
  params.up_row = is_interleaved ? 8 : params.inter;
  params.tile_rows = is_interleaved ? 16 : 8;
  params.routing = is_softmax ? FewTokensRouting::softmax : FewTokensRouting::sigmoid;
  params.renormalize = renormalize;
  launch_few_tokens(in, params, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(moe_few_tokens, few_tokens_entry)
PRECAST_EXPORT(mono_moe, mono_moe_entry)

}  // namespace precast
