// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of moe_activation with the kernel in CuTe DSL.
#include "moe/moe_activation_call.h"

namespace precast {
namespace cute_dsl {

// python/precast/cute_dsl/moe_activation.py
extern const DType moe_activation_dtype;
extern const int moe_activation_threads;
cudaError_t moe_activation(uint32_t ctas, bool enable_pdl, cudaStream_t stream, const void* input,
                           const void* m_indices, const void* out, const void* scales,
                           int64_t input_stride, int64_t out_stride, int64_t scale_stride,
                           int32_t columns, int64_t reciprocal, int32_t per_row, int32_t items,
                           float eps);

}  // namespace cute_dsl

namespace {

void moe_activation_entry(TensorView input, OptionalTensor m_indices, double eps, TensorView out,
                          TensorView out_scale, bool enable_pdl) {
  moe_activation_call(
      cute_dsl::moe_activation_dtype, input, m_indices, eps, out, out_scale,
      [&](const MoeActivationParams& p, cudaStream_t stream) {
        const uint32_t ctas = (p.items.count - 1) / cute_dsl::moe_activation_threads + 1;
        return cute_dsl::moe_activation(ctas, enable_pdl, stream, p.input, p.m_indices, p.out,
                                        p.scales, p.input_stride, p.out_stride, p.scale_stride,
                                        static_cast<int32_t>(p.columns),
                                        static_cast<int64_t>(p.items.per_row.reciprocal),
                                        static_cast<int32_t>(p.items.per_row.value),
                                        static_cast<int32_t>(p.items.count), p.eps);
      });
}

}  // namespace

PRECAST_EXPORT(moe_activation_cute_dsl, moe_activation_entry)

}  // namespace precast
