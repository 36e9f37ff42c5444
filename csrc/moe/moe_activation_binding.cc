// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of moe_activation.
#include "moe/moe_activation_call.h"

namespace precast {

// csrc/moe/moe_activation.cu
extern const DType moe_activation_dtype;
cudaError_t moe_activation(const MoeActivationParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void moe_activation_entry(TensorView input, OptionalTensor m_indices, double eps, TensorView out,
                          TensorView out_scale, bool enable_pdl) {
  moe_activation_call(moe_activation_dtype, input, m_indices, eps, out, out_scale,
                      [&](const MoeActivationParams& params, cudaStream_t stream) {
                        return moe_activation(params, enable_pdl, stream);
                      });
}

}  // namespace

PRECAST_EXPORT(moe_activation, moe_activation_entry)

}  // namespace precast
