// SPDX-License-Identifier: Apache-2.0
// The kernels of one mla module for narrow tiles, in a file of their own so that two cores compile
// it. Its macros are the axes of aot_configs/mla.toml.
#include "precast/mla/mla.cuh"

#if !defined(PRECAST_DTYPE_Q) || !defined(PRECAST_DTYPE_KV)
#error "csrc/mla/mla_narrow.cu: define PRECAST_DTYPE_Q and PRECAST_DTYPE_KV, such as bf16"
#endif
#if !defined(PRECAST_HEAD_DIM_CKV) || !defined(PRECAST_HEAD_DIM_KPE)
#error "csrc/mla/mla_narrow.cu: define PRECAST_HEAD_DIM_CKV and PRECAST_HEAD_DIM_KPE"
#endif

namespace precast {

cudaError_t mla_narrow(const MlaParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_mla<PRECAST_DTYPE_Q, PRECAST_DTYPE_KV, PRECAST_HEAD_DIM_CKV, PRECAST_HEAD_DIM_KPE,
                    kMlaNarrowBlockM>(params, enable_pdl, stream);
}

}  // namespace precast
