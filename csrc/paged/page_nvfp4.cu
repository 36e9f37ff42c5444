// SPDX-License-Identifier: Apache-2.0
// The kernels of one page_nvfp4 module: PRECAST_DTYPE is f16 or bf16.
#include "precast/paged/page_nvfp4.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/paged/page_nvfp4.cu: define the type of the rows, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType page_nvfp4_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t quantize_append_nvfp4(const QuantizeAppendNvfp4Params& params, bool from_slots,
                                  bool enable_pdl, cudaStream_t stream) {
  return launch_quantize_append_nvfp4<PRECAST_DTYPE>(params, from_slots, enable_pdl, stream);
}

}  // namespace precast
