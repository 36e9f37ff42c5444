// SPDX-License-Identifier: Apache-2.0
// The kernels of one mla module for wide tiles, and the choice of the tile. Its macros are the axes
// of aot_configs/mla.toml.
#include "precast/mla/mla.cuh"

#if !defined(PRECAST_DTYPE_Q) || !defined(PRECAST_DTYPE_KV)
#error "csrc/mla/mla.cu: define PRECAST_DTYPE_Q and PRECAST_DTYPE_KV, such as bf16"
#endif
#if !defined(PRECAST_HEAD_DIM_CKV) || !defined(PRECAST_HEAD_DIM_KPE)
#error "csrc/mla/mla.cu: define PRECAST_HEAD_DIM_CKV and PRECAST_HEAD_DIM_KPE"
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

int attention_ctas_per_sm(int block_m) {
  return mla_ctas_per_sm(sizeof(PRECAST_DTYPE_KV), block_m, PRECAST_HEAD_DIM_CKV,
                         PRECAST_HEAD_DIM_KPE);
}

// csrc/mla/mla_narrow.cu
cudaError_t mla_narrow(const MlaParams& params, bool enable_pdl, cudaStream_t stream);

cudaError_t mla(const MlaParams& params, bool enable_pdl, cudaStream_t stream) {
  if (params.schedule.shape.ctas == 0) return cudaSuccess;
  switch (params.schedule.shape.block_m) {
    case kMlaNarrowBlockM:
      return mla_narrow(params, enable_pdl, stream);
    case kMlaWideBlockM:
      return launch_mla<PRECAST_DTYPE_Q, PRECAST_DTYPE_KV, PRECAST_HEAD_DIM_CKV,
                        PRECAST_HEAD_DIM_KPE, kMlaWideBlockM>(params, enable_pdl, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace precast
