// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of moe_finalize with the kernels in CuTe DSL.
#include "moe/moe_finalize_call.h"

namespace precast {
namespace cute_dsl {

// python/precast/cute_dsl/moe_finalize.py
extern const DType moe_finalize_dtype;
extern const DType moe_finalize_dtype_o;
extern const int moe_finalize_threads;
using MoeFinalizeKernel = cudaError_t(uint32_t ctas, bool enable_pdl, cudaStream_t stream,
                                      const void* input, const void* rows, const void* weights,
                                      const void* row_experts, const void* scale, const void* bias,
                                      const void* out, int64_t input_stride, int64_t out_stride,
                                      int64_t columns, int32_t count, int32_t topk, int32_t experts,
                                      int64_t reciprocal, int32_t per_row, int32_t items);
MoeFinalizeKernel moe_finalize, moe_finalize_of_experts;

}  // namespace cute_dsl

namespace {

void moe_finalize_entry(TensorView input, TensorView permuted_rows, OptionalTensor weights,
                        OptionalTensor row_experts, OptionalTensor scale, TensorView out,
                        OptionalTensor bias, int64_t ranks, bool enable_pdl) {
  moe_finalize_call(
      cute_dsl::moe_finalize_dtype, cute_dsl::moe_finalize_dtype_o, input, permuted_rows, weights,
      row_experts, scale, out, bias, ranks, [&](const MoeFinalizeParams& p, cudaStream_t stream) {
        const uint32_t ctas = (p.items.count - 1) / cute_dsl::moe_finalize_threads + 1;
        const bool is_plain = p.weights != nullptr && p.scale == nullptr && p.bias == nullptr;
        const auto run = is_plain ? cute_dsl::moe_finalize : cute_dsl::moe_finalize_of_experts;
        return run(ctas, enable_pdl, stream, p.input, p.slots.rows, p.weights, p.row_experts,
                   p.scale, p.bias, p.out, p.input_stride, p.out_stride, p.columns,
                   static_cast<int32_t>(p.slots.legal), p.slots.count, p.experts,
                   static_cast<int64_t>(p.items.per_row.reciprocal),
                   static_cast<int32_t>(p.items.per_row.value),
                   static_cast<int32_t>(p.items.count));
      });
}

}  // namespace

PRECAST_EXPORT(moe_finalize_cute_dsl, moe_finalize_entry)

}  // namespace precast
