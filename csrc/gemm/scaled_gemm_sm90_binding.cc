// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the GEMM of e4m3 matrices with scales of rows or of whole matrices for
// Hopper. They take what TMA can copy: rows at different addresses, and a depth that is not 0.
// Callers have the kernels for every GPU for the rest.
#include "core/ffi_export.h"
#include "gemm/gemm_sm90_call.h"
#include "gemm/scaled_gemm_entries.h"
#include "precast/gemm/sm90/scaled_choose.cuh"

namespace precast {

// csrc/gemm/scaled_gemm_sm90.cu, csrc/gemm/scaled_gemm_sm90_swapped.cu
extern const DType scaled_gemm_sm90_dtype_o;
cudaError_t scaled_gemm_sm90(const GemmParams& params, bool row_major_b,
                             const ScaledGemmChoice& choice, int sms, bool enable_pdl,
                             cudaStream_t stream);
cudaError_t scaled_gemm_sm90_swapped(const GemmParams& params, bool row_major_b,
                                     const ScaledGemmChoice& choice, int sms, bool enable_pdl,
                                     cudaStream_t stream);

namespace {

struct Sm90Kernels {
  static DType dtype_a() { return DType::e4m3; }
  static DType dtype_b() { return DType::e4m3; }
  static DType dtype_o() { return scaled_gemm_sm90_dtype_o; }
  static void run(const GemmCall& call, const GemmParams& params) {
    run_gemm_sm90(call, params,
                  Sm90Tiles<ScaledGemmChoice>{scaled_gemm_sm90, scaled_gemm_sm90_swapped});
  }
};
using Entries = ScaledGemmEntries<Sm90Kernels>;

}  // namespace

PRECAST_EXPORT(scaled_mm_sm90, Entries::scaled_mm)
PRECAST_EXPORT(bmm_fp8_sm90, Entries::bmm_fp8)
PRECAST_EXPORT(mm_fp8_sm90, Entries::mm_fp8)
PRECAST_EXPORT(grouped_mm_fp8_sm90, Entries::grouped_mm_fp8)

}  // namespace precast
