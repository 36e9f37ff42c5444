// SPDX-License-Identifier: Apache-2.0
// The kernels of one int4_gemm module. Its macro is the axis of aot_configs/int4_gemm.toml.
#include "precast/gemm/gemm.cuh"
#include "precast/gemm/w4_operands.cuh"

#if !defined(PRECAST_DTYPE_O)
#error "csrc/gemm/int4_gemm.cu: define PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

extern const DType int4_gemm_dtype_o = TypeName<PRECAST_DTYPE_O>::value;

cudaError_t int4_gemm(const W4GemmParams& params, int tile, bool enable_pdl, cudaStream_t stream) {
  return launch_gemm<W4Gemm<int4_pair, PRECAST_DTYPE_O>>(params, tile, enable_pdl, stream);
}

}  // namespace precast
