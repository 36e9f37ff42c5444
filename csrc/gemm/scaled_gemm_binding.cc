// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the GEMM of FP8 matrices with scales of rows or of whole matrices, for
// every GPU.
#include "core/ffi_export.h"
#include "gemm/scaled_gemm_entries.h"

namespace precast {

// csrc/gemm/scaled_gemm.cu
extern const DType scaled_gemm_dtype_a;
extern const DType scaled_gemm_dtype_b;
extern const DType scaled_gemm_dtype_o;
cudaError_t scaled_gemm(const GemmParams& params, bool row_major_b, int tile, bool enable_pdl,
                        cudaStream_t stream);

namespace {

struct MmaKernels {
  static DType dtype_a() { return scaled_gemm_dtype_a; }
  static DType dtype_b() { return scaled_gemm_dtype_b; }
  static DType dtype_o() { return scaled_gemm_dtype_o; }
  static void run(const GemmCall& call, const GemmParams& params) {
    run_gemm(call, params, scaled_gemm);
  }
};
using Entries = ScaledGemmEntries<MmaKernels>;

}  // namespace

PRECAST_EXPORT(scaled_mm, Entries::scaled_mm)
PRECAST_EXPORT(bmm_fp8, Entries::bmm_fp8)
PRECAST_EXPORT(mm_fp8, Entries::mm_fp8)
PRECAST_EXPORT(grouped_mm_fp8, Entries::grouped_mm_fp8)

}  // namespace precast
