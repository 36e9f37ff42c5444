// SPDX-License-Identifier: Apache-2.0
// The kernel of one mla_sm90 module for KV blocks that TMA copies, and the choice between it and
// that of csrc/mla/mla_sm90_threads.cu. Its macros are the axes of aot_configs/mla_sm90.toml.
#include "precast/mla/sm90/mla.cuh"

#if !defined(PRECAST_DTYPE_Q) || !defined(PRECAST_DTYPE_KV)
#error "csrc/mla/mla_sm90.cu: define PRECAST_DTYPE_Q and PRECAST_DTYPE_KV, such as bf16"
#endif
#if !defined(PRECAST_HEAD_DIM_CKV) || !defined(PRECAST_HEAD_DIM_KPE)
#error "csrc/mla/mla_sm90.cu: define PRECAST_HEAD_DIM_CKV and PRECAST_HEAD_DIM_KPE"
#endif

namespace precast {

extern const DType attention_dtype_q = TypeName<PRECAST_DTYPE_Q>::value;
extern const DType attention_dtype_o = TypeName<PRECAST_DTYPE_Q>::value;
extern const DType mla_dtype_kv = TypeName<PRECAST_DTYPE_KV>::value;
extern const int attention_head_dim_qk = PRECAST_HEAD_DIM_CKV + PRECAST_HEAD_DIM_KPE;
extern const int attention_head_dim_vo = PRECAST_HEAD_DIM_CKV;

static_assert(sizeof(PRECAST_DTYPE_KV) == 1 ||
                  TypeName<PRECAST_DTYPE_KV>::value == TypeName<PRECAST_DTYPE_Q>::value,
              "caches of 16 bits are of the queries' type");

int attention_ctas_per_sm(int block_m) { return block_m == kMlaSm90BlockM ? 1 : 0; }

// csrc/mla/mla_sm90_threads.cu
cudaError_t mla_sm90_threads(const MlaParams& params, bool enable_pdl, cudaStream_t stream);

cudaError_t mla(const MlaParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_mla_sm90<PRECAST_DTYPE_Q, PRECAST_DTYPE_KV, PRECAST_HEAD_DIM_CKV,
                         PRECAST_HEAD_DIM_KPE>(params, enable_pdl, stream, mla_sm90_threads);
}

}  // namespace precast
