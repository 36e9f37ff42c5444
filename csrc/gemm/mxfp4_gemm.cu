// SPDX-License-Identifier: Apache-2.0
// The kernels of one mxfp4_gemm module. Its macro is the axis of aot_configs/mxfp4_gemm.toml.
#include "precast/gemm/gemm.cuh"
#include "precast/gemm/w4_operands.cuh"

#if !defined(PRECAST_DTYPE_O)
#error "csrc/gemm/mxfp4_gemm.cu: define PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

extern const DType mxfp4_gemm_dtype_o = TypeName<PRECAST_DTYPE_O>::value;

cudaError_t mxfp4_gemm(const W4GemmParams& params, int tile, bool enable_pdl, cudaStream_t stream) {
  return launch_gemm<W4Gemm<mxfp4, PRECAST_DTYPE_O>>(params, tile, enable_pdl, stream);
}

}  // namespace precast
