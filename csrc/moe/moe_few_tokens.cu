// SPDX-License-Identifier: Apache-2.0
// The kernels of one moe_few_tokens module: PRECAST_DTYPE is f16 or bf16, PRECAST_DTYPE_WEIGHTS the
// same or e4m3.
#include <type_traits>

#include "precast/moe/few_tokens_down.cuh"
#include "precast/moe/few_tokens_up.cuh"
#include "precast/moe/sm90/few_tokens_down.cuh"
#include "precast/moe/sm90/few_tokens_up.cuh"

#if !defined(PRECAST_DTYPE) || !defined(PRECAST_DTYPE_WEIGHTS)
#error \
    "csrc/moe/moe_few_tokens.cu: define both types, -DPRECAST_DTYPE=bf16 -DPRECAST_DTYPE_WEIGHTS=e4m3"
#endif

namespace precast {

extern const DType moe_few_tokens_dtype = TypeName<PRECAST_DTYPE>::value;
extern const DType moe_few_tokens_dtype_weights = TypeName<PRECAST_DTYPE_WEIGHTS>::value;

namespace {

template <typename T, typename W>
cudaError_t launch_few_tokens(const MoeFewTokensParams& params, bool enable_pdl,
                              cudaStream_t stream) {
  if constexpr (PRECAST_SM == 90 && std::is_same<W, e4m3>::value) {
    const cudaError_t error = launch_moe_few_tokens_up_sm90<T>(params, enable_pdl, stream);
    if (error != cudaSuccess) return error;
    return launch_moe_few_tokens_down_sm90<T>(params, enable_pdl, stream);
  } else {
    const cudaError_t error = launch_moe_few_tokens_up<T, W>(params, enable_pdl, stream);
    if (error != cudaSuccess) return error;
    return launch_moe_few_tokens_down<T, W>(params, enable_pdl, stream);
  }
}

}  // namespace

cudaError_t moe_few_tokens(const MoeFewTokensParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_few_tokens<PRECAST_DTYPE, PRECAST_DTYPE_WEIGHTS>(params, enable_pdl, stream);
}

}  // namespace precast
