// SPDX-License-Identifier: Apache-2.0
// The kernels of one gemm module. Its macros are the axes of aot_configs/gemm.toml.
#include "precast/gemm/gemm.cuh"

#if !defined(PRECAST_DTYPE) || !defined(PRECAST_DTYPE_O)
#error "csrc/gemm/gemm.cu: define PRECAST_DTYPE and PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

extern const DType gemm_dtype = TypeName<PRECAST_DTYPE>::value;
extern const DType gemm_dtype_o = TypeName<PRECAST_DTYPE_O>::value;

cudaError_t gemm(const GemmParams& params, bool row_major_b, int tile, bool enable_pdl,
                 cudaStream_t stream) {
  using T = PRECAST_DTYPE;
  using Out = PRECAST_DTYPE_O;
  return row_major_b ? launch_gemm<PlainGemm<T, T, Out, true>>(params, tile, enable_pdl, stream)
                     : launch_gemm<PlainGemm<T, T, Out, false>>(params, tile, enable_pdl, stream);
}

}  // namespace precast
