// SPDX-License-Identifier: Apache-2.0
// The kernels of one scaled_gemm module. Its macros are the axes of aot_configs/scaled_gemm.toml.
#include "precast/gemm/gemm.cuh"

#if !defined(PRECAST_DTYPE_A) || !defined(PRECAST_DTYPE_B)
#error "csrc/gemm/scaled_gemm.cu: define PRECAST_DTYPE_A and PRECAST_DTYPE_B, such as e4m3"
#endif
#if !defined(PRECAST_DTYPE_O)
#error "csrc/gemm/scaled_gemm.cu: define PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

extern const DType scaled_gemm_dtype_a = TypeName<PRECAST_DTYPE_A>::value;
extern const DType scaled_gemm_dtype_b = TypeName<PRECAST_DTYPE_B>::value;
extern const DType scaled_gemm_dtype_o = TypeName<PRECAST_DTYPE_O>::value;

cudaError_t scaled_gemm(const GemmParams& params, bool, int tile, bool enable_pdl,
                        cudaStream_t stream) {
  using Gemm = PlainGemm<PRECAST_DTYPE_A, PRECAST_DTYPE_B, PRECAST_DTYPE_O>;
  return launch_gemm<Gemm>(params, tile, enable_pdl, stream);
}

}  // namespace precast
