// SPDX-License-Identifier: Apache-2.0
// The kernel of one mla_sm90 module for KV blocks that threads copy or convert, in a file of its
// own so that two cores compile the module. Its macros are the axes of aot_configs/mla_sm90.toml.
#include "precast/mla/sm90/mla.cuh"

#if !defined(PRECAST_DTYPE_Q) || !defined(PRECAST_DTYPE_KV)
#error "csrc/mla/mla_sm90_threads.cu: define PRECAST_DTYPE_Q and PRECAST_DTYPE_KV, such as bf16"
#endif
#if !defined(PRECAST_HEAD_DIM_CKV) || !defined(PRECAST_HEAD_DIM_KPE)
#error "csrc/mla/mla_sm90_threads.cu: define PRECAST_HEAD_DIM_CKV and PRECAST_HEAD_DIM_KPE"
#endif

namespace precast {

cudaError_t mla_sm90_threads(const MlaParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_mla_sm90_threads<PRECAST_DTYPE_Q, PRECAST_DTYPE_KV, PRECAST_HEAD_DIM_CKV,
                                 PRECAST_HEAD_DIM_KPE>(params, enable_pdl, stream);
}

}  // namespace precast
