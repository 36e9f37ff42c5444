// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of sampling, and of the softmax, renormalisation and masking of rows.
#include "core/ffi_export.h"
#include "precast/sampling/chain_speculative.cuh"
#include "precast/sampling/row_transform.cuh"
#include "precast/sampling/sampling.cuh"
#include "sampling/sampling_checks.h"

namespace precast {

// csrc/sampling/sampling.cu
extern const DType sampling_dtype;
cudaError_t sample_rows(const SampleParams& params, bool enable_pdl, cudaStream_t stream);

// csrc/sampling/sampling_rows.cu
cudaError_t transform_rows(const RowTransformParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t sample_chain(const ChainParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void check_input(const Arg& rows) {
  check_cuda(rows);
  check_dtype(rows, sampling_dtype);
  check_vocab_rows(rows, false);
}

// Sets the rows to sample from; `out` has one element for each sample.
void set_rows(const Arg& rows, const OptionalTensor& indices, const Arg& out,
              SampleParams& params) {
  check_input(rows);
  params.source = source_of(rows);
  int64_t outputs = rows.tensor.size(0);
  if (indices.has_value()) {
    const TensorView tensor = indices.value();
    const Arg arg = {rows.op, "indices", tensor};
    bool& is_int64 = params.source.int64_indices;
    TensorMatch(arg).same_device(rows).index_dtype(is_int64).rank(1, 1).contiguous();
    outputs = tensor.size(0);
    PRECAST_CHECK(outputs == 0 || rows.tensor.size(0) > 0, ValueError)
        << rows.what() << " must have the rows that indices name, got shape "
        << to_string(rows.tensor.shape());
    PRECAST_CHECK(outputs <= 0x0fffffff, ValueError)
        << arg.what() << " must have at most 2^28 - 1 elements, got shape "
        << to_string(tensor.shape());
    params.source.indices = data_of(tensor);
  }
  params.source.num_outputs = static_cast<uint32_t>(outputs);
  TensorMatch(out).same_device(rows).shape({outputs}).contiguous().index_dtype(params.int64_out);
  params.out = data_of(out.tensor);
}

void set_valid(const OptionalTensor& valid, const Arg& out, SampleParams& params) {
  params.valid =
      TensorMatcher(out.op).optional<bool>(valid, "valid", [&](const TensorMatch& match) {
        match.same_device(out).shape({out.tensor.size(0)}).contiguous().dtype(kBool);
      });
}

void sample_from_probs_export(TensorView probs, OptionalTensor indices, OptionalTensor top_k_arr,
                              int64_t top_k, OptionalTensor top_p_arr, double top_p,
                              OptionalTensor min_p_arr, double min_p, bool joint,
                              OptionalTensor seed_arr, int64_t seed, OptionalTensor offset_arr,
                              int64_t offset, TensorView out, OptionalTensor valid,
                              bool enable_pdl) {
  const char* op = "sampling_from_probs";
  const Arg in = PRECAST_ARG(op, probs);
  const Arg to = PRECAST_ARG(op, out);
  SampleParams params = {};
  set_rows(in, indices, to, params);
  set_valid(valid, to, params);
  params.top_k_values = top_k_of(op, top_k_arr, in);
  params.top_k = clamp_top_k(top_k);
  params.top_p = per_row_scalar(op, "top_p", top_p_arr, top_p, in);
  params.min_p = per_row_scalar(op, "min_p", min_p_arr, min_p, in);
  params.joint = joint;
  params.random = random_source_of(op, seed_arr, seed, offset_arr, offset, in, out.size(0));
  check_written({to, {op, "valid", valid}}, {in,
                                             {op, "indices", indices},
                                             {op, "top_k", top_k_arr},
                                             {op, "top_p", top_p_arr},
                                             {op, "min_p", min_p_arr},
                                             {op, "seed", seed_arr},
                                             {op, "offset", offset_arr}});
  if (params.source.num_outputs == 0) return;
  launch_on(in, [&](cudaStream_t stream) { return sample_rows(params, enable_pdl, stream); });
}

// Samples from logits for the function `op`.
void sample_from_logits_for(const char* op, TensorView logits, const OptionalTensor& indices,
                            const OptionalTensor& top_k_arr, int64_t top_k,
                            const OptionalTensor& top_p_arr, double top_p,
                            const OptionalTensor& min_p_arr, double min_p,
                            const OptionalTensor& temperature_arr, double temperature, bool joint,
                            const OptionalTensor& seed_arr, int64_t seed,
                            const OptionalTensor& offset_arr, int64_t offset, TensorView out,
                            const OptionalTensor& valid, bool enable_pdl) {
  const Arg in = PRECAST_ARG(op, logits);
  const Arg to = PRECAST_ARG(op, out);
  SampleParams params = {};
  set_rows(in, indices, to, params);
  set_valid(valid, to, params);
  params.logits = true;
  params.top_k_values = top_k_of(op, top_k_arr, in);
  params.top_k = clamp_top_k(top_k);
  params.top_p = per_row_scalar(op, "top_p", top_p_arr, top_p, in);
  params.min_p = per_row_scalar(op, "min_p", min_p_arr, min_p, in);
  params.temperature = per_row_scalar(op, "temperature", temperature_arr, temperature, in);
  params.joint = joint;
  params.random = random_source_of(op, seed_arr, seed, offset_arr, offset, in, out.size(0));
  check_written({to, {op, "valid", valid}}, {in,
                                             {op, "indices", indices},
                                             {op, "top_k", top_k_arr},
                                             {op, "top_p", top_p_arr},
                                             {op, "min_p", min_p_arr},
                                             {op, "temperature", temperature_arr},
                                             {op, "seed", seed_arr},
                                             {op, "offset", offset_arr}});
  if (params.source.num_outputs == 0) return;
  launch_on(in, [&](cudaStream_t stream) { return sample_rows(params, enable_pdl, stream); });
}

void sample_from_logits_export(TensorView logits, OptionalTensor indices, OptionalTensor top_k_arr,
                               int64_t top_k, OptionalTensor top_p_arr, double top_p,
                               OptionalTensor min_p_arr, double min_p,
                               OptionalTensor temperature_arr, double temperature, bool joint,
                               OptionalTensor seed_arr, int64_t seed, OptionalTensor offset_arr,
                               int64_t offset, TensorView out, OptionalTensor valid,
                               bool enable_pdl) {
  sample_from_logits_for("sampling_from_logits", logits, indices, top_k_arr, top_k, top_p_arr,
                         top_p, min_p_arr, min_p, temperature_arr, temperature, joint, seed_arr,
                         seed, offset_arr, offset, out, valid, enable_pdl);
}

// `sample` calls it if only tokens are requested.
void sample_tokens_export(TensorView logits, OptionalTensor temperature_arr, double temperature,
                          OptionalTensor top_k_arr, int64_t top_k, OptionalTensor top_p_arr,
                          double top_p, OptionalTensor min_p_arr, double min_p, bool joint,
                          OptionalTensor seed_arr, int64_t seed, OptionalTensor offset_arr,
                          int64_t offset, TensorView out, OptionalTensor valid, bool enable_pdl) {
  sample_from_logits_for("sample", logits, {}, top_k_arr, top_k, top_p_arr, top_p, min_p_arr, min_p,
                         temperature_arr, temperature, joint, seed_arr, seed, offset_arr, offset,
                         out, valid, enable_pdl);
}

// Checks the input and an output of `out_dtype`.
RowTransformParams transform_params(RowTransform transform, const Arg& in, const Arg& out,
                                    DType out_dtype) {
  check_input(in);
  check_same_device(out, in);
  check_dtype(out, out_dtype);
  check_same_shape(out, in);
  check_vocab_rows(out, true);
  RowTransformParams params = {};
  params.op = transform;
  params.source = source_of(in);
  params.out = data_of(out.tensor);
  params.out_stride = out.tensor.stride(0);
  params.aligned = rows_are_vectors(out.tensor);
  const TensorMemory memory(out);
  check_elements_apart(memory);
  if (out_dtype == sampling_dtype) {
    check_same_or_apart(memory, in);
  } else {
    check_memory_apart(memory, in);
  }
  return params;
}

void run(const RowTransformParams& params, const Arg& in, bool enable_pdl) {
  if (params.source.num_outputs == 0) return;
  launch_on(in, [&](cudaStream_t stream) { return transform_rows(params, enable_pdl, stream); });
}

void softmax_export(TensorView logits, OptionalTensor temperature_arr, double temperature,
                    TensorView out, bool enable_pdl) {
  const char* op = "softmax";
  const Arg in = PRECAST_ARG(op, logits);
  const Arg to = PRECAST_ARG(op, out);
  RowTransformParams params = transform_params(RowTransform::softmax, in, to, DType::f32);
  params.parameter = per_row_scalar(op, "temperature", temperature_arr, temperature, in);
  check_written({to}, {{op, "temperature", temperature_arr}});
  run(params, in, enable_pdl);
}

void top_p_renorm_probs_export(TensorView probs, OptionalTensor top_p_arr, double top_p,
                               TensorView out, bool enable_pdl) {
  const char* op = "top_p_renorm_probs";
  const Arg in = PRECAST_ARG(op, probs);
  const Arg to = PRECAST_ARG(op, out);
  RowTransformParams params = transform_params(RowTransform::top_p, in, to, sampling_dtype);
  params.parameter = per_row_scalar(op, "top_p", top_p_arr, top_p, in);
  check_written({to}, {{op, "top_p", top_p_arr}});
  run(params, in, enable_pdl);
}

void top_k_rows(const char* op, RowTransform which, const Arg& in, const OptionalTensor& top_k_arr,
                int64_t top_k, const Arg& out, bool enable_pdl) {
  RowTransformParams params = transform_params(which, in, out, sampling_dtype);
  params.top_k_values = top_k_of(op, top_k_arr, in);
  params.top_k = clamp_top_k(top_k);
  check_written({out}, {{op, "top_k", top_k_arr}});
  run(params, in, enable_pdl);
}

void top_k_renorm_probs_export(TensorView probs, OptionalTensor top_k_arr, int64_t top_k,
                               TensorView out, bool enable_pdl) {
  const char* op = "top_k_renorm_probs";
  top_k_rows(op, RowTransform::top_k, PRECAST_ARG(op, probs), top_k_arr, top_k,
             PRECAST_ARG(op, out), enable_pdl);
}

void top_k_mask_logits_export(TensorView logits, OptionalTensor top_k_arr, int64_t top_k,
                              TensorView out, bool enable_pdl) {
  const char* op = "top_k_mask_logits";
  top_k_rows(op, RowTransform::mask, PRECAST_ARG(op, logits), top_k_arr, top_k,
             PRECAST_ARG(op, out), enable_pdl);
}

// An int32 counter for each request, which is incremented in place.
int32_t* counter_of(const Arg& arg, const Arg& other, int64_t batch) {
  const TensorMatch match(arg);
  match.same_device(other).shape({batch}).contiguous().dtype(kInt32).elements_apart();
  return match.data<int32_t>();
}

bool positions_are_vectors(const TensorView& t) {
  const int64_t item = t.dtype().bits / 8;
  return reinterpret_cast<uint64_t>(data_of(t)) % kVecBytes == 0 &&
         t.size(2) * item % kVecBytes == 0 && t.stride(0) * item % kVecBytes == 0 &&
         t.stride(1) * item % kVecBytes == 0;
}

void chain_export(TensorView draft_probs, TensorView draft_token_ids, TensorView target_probs,
                  TensorView accepted, TensorView emitted, OptionalTensor seed_arr, int64_t seed,
                  OptionalTensor offset_arr, int64_t offset, TensorView out, bool enable_pdl) {
  const char* op = "chain_speculative_sampling";
  const Arg draft = PRECAST_ARG(op, draft_probs);
  const Arg tokens = PRECAST_ARG(op, draft_token_ids);
  const Arg target = PRECAST_ARG(op, target_probs);
  const Arg to = PRECAST_ARG(op, out);
  const Arg counts[] = {{op, "maybe_output_accepted_token_num", accepted},
                        {op, "maybe_output_emitted_draft_token_num", emitted}};
  check_cuda(draft);
  check_cuda(target);
  check_rank(target, 3, 3);
  const int64_t batch = target_probs.size(0), count = target_probs.size(1) - 1;
  const int64_t vocab = target_probs.size(2);
  PRECAST_CHECK(count >= 0 && count < 0x10000 && batch <= 0x0fffffff, ValueError)
      << target.what() << " must have at most 2^28 - 1 rows of 1 to 2^16 positions, got shape "
      << to_string(target_probs.shape());
  PRECAST_CHECK(batch == 0 || (vocab >= 1 && vocab <= kMaxVocabSize), ValueError)
      << target.what() << " must have 1 to " << kMaxVocabSize << " columns, got shape "
      << to_string(target_probs.shape());
  ChainParams params = {};
  TensorMatch(target).dtype(sampling_dtype).unit_stride();
  TensorMatch(draft).same_device(target).dtype(sampling_dtype);
  TensorMatch(draft).shape({batch, count, vocab}).unit_stride();
  TensorMatch(tokens).same_device(target).index_dtype(params.int64_tokens);
  TensorMatch(tokens).shape({batch, count}).contiguous();
  check_same_device(to, target);
  PRECAST_CHECK(check_index_dtype(to) == params.int64_tokens, ValueError)
      << to.what() << " must be " << to_string(draft_token_ids.dtype())
      << " as draft_token_ids, got " << to_string(out.dtype());
  TensorMatch(to).shape({batch, count + 1}).contiguous();
  params.accepted = counter_of(counts[0], target, batch);
  params.emitted = counter_of(counts[1], target, batch);
  params.random = random_source_of(op, seed_arr, seed, offset_arr, offset, target, batch);
  check_written({counts[0], counts[1], to},
                {draft, tokens, target, {op, "seed", seed_arr}, {op, "offset", offset_arr}});
  if (batch == 0) return;
  params.draft = data_of(draft_probs);
  params.target = data_of(target_probs);
  params.tokens = data_of(draft_token_ids);
  params.out = data_of(out);
  for (int i = 0; i < 2; ++i) {
    params.draft_strides[i] = draft_probs.stride(i);
    params.target_strides[i] = target_probs.stride(i);
  }
  params.num_draft_tokens = static_cast<int32_t>(count);
  params.source.num_outputs = static_cast<uint32_t>(batch);
  params.source.vocab_size = static_cast<int>(vocab);
  params.source.aligned = positions_are_vectors(draft_probs) && positions_are_vectors(target_probs);
  launch_on(target, [&](cudaStream_t stream) { return sample_chain(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(chain_speculative_sampling, chain_export)
PRECAST_EXPORT(softmax, softmax_export)
PRECAST_EXPORT(sample_from_probs, sample_from_probs_export)
PRECAST_EXPORT(sample_from_logits, sample_from_logits_export)
PRECAST_EXPORT(sample_tokens, sample_tokens_export)
PRECAST_EXPORT(top_k_renorm_probs, top_k_renorm_probs_export)
PRECAST_EXPORT(top_p_renorm_probs, top_p_renorm_probs_export)
PRECAST_EXPORT(top_k_mask_logits, top_k_mask_logits_export)

}  // namespace precast
