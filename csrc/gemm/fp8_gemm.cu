// SPDX-License-Identifier: Apache-2.0
// The kernels of one fp8_gemm module. Its macro is the axis of aot_configs/fp8_gemm.toml.
#include "precast/gemm/gemm.cuh"

#if !defined(PRECAST_DTYPE_O)
#error "csrc/gemm/fp8_gemm.cu: define PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

extern const DType fp8_gemm_dtype_o = TypeName<PRECAST_DTYPE_O>::value;

cudaError_t fp8_gemm(const Fp8GemmParams& params, int tile, bool enable_pdl, cudaStream_t stream) {
  return launch_gemm<BlockScaledGemm<PRECAST_DTYPE_O>>(params, tile, enable_pdl, stream);
}

}  // namespace precast
