// SPDX-License-Identifier: Apache-2.0
// The kernels of one attention_sm90_fp8 module. Its macros are the axes of
// aot_configs/attention_sm90_fp8.toml.
#include "precast/attention/sm90/fp8_attention.cuh"

#if !defined(PRECAST_DTYPE_O)
#error "csrc/attention/attention_sm90_fp8.cu: define PRECAST_DTYPE_O, such as bf16"
#endif
#if !defined(PRECAST_HEAD_DIM_QK) || !defined(PRECAST_HEAD_DIM_VO)
#error "csrc/attention/attention_sm90_fp8.cu: define PRECAST_HEAD_DIM_QK and PRECAST_HEAD_DIM_VO"
#endif

namespace precast {

extern const DType attention_dtype_q = DType::e4m3;
extern const DType attention_dtype_kv = DType::e4m3;
extern const DType attention_dtype_o = TypeName<PRECAST_DTYPE_O>::value;
extern const int attention_head_dim_qk = PRECAST_HEAD_DIM_QK;
extern const int attention_head_dim_vo = PRECAST_HEAD_DIM_VO;

int attention_ctas_per_sm(int block_m) {
  return block_m <= 64 * sm90_consumers(PRECAST_HEAD_DIM_VO, 1) ? 1 : 0;
}

cudaError_t attention(const AttentionParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_sm90_fp8_attention<PRECAST_DTYPE_O, PRECAST_HEAD_DIM_QK, PRECAST_HEAD_DIM_VO>(
      params, enable_pdl, stream);
}

}  // namespace precast
