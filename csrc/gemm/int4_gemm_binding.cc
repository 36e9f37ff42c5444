// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the products with weights of int4 for every GPU.
#include "core/ffi_export.h"
#include "gemm/w4_gemm_entries.h"

namespace precast {

// csrc/gemm/int4_gemm.cu
extern const DType int4_gemm_dtype_o;
cudaError_t int4_gemm(const W4GemmParams& params, int tile, bool enable_pdl, cudaStream_t stream);

namespace {

struct MmaKernels {
  static DType dtype_o() { return int4_gemm_dtype_o; }
  static void run(const GemmCall& call, const W4GemmParams& params) {
    run_gemm(call, params,
             [&](const GemmParams& filled, bool, int tile, bool enable_pdl, cudaStream_t stream) {
               return int4_gemm({filled, params.b_scales}, tile, enable_pdl, stream);
             });
  }
};

}  // namespace

PRECAST_EXPORT(grouped_mm_int4, W4GemmEntries<MmaKernels>::grouped_mm_int4)

}  // namespace precast
