// SPDX-License-Identifier: Apache-2.0
// The kernels of one page_fp8 module: PRECAST_DTYPE is f16 or bf16, PRECAST_DTYPE_KV e4m3 or e5m2.
#include "precast/paged/page_fp8.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/paged/page_fp8.cu: define the type of the rows, -DPRECAST_DTYPE=bf16"
#endif
#if !defined(PRECAST_DTYPE_KV)
#error "csrc/paged/page_fp8.cu: define the type of the cache, -DPRECAST_DTYPE_KV=e4m3"
#endif

namespace precast {

extern const DType page_fp8_dtype = TypeName<PRECAST_DTYPE>::value;
extern const DType page_fp8_dtype_kv = TypeName<PRECAST_DTYPE_KV>::value;

cudaError_t quantize_append_paged(const QuantizeAppendPagedParams& params, bool enable_pdl,
                                  cudaStream_t stream) {
  return launch_quantize_append_paged<PRECAST_DTYPE, PRECAST_DTYPE_KV>(params, enable_pdl, stream);
}

}  // namespace precast
