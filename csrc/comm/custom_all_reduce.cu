// SPDX-License-Identifier: Apache-2.0
// The kernels of one custom_all_reduce module: PRECAST_DTYPE is f16, bf16 or f32.
#include "precast/comm/custom_all_reduce.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/comm/custom_all_reduce.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType custom_all_reduce_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t custom_all_reduce(const CustomAllReduceParams& params, int world, bool two_shot,
                              int ctas, cudaStream_t stream) {
  return launch_custom_all_reduce<PRECAST_DTYPE>(params, world, two_shot, ctas, stream);
}

}  // namespace precast
