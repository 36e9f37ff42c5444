// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the GEMM of 16-bit matrices for every GPU.
#include "core/ffi_export.h"
#include "gemm/gemm_entries.h"

namespace precast {

// csrc/gemm/gemm.cu
extern const DType gemm_dtype;
extern const DType gemm_dtype_o;
cudaError_t gemm(const GemmParams& params, bool row_major_b, int tile, bool enable_pdl,
                 cudaStream_t stream);

namespace {

struct MmaKernels {
  static constexpr bool kTakesRowMajor = true;

  static DType dtype() { return gemm_dtype; }
  static DType dtype_o() { return gemm_dtype_o; }
  static void run(const GemmCall& call, const GemmParams& params) { run_gemm(call, params, gemm); }
};
using Entries = GemmEntries<MmaKernels>;

}  // namespace

PRECAST_EXPORT(mm_bf16, Entries::mm_bf16)
PRECAST_EXPORT(bmm_bf16, Entries::bmm_bf16)
PRECAST_EXPORT(grouped_mm_bf16, Entries::grouped_mm_bf16)
PRECAST_EXPORT(segment_gemm, Entries::segment_gemm)

}  // namespace precast
