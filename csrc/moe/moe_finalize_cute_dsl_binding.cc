// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of moe_finalize with the kernel in CuTe DSL.
#include "moe/moe_finalize_call.h"

namespace precast {
namespace cute_dsl {

// python/precast/cute_dsl/moe_finalize.py
extern const DType moe_finalize_dtype;
extern const int moe_finalize_threads;
cudaError_t moe_finalize(uint32_t ctas, bool enable_pdl, cudaStream_t stream, const void* rows,
                         const void* indices, const void* weights, const void* out,
                         int64_t row_stride, int64_t out_stride, int32_t count, int32_t topk,
                         int64_t reciprocal, int32_t per_row, int32_t items);

}  // namespace cute_dsl

namespace {

void moe_finalize_entry(TensorView input, TensorView indices, TensorView weights, TensorView out,
                        bool enable_pdl) {
  moe_finalize_call(
      cute_dsl::moe_finalize_dtype, input, indices, weights, out,
      [&](const MoeFinalizeParams& p, cudaStream_t stream) {
        const uint32_t ctas = (p.items.count - 1) / cute_dsl::moe_finalize_threads + 1;
        return cute_dsl::moe_finalize(ctas, enable_pdl, stream, p.rows, p.indices, p.weights, p.out,
                                      p.row_stride, p.out_stride, static_cast<int32_t>(p.count),
                                      p.topk, static_cast<int64_t>(p.items.per_row.reciprocal),
                                      static_cast<int32_t>(p.items.per_row.value),
                                      static_cast<int32_t>(p.items.count));
      });
}

}  // namespace

PRECAST_EXPORT(moe_finalize_cute_dsl, moe_finalize_entry)

}  // namespace precast
