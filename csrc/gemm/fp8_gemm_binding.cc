// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the block-scaled e4m3 GEMM for every GPU.
#include "core/ffi_export.h"
#include "gemm/fp8_gemm_call.h"
#include "precast/gemm/gemm_tiles.cuh"

namespace precast {

// csrc/gemm/fp8_gemm.cu
extern const DType fp8_gemm_dtype_o;
cudaError_t fp8_gemm(const Fp8GemmParams& params, int tile, bool enable_pdl, cudaStream_t stream);

namespace {

struct MmaKernels {
  static constexpr const char* kChoices = "a tile below 4";
  static_assert(kNumGemmTiles == 4, "kChoices");

  static DType dtype_o() { return fp8_gemm_dtype_o; }
  static bool has_choice(int64_t choice, TokenGroups) { return choice < kNumGemmTiles; }
  static cudaError_t launch(const Fp8GemmParams& params, int choice, int expected_tokens, int sms,
                            bool enable_pdl, cudaStream_t stream) {
    if (choice < 0) {
      const int groups = params.kind == TokenGroups::blocks ? 1 : params.groups;
      choice = choose_gemm_tile(groups, expected_tokens, params.columns, sms);
    }
    return fp8_gemm(params, choice, enable_pdl, stream);
  }
};
using Entries = Fp8GemmEntries<MmaKernels>;

}  // namespace

PRECAST_EXPORT(gemm_fp8_nt_groupwise, Entries::gemm_fp8_nt_groupwise)
PRECAST_EXPORT(group_deepgemm_fp8_nt_groupwise, Entries::group_deepgemm_fp8_nt_groupwise)
PRECAST_EXPORT(batch_deepgemm_fp8_nt_groupwise, Entries::batch_deepgemm_fp8_nt_groupwise)
PRECAST_EXPORT(group_gemm_fp8_nt_groupwise, Entries::group_gemm_fp8_nt_groupwise)

}  // namespace precast
