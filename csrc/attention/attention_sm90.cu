// SPDX-License-Identifier: Apache-2.0
// The kernels of one attention_sm90 module. Its macros are the axes of
// aot_configs/attention_sm90.toml.
#include "precast/attention/sm90/attention.cuh"

#if !defined(PRECAST_DTYPE_Q) || !defined(PRECAST_DTYPE_KV)
#error "csrc/attention/attention_sm90.cu: define PRECAST_DTYPE_Q and PRECAST_DTYPE_KV, such as bf16"
#endif
#if !defined(PRECAST_HEAD_DIM_QK) || !defined(PRECAST_HEAD_DIM_VO)
#error "csrc/attention/attention_sm90.cu: define PRECAST_HEAD_DIM_QK and PRECAST_HEAD_DIM_VO"
#endif

namespace precast {

extern const DType attention_dtype_q = TypeName<PRECAST_DTYPE_Q>::value;
extern const DType attention_dtype_o = TypeName<PRECAST_DTYPE_Q>::value;
extern const DType attention_dtype_kv = TypeName<PRECAST_DTYPE_KV>::value;
extern const int attention_head_dim_qk = PRECAST_HEAD_DIM_QK;
extern const int attention_head_dim_vo = PRECAST_HEAD_DIM_VO;

int attention_ctas_per_sm(int block_m) {
  return block_m <= 64 * sm90_consumers(PRECAST_HEAD_DIM_VO, sizeof(PRECAST_DTYPE_KV)) ? 1 : 0;
}

cudaError_t attention(const AttentionParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_sm90_attention<PRECAST_DTYPE_Q, PRECAST_DTYPE_KV, PRECAST_HEAD_DIM_QK,
                               PRECAST_HEAD_DIM_VO>(params, enable_pdl, stream);
}

}  // namespace precast
