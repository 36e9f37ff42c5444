// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of moe_activation with the kernel in CuTe DSL, which computes SwiGLU with a
// scale for each 128 columns.
#include "moe/moe_activation_call.h"

namespace precast {
namespace cute_dsl {

// python/precast/cute_dsl/moe_activation.py
extern const DType moe_activation_dtype;
extern const int moe_activation_threads;
cudaError_t moe_activation(uint32_t ctas, bool enable_pdl, cudaStream_t stream, const void* input,
                           const void* row_experts, const void* rows_end, const void* out,
                           const void* scales, int64_t input_stride, int64_t out_stride,
                           int64_t scale_stride, int64_t gate, int64_t up, int64_t reciprocal,
                           int32_t per_row, int32_t items, float eps);

}  // namespace cute_dsl

namespace {

void moe_activation_entry(TensorView input, OptionalTensor row_experts,
                          OptionalTensor expert_offsets, int64_t activation_type,
                          OptionalTensor bias, OptionalTensor swiglu_alpha,
                          OptionalTensor swiglu_beta, OptionalTensor swiglu_limit,
                          OptionalTensor scale, OptionalTensor quant_scale, bool gate_first,
                          double eps, TensorView out, OptionalTensor out_scale, bool enable_pdl) {
  moe_activation_call(
      cute_dsl::moe_activation_dtype,
      {input, row_experts, expert_offsets, activation_type, bias, swiglu_alpha, swiglu_beta,
       swiglu_limit, scale, quant_scale, gate_first, eps, out, out_scale},
      [&](const MoeActivationParams& p, ExpertOutput output, cudaStream_t stream) {
        PRECAST_CHECK(p.function == ExpertFunction::swiglu && p.bias == nullptr &&
                          p.scale == nullptr && output == ExpertOutput::scaled_codes,
                      ValueError)
            << "moe_activation: backend 'cute_dsl' computes Swiglu with out_scale, without bias "
               "and scale; pass backend='cuda'";
        const uint32_t ctas = (p.items.count - 1) / cute_dsl::moe_activation_threads + 1;
        const int32_t* rows_end = p.offsets != nullptr ? p.offsets + p.experts : nullptr;
        return cute_dsl::moe_activation(ctas, enable_pdl, stream, p.input, p.row_experts, rows_end,
                                        p.out, p.out_scale, p.input_stride, p.out_stride,
                                        p.scale_stride, p.gate, p.columns - p.gate,
                                        static_cast<int64_t>(p.items.per_row.reciprocal),
                                        static_cast<int32_t>(p.items.per_row.value),
                                        static_cast<int32_t>(p.items.count), p.eps);
      });
}

}  // namespace

PRECAST_EXPORT(moe_activation_cute_dsl, moe_activation_entry)

}  // namespace precast
