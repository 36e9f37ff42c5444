// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the fused sampling from logits.
#include "core/ffi_export.h"
#include "precast/sampling/fused.cuh"
#include "sampling/sampling_checks.h"

namespace precast {

// csrc/sampling/sampling_fused.cu
extern const DType sampling_fused_dtype;
cudaError_t sample_fused(const FusedParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void sample_export(TensorView logits, OptionalTensor temperature_arr, double temperature,
                   OptionalTensor top_k_arr, int64_t top_k, OptionalTensor top_p_arr, double top_p,
                   OptionalTensor min_p_arr, double min_p, bool joint,
                   OptionalTensor repetition_arr, double repetition, OptionalTensor frequency_arr,
                   double frequency, OptionalTensor presence_arr, double presence,
                   OptionalTensor prompt_mask, OptionalTensor output_counts, OptionalTensor bitmask,
                   OptionalTensor seed_arr, int64_t seed, OptionalTensor offset_arr, int64_t offset,
                   TensorView out, OptionalTensor logprobs, OptionalTensor top_tokens,
                   OptionalTensor top_logprobs, OptionalTensor valid, bool enable_pdl) {
  const char* op = "sample";
  const Arg in = PRECAST_ARG(op, logits);
  const Arg to = PRECAST_ARG(op, out);
  check_cuda(in);
  check_dtype(in, sampling_fused_dtype);
  check_vocab_rows(in, false);
  const int64_t batch = logits.size(0), vocab = logits.size(1), words = (vocab + 31) / 32;
  FusedParams params = {};
  params.source = source_of(in);
  params.logits = true;
  params.joint = joint;
  params.temperature = per_row_scalar(op, "temperature", temperature_arr, temperature, in);
  params.top_k_values = top_k_of(op, top_k_arr, in);
  params.top_k = clamp_top_k(top_k);
  params.top_p = per_row_scalar(op, "top_p", top_p_arr, top_p, in);
  params.min_p = per_row_scalar(op, "min_p", min_p_arr, min_p, in);
  params.repetition = per_row_scalar(op, "repetition_penalty", repetition_arr, repetition, in);
  params.frequency = per_row_scalar(op, "frequency_penalty", frequency_arr, frequency, in);
  params.presence = per_row_scalar(op, "presence_penalty", presence_arr, presence, in);
  const TensorMatcher match(op);
  const auto int32_rows = [&](int64_t columns) {
    return [&in, batch, columns](const TensorMatch& arg) {
      arg.same_device(in).dtype(kInt32).shape({batch, columns}).contiguous();
    };
  };
  params.prompt_mask =
      match.optional<const uint32_t>(prompt_mask, "prompt_mask", int32_rows(words));
  params.counts = match.optional<const int32_t>(output_counts, "output_counts", int32_rows(vocab));
  params.counts_aligned = vocab % 4 == 0 && reinterpret_cast<uint64_t>(params.counts) % 16 == 0;
  params.bitmask = match.optional<const uint32_t>(bitmask, "bitmask", int32_rows(words));
  params.random = random_source_of(op, seed_arr, seed, offset_arr, offset, in, batch);
  TensorMatch(to).same_device(in).shape({batch}).contiguous().index_dtype(params.int64_out);
  params.out = data_of(out);
  // Checks the outputs besides the tokens.
  const auto output = [&](DLDataType dtype, int64_t columns = -1) {
    return [&in, batch, dtype, columns](const TensorMatch& arg) {
      arg.same_device(in).dtype(dtype);
      if (columns < 0) arg.shape({batch});
      if (columns >= 0) arg.shape({batch, columns});
      arg.contiguous();
    };
  };
  const DLDataType f32 = to_dl(DType::f32);
  params.logprobs = match.optional<float>(logprobs, "logprobs", output(f32));
  params.valid = match.optional<bool>(valid, "valid", output(kBool));
  PRECAST_CHECK(top_tokens.has_value() == top_logprobs.has_value(), ValueError)
      << op << ": top_tokens and top_logprobs must both be given or both be None";
  if (top_tokens.has_value()) {
    const TensorView tokens = top_tokens.value();
    const Arg arg = {op, "top_tokens", tokens};
    check_rank(arg, 2, 2);
    PRECAST_CHECK(tokens.size(1) <= kMaxTopTokens, ValueError)
        << arg.what() << " must have at most " << kMaxTopTokens << " columns, got shape "
        << to_string(tokens.shape());
    params.top_count = static_cast<int32_t>(tokens.size(1));
    params.top_tokens =
        match.optional<int32_t>(top_tokens, "top_tokens", output(kInt32, tokens.size(1)));
    params.top_logprobs =
        match.optional<float>(top_logprobs, "top_logprobs", output(f32, tokens.size(1)));
  }
  check_written({to,
                 {op, "logprobs", logprobs},
                 {op, "top_tokens", top_tokens},
                 {op, "top_logprobs", top_logprobs},
                 {op, "valid", valid}},
                {in,
                 {op, "temperature", temperature_arr},
                 {op, "top_k", top_k_arr},
                 {op, "top_p", top_p_arr},
                 {op, "min_p", min_p_arr},
                 {op, "repetition_penalty", repetition_arr},
                 {op, "frequency_penalty", frequency_arr},
                 {op, "presence_penalty", presence_arr},
                 {op, "prompt_mask", prompt_mask},
                 {op, "output_counts", output_counts},
                 {op, "bitmask", bitmask},
                 {op, "seed", seed_arr},
                 {op, "offset", offset_arr}});
  if (batch == 0) return;
  launch_on(in, [&](cudaStream_t stream) { return sample_fused(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(sample, sample_export)

}  // namespace precast
