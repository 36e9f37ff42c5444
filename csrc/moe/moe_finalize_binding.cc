// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of moe_finalize.
#include "moe/moe_finalize_call.h"

namespace precast {

// csrc/moe/moe_finalize.cu
extern const DType moe_finalize_dtype;
cudaError_t moe_finalize(const MoeFinalizeParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void moe_finalize_entry(TensorView input, TensorView indices, TensorView weights, TensorView out,
                        bool enable_pdl) {
  moe_finalize_call(moe_finalize_dtype, input, indices, weights, out,
                    [&](const MoeFinalizeParams& params, cudaStream_t stream) {
                      return moe_finalize(params, enable_pdl, stream);
                    });
}

}  // namespace

PRECAST_EXPORT(moe_finalize, moe_finalize_entry)

}  // namespace precast
