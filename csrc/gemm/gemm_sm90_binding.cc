// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the GEMM of 16-bit matrices for Hopper. They take what TMA can copy: rows
// at different addresses, and a depth that is not 0. Callers have the kernels for every GPU for the
// rest.
#include "core/ffi_export.h"
#include "gemm/gemm_entries.h"
#include "gemm/gemm_sm90_call.h"
#include "precast/gemm/sm90/gemm16_choose.cuh"

namespace precast {

// csrc/gemm/gemm_sm90.cu, csrc/gemm/gemm_sm90_swapped.cu
extern const DType gemm_sm90_dtype;
extern const DType gemm_sm90_dtype_o;
cudaError_t gemm_sm90(const GemmParams& params, bool row_major_b, const Gemm16Choice& choice,
                      int sms, bool enable_pdl, cudaStream_t stream);
cudaError_t gemm_sm90_swapped(const GemmParams& params, bool row_major_b,
                              const Gemm16Choice& choice, int sms, bool enable_pdl,
                              cudaStream_t stream);

namespace {

struct Sm90Kernels {
  static constexpr bool kTakesRowMajor = true;

  static DType dtype() { return gemm_sm90_dtype; }
  static DType dtype_o() { return gemm_sm90_dtype_o; }
  static void run(const GemmCall& call, const GemmParams& params) {
    run_gemm_sm90(call, params, Sm90Tiles<Gemm16Choice>{gemm_sm90, gemm_sm90_swapped});
  }
};
using Entries = GemmEntries<Sm90Kernels>;

}  // namespace

PRECAST_EXPORT(mm_bf16_sm90, Entries::mm_bf16)
PRECAST_EXPORT(bmm_bf16_sm90, Entries::bmm_bf16)
PRECAST_EXPORT(grouped_mm_bf16_sm90, Entries::grouped_mm_bf16)
PRECAST_EXPORT(segment_gemm_sm90, Entries::segment_gemm)

}  // namespace precast
