// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of silu(gate) * up with quantisation.
#include "core/ffi_export.h"
#include "quantize/quant_checks.h"

namespace precast {
namespace {

void silu_and_mul_quant(TensorView input, TensorView scale, TensorView out, bool enable_pdl) {
  const char* op = "silu_and_mul_quant";
  static_quant_entry(PRECAST_ARG(op, input), PRECAST_ARG(op, scale), PRECAST_ARG(op, out), true,
                     enable_pdl);
}

void silu_and_mul_per_token_quant(TensorView input, double eps, TensorView out,
                                  TensorView out_scale, bool enable_pdl) {
  const char* op = "silu_and_mul_per_token_quant";
  token_quant_entry(PRECAST_ARG(op, input), eps, PRECAST_ARG(op, out), PRECAST_ARG(op, out_scale),
                    true, enable_pdl);
}

void silu_and_mul_per_token_group_quant(TensorView input, int64_t group_size, double eps,
                                        bool scale_ue8m0, TensorView out, TensorView out_scale,
                                        bool enable_pdl) {
  const char* op = "silu_and_mul_per_token_group_quant";
  group_quant_entry(PRECAST_ARG(op, input), group_size, eps, scale_ue8m0, PRECAST_ARG(op, out),
                    PRECAST_ARG(op, out_scale), true, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(silu_and_mul_quant, silu_and_mul_quant)
PRECAST_EXPORT(silu_and_mul_per_token_quant, silu_and_mul_per_token_quant)
PRECAST_EXPORT(silu_and_mul_per_token_group_quant, silu_and_mul_per_token_group_quant)

}  // namespace precast
