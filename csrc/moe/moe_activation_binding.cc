// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of moe_activation.
#include "moe/moe_activation_call.h"

namespace precast {

// csrc/moe/moe_activation.cu
extern const DType moe_activation_dtype;
cudaError_t moe_activation(const MoeActivationParams& params, ExpertOutput output, bool enable_pdl,
                           cudaStream_t stream);

namespace {

void moe_activation_entry(TensorView input, OptionalTensor row_experts,
                          OptionalTensor expert_offsets, int64_t activation_type,
                          OptionalTensor bias, OptionalTensor swiglu_alpha,
                          OptionalTensor swiglu_beta, OptionalTensor swiglu_limit,
                          OptionalTensor scale, OptionalTensor quant_scale, bool gate_first,
                          double eps, TensorView out, OptionalTensor out_scale, bool enable_pdl) {
  moe_activation_call(
      moe_activation_dtype,
      {input, row_experts, expert_offsets, activation_type, bias, swiglu_alpha, swiglu_beta,
       swiglu_limit, scale, quant_scale, gate_first, eps, out, out_scale},
      [&](const MoeActivationParams& params, ExpertOutput output, cudaStream_t stream) {
        return moe_activation(params, output, enable_pdl, stream);
      });
}

}  // namespace

PRECAST_EXPORT(moe_activation, moe_activation_entry)

}  // namespace precast
