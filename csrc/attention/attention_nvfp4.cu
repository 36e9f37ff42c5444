// SPDX-License-Identifier: Apache-2.0
// The kernels of one attention_nvfp4 module. Its macros are the axes of
// aot_configs/attention_nvfp4.toml.
#include "precast/attention/attention.cuh"

#if !defined(PRECAST_DTYPE_Q)
#error "csrc/attention/attention_nvfp4.cu: define PRECAST_DTYPE_Q, such as bf16"
#endif
#if !defined(PRECAST_HEAD_DIM_QK) || !defined(PRECAST_HEAD_DIM_VO)
#error "csrc/attention/attention_nvfp4.cu: define PRECAST_HEAD_DIM_QK and PRECAST_HEAD_DIM_VO"
#endif

namespace precast {

extern const DType attention_dtype_q = TypeName<PRECAST_DTYPE_Q>::value;
extern const DType attention_dtype_o = TypeName<PRECAST_DTYPE_Q>::value;
extern const int attention_head_dim_qk = PRECAST_HEAD_DIM_QK;
extern const int attention_head_dim_vo = PRECAST_HEAD_DIM_VO;

static_assert(attention_ctas_per_sm(2, kDecodeBlockM, PRECAST_HEAD_DIM_QK, PRECAST_HEAD_DIM_VO) > 0,
              "no kernel has this pair of head dimensions");

int attention_ctas_per_sm(int block_m) {
  return attention_ctas_per_sm(kKvStageBytes<Nvfp4>, block_m, PRECAST_HEAD_DIM_QK,
                               PRECAST_HEAD_DIM_VO);
}

cudaError_t attention(const AttentionParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_attention<PRECAST_DTYPE_Q, Nvfp4, PRECAST_HEAD_DIM_QK, PRECAST_HEAD_DIM_VO>(
      params, enable_pdl, stream);
}

}  // namespace precast
