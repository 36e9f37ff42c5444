// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the block-scaled e4m3 GEMM for Hopper.
#include "core/ffi_export.h"
#include "gemm/fp8_gemm_call.h"
#include "gemm/sm90_choice.h"

namespace precast {

// csrc/gemm/fp8_gemm_sm90.cu, csrc/gemm/fp8_gemm_sm90_swapped.cu
extern const DType fp8_gemm_sm90_dtype_o;
cudaError_t fp8_gemm_sm90(const Fp8GemmParams& params, const Fp8GemmChoice& choice, int sms,
                          bool enable_pdl, cudaStream_t stream);
cudaError_t fp8_gemm_sm90_swapped(const Fp8GemmParams& params, const Fp8GemmChoice& choice, int sms,
                                  bool enable_pdl, cudaStream_t stream);

namespace {

struct Sm90Kernels {
  static constexpr const char* kChoices = "a tile and cluster for this kind of tokens below 84";
  static_assert(kNumFp8Choices == 84, "kChoices");

  static DType dtype_o() { return fp8_gemm_sm90_dtype_o; }
  static bool has_choice(int64_t choice, TokenGroups kind) {
    return choice < kNumFp8Choices && is_legal(Fp8GemmChoice::of(static_cast<int>(choice)), kind);
  }
  static cudaError_t launch(const Fp8GemmParams& params, int number, int expected_tokens, int sms,
                            bool enable_pdl, cudaStream_t stream) {
    const int groups = params.kind == TokenGroups::blocks ? 1 : params.groups;
    const Fp8GemmChoice choice =
        number < 0 ? known_choice<Fp8GemmChoice>(
                         {params.kind, groups, expected_tokens, params.columns, params.depth, sms})
                   : Fp8GemmChoice::of(number);
    const auto launch = choice.shape().swapped ? fp8_gemm_sm90_swapped : fp8_gemm_sm90;
    return launch(params, choice, sms, enable_pdl, stream);
  }
};
using Entries = Fp8GemmEntries<Sm90Kernels>;

}  // namespace

PRECAST_EXPORT(gemm_fp8_nt_groupwise_sm90, Entries::gemm_fp8_nt_groupwise)
PRECAST_EXPORT(group_deepgemm_fp8_nt_groupwise_sm90, Entries::group_deepgemm_fp8_nt_groupwise)
PRECAST_EXPORT(batch_deepgemm_fp8_nt_groupwise_sm90, Entries::batch_deepgemm_fp8_nt_groupwise)
PRECAST_EXPORT(group_gemm_fp8_nt_groupwise_sm90, Entries::group_gemm_fp8_nt_groupwise)

}  // namespace precast
