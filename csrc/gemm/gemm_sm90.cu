// SPDX-License-Identifier: Apache-2.0
// The kernels of one gemm_sm90 module whose tiles' rows are tokens. Its macros are the axes of
// aot_configs/gemm_sm90.toml.
#include "precast/gemm/sm90/gemm16.cuh"

#if !defined(PRECAST_DTYPE) || !defined(PRECAST_DTYPE_O)
#error "csrc/gemm/gemm_sm90.cu: define PRECAST_DTYPE and PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

extern const DType gemm_sm90_dtype = TypeName<PRECAST_DTYPE>::value;
extern const DType gemm_sm90_dtype_o = TypeName<PRECAST_DTYPE_O>::value;

cudaError_t gemm_sm90(const GemmParams& params, bool row_major_b, const Gemm16Choice& choice,
                      int sms, bool enable_pdl, cudaStream_t stream) {
  using Types = Gemm16Types<PRECAST_DTYPE, PRECAST_DTYPE_O>;
  return launch_plain_gemm<Types, false>(params, row_major_b, choice, sms, enable_pdl, stream);
}

}  // namespace precast
