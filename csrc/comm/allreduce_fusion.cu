// SPDX-License-Identifier: Apache-2.0
// The kernels of one allreduce_fusion module: PRECAST_DTYPE is f32, f16 or bf16, PRECAST_WORLD_SIZE
// 2, 4 or 8.
#include "precast/comm/allreduce_launch.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/comm/allreduce_fusion.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif
#if !defined(PRECAST_WORLD_SIZE)
#error "csrc/comm/allreduce_fusion.cu: define the number of ranks, -DPRECAST_WORLD_SIZE=2"
#endif

namespace precast {

extern const DType allreduce_fusion_dtype = TypeName<PRECAST_DTYPE>::value;
extern const int allreduce_fusion_world = PRECAST_WORLD_SIZE;

cudaError_t load_allreduce() {
  return load_allreduce_kernels_once<PRECAST_DTYPE, PRECAST_WORLD_SIZE>();
}

cudaError_t allreduce_plain(const AllReduceParams& params, const AllReduceOptions& options,
                            cudaStream_t stream) {
  return launch_allreduce<PRECAST_DTYPE, PRECAST_WORLD_SIZE>(params, options, stream);
}

cudaError_t allreduce_norm(const AllReduceNormParams& params, const AllReduceOptions& options,
                           cudaStream_t stream) {
  return launch_allreduce_norm<PRECAST_DTYPE, PRECAST_WORLD_SIZE>(params, options, stream);
}

}  // namespace precast
