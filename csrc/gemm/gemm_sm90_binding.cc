// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the GEMM of 16-bit matrices for Hopper. They take what TMA can copy:
// column-major weights, rows at different addresses, and a depth that is not 0. Callers have the
// kernels for every GPU for the rest.
#include "core/ffi_export.h"
#include "gemm/gemm_entries.h"
#include "gemm/sm90_choice.h"
#include "precast/gemm/sm90/gemm16_choose.cuh"

namespace precast {

// csrc/gemm/gemm_sm90.cu, csrc/gemm/gemm_sm90_swapped.cu
extern const DType gemm_sm90_dtype;
extern const DType gemm_sm90_dtype_o;
cudaError_t gemm_sm90(const GemmParams& params, const Gemm16Choice& choice, int sms,
                      bool enable_pdl, cudaStream_t stream);
cudaError_t gemm_sm90_swapped(const GemmParams& params, const Gemm16Choice& choice, int sms,
                              bool enable_pdl, cudaStream_t stream);

namespace {

void check_rows_differ(const Arg& arg, int64_t rows, int64_t stride) {
  PRECAST_CHECK(rows <= 1 || stride > 0 || arg.tensor.numel() == 0, ValueError)
      << arg.what() << " must have rows at different addresses, got strides "
      << to_string(arg.tensor.strides()) << "; call .contiguous()";
}

struct Sm90Kernels {
  static constexpr bool kTakesRowMajor = false;
  static constexpr const char* kTactics = "a tile and cluster for this kind of tokens below 60";
  static_assert(Gemm16Choice::kChoices == 60, "kTactics");

  static DType dtype() { return gemm_sm90_dtype; }
  static DType dtype_o() { return gemm_sm90_dtype_o; }
  static bool has_tactic(int64_t tactic, TokenGroups kind) {
    return tactic < Gemm16Choice::kChoices &&
           is_legal(Gemm16Choice::of(static_cast<int>(tactic)), kind);
  }
  static void run(const GemmCall& call, const GemmParams& params) {
    const TensorView& a = call.a.tensor;
    PRECAST_CHECK(a.size(-1) > 0, ValueError)
        << call.a.what() << " must have columns, got shape " << to_string(a.shape());
    check_rows_differ(call.a, a.size(-2), a.stride(a.ndim() - 2));
    check_rows_differ(call.b_arg, call.columns, call.b.matrix.row_stride);
    run_gemm_by(call, params, Sm90Kernels());
  }
  static cudaError_t launch(const GemmParams& params, bool, int tactic, int expected_tokens,
                            int sms, bool enable_pdl, cudaStream_t stream) {
    if (params.weights == 0) return cudaSuccess;  // no segment has a weight
    const Gemm16Choice choice =
        tactic >= 0 ? Gemm16Choice::of(tactic)
                    : known_choice<Gemm16Choice>({params.kind, params.groups, expected_tokens,
                                                  params.columns, params.depth, sms});
    const auto launch = choice.shape().swapped ? gemm_sm90_swapped : gemm_sm90;
    return launch(params, choice, sms, enable_pdl, stream);
  }
};
using Entries = GemmEntries<Sm90Kernels>;

}  // namespace

PRECAST_EXPORT(mm_bf16_sm90, Entries::mm_bf16)
PRECAST_EXPORT(bmm_bf16_sm90, Entries::bmm_bf16)
PRECAST_EXPORT(grouped_mm_bf16_sm90, Entries::grouped_mm_bf16)
PRECAST_EXPORT(segment_gemm_sm90, Entries::segment_gemm)

}  // namespace precast
