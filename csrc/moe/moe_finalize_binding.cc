// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of moe_finalize.
#include "moe/moe_finalize_call.h"

namespace precast {

// csrc/moe/moe_finalize.cu
extern const DType moe_finalize_dtype;
extern const DType moe_finalize_dtype_o;
cudaError_t moe_finalize(const MoeFinalizeParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void moe_finalize_entry(TensorView input, TensorView permuted_rows, OptionalTensor weights,
                        OptionalTensor row_experts, OptionalTensor scale, TensorView out,
                        OptionalTensor bias, int64_t ranks, bool enable_pdl) {
  moe_finalize_call(moe_finalize_dtype, moe_finalize_dtype_o, input, permuted_rows, weights,
                    row_experts, scale, out, bias, ranks,
                    [&](const MoeFinalizeParams& params, cudaStream_t stream) {
                      return moe_finalize(params, enable_pdl, stream);
                    });
}

}  // namespace

PRECAST_EXPORT(moe_finalize, moe_finalize_entry)

}  // namespace precast
