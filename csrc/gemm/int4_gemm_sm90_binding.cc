// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the products with weights of int4 for Hopper. They take what TMA can
// copy: rows at different addresses. Callers have the kernels for every GPU for the rest.
#include "core/ffi_export.h"
#include "gemm/w4_gemm_sm90_call.h"

namespace precast {

// csrc/gemm/int4_gemm_sm90.cu
extern const DType int4_gemm_sm90_dtype_o;
cudaError_t int4_gemm_sm90(const W4GemmParams& params, const W4Choice& choice, int sms,
                           bool enable_pdl, cudaStream_t stream);

using Int4Sm90Kernels = W4Sm90Kernels<int4_gemm_sm90_dtype_o, int4_gemm_sm90>;

PRECAST_EXPORT(grouped_mm_int4_sm90, W4GemmEntries<Int4Sm90Kernels>::grouped_mm_int4)

}  // namespace precast
