// SPDX-License-Identifier: Apache-2.0
// The kernels of one int4_gemm_sm90 module. Its macro is the axis of
// aot_configs/int4_gemm_sm90.toml.
#include "precast/gemm/int4_weight.cuh"
#include "precast/gemm/sm90/w4.cuh"

#if !defined(PRECAST_DTYPE_O)
#error "csrc/gemm/int4_gemm_sm90.cu: define PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

extern const DType int4_gemm_sm90_dtype_o = TypeName<PRECAST_DTYPE_O>::value;

cudaError_t int4_gemm_sm90(const W4GemmParams& params, const W4Choice& choice, int sms,
                           bool enable_pdl, cudaStream_t stream) {
  return launch_w4_gemm<int4_pair, PRECAST_DTYPE_O>(params, choice, sms, enable_pdl, stream);
}

}  // namespace precast
