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

// A contiguous tensor of int32 [batch, columns], or null.
const void* words_of(const char* op, const char* name, const OptionalTensor& words,
                     const Arg& logits, int64_t columns) {
  if (!words.has_value()) return nullptr;
  const TensorView tensor = words.value();
  const Arg arg = {op, name, tensor};
  check_same_device(arg, logits);
  check_int32(arg);
  PRECAST_CHECK(
      tensor.ndim() == 2 && tensor.size(0) == logits.tensor.size(0) && tensor.size(1) == columns,
      ValueError)
      << arg.what() << " must have shape [" << logits.tensor.size(0) << ", " << columns << "], got "
      << to_string(tensor.shape());
  check_contiguous(arg);
  return data_of(tensor);
}

// What is written besides the tokens, apart from the logits and the other outputs.
class Written {
 public:
  Written(const char* op, const Arg& logits, const Arg& out)
      : op_(op), logits_(logits), out_(out) {}

  // A contiguous tensor of `dtype` and `shape`, or null.
  void* add(const char* name, const OptionalTensor& tensor, DLDataType dtype,
            std::initializer_list<int64_t> shape) {
    if (!tensor.has_value()) return nullptr;
    const TensorView view = tensor.value();
    const Arg arg = {op_, name, view};
    check_same_device(arg, logits_);
    PRECAST_CHECK(same_dtype(view.dtype(), dtype), ValueError)
        << arg.what() << " must be " << to_string(dtype) << ", got " << to_string(view.dtype());
    const tvm::ffi::ShapeView legal(shape.begin(), shape.size());
    PRECAST_CHECK(has_shape(view, legal), ValueError)
        << arg.what() << " must have shape " << to_string(legal) << ", got "
        << to_string(view.shape());
    check_contiguous(arg);
    check_memory_apart(arg, logits_);
    check_memory_apart(arg, out_);
    return data_of(view);
  }

 private:
  const char* op_;
  const Arg& logits_;
  const Arg& out_;
};

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
  params.temperature = number_of(op, "temperature", temperature_arr, temperature, in);
  params.top_k_values = top_k_of(op, top_k_arr, in);
  params.top_k = clamp_top_k(top_k);
  params.top_p = number_of(op, "top_p", top_p_arr, top_p, in);
  params.min_p = number_of(op, "min_p", min_p_arr, min_p, in);
  params.repetition = number_of(op, "repetition_penalty", repetition_arr, repetition, in);
  params.frequency = number_of(op, "frequency_penalty", frequency_arr, frequency, in);
  params.presence = number_of(op, "presence_penalty", presence_arr, presence, in);
  params.prompt_mask =
      static_cast<const uint32_t*>(words_of(op, "prompt_mask", prompt_mask, in, words));
  params.counts =
      static_cast<const int32_t*>(words_of(op, "output_counts", output_counts, in, vocab));
  params.counts_aligned = vocab % 4 == 0 && reinterpret_cast<uint64_t>(params.counts) % 16 == 0;
  params.bitmask = static_cast<const uint32_t*>(words_of(op, "bitmask", bitmask, in, words));
  params.random = random_of(op, seed_arr, seed, offset_arr, offset, in, batch);
  check_vector_beside(to, in, batch);
  params.int64_out = check_index_dtype(to);
  params.out = data_of(out);
  check_memory_apart(to, in);
  Written written(op, in, to);
  params.logprobs =
      static_cast<float*>(written.add("logprobs", logprobs, to_dl(DType::f32), {batch}));
  params.valid = static_cast<bool*>(written.add("valid", valid, {kDLBool, 8, 1}, {batch}));
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
    params.top_tokens = static_cast<int32_t*>(
        written.add("top_tokens", top_tokens, {kDLInt, 32, 1}, {batch, tokens.size(1)}));
    params.top_logprobs = static_cast<float*>(
        written.add("top_logprobs", top_logprobs, to_dl(DType::f32), {batch, tokens.size(1)}));
  }
  if (batch == 0) return;
  launch_on(in, [&](cudaStream_t stream) { return sample_fused(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(sample, sample_export)

}  // namespace precast
