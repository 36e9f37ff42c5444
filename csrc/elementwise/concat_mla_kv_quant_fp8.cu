// SPDX-License-Identifier: Apache-2.0
// The kernels of one concat_mla_kv_quant_fp8 module: PRECAST_DTYPE is f16 or bf16.
#include "precast/elementwise/concat_mla_kv_quant_fp8.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/elementwise/concat_mla_kv_quant_fp8.cu: define the input type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType concat_quant_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t concat_mla_kv_quant(const ConcatMlaKvQuantParams& params, bool enable_pdl,
                                cudaStream_t stream) {
  return launch_concat_mla_kv_quant<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
