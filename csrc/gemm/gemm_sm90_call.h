// SPDX-License-Identifier: Apache-2.0
// How the bindings of GEMMs for Hopper without scales of blocks launch them.
#pragma once

#include "gemm/gemm_call.h"
#include "gemm/sm90_choice.h"

namespace precast {

inline void check_rows_differ(const Arg& arg, int64_t rows, int64_t stride) {
  PRECAST_CHECK(rows <= 1 || stride > 0 || arg.tensor.numel() == 0, ValueError)
      << arg.what() << " must have rows at different addresses, got strides "
      << to_string(arg.tensor.strides()) << "; call .contiguous()";
}

// The kernels whose tiles' rows are tokens, and the swapped ones.
template <typename Choice, typename Params = GemmParams>
struct Sm90Tiles {
  using Launch = cudaError_t (*)(const Params& params, bool row_major_b, const Choice& choice,
                                 int sms, bool enable_pdl, cudaStream_t stream);
  static constexpr const char* kTactics = "a tile and cluster for this kind of tokens below 96";
  static_assert(Choice::kChoices == 96, "kTactics");
  Launch tokens_are_rows, swapped;
  int rows_of_column = 1;  // of the weight

  static bool has_tactic(int64_t tactic, TokenGroups kind) {
    return tactic < Choice::kChoices && is_legal(Choice::of(static_cast<int>(tactic)), kind);
  }
  cudaError_t launch(const Params& params, bool row_major_b, int tactic, int expected_tokens,
                     int sms, bool enable_pdl, cudaStream_t stream) const {
    if (params.weights == 0) return cudaSuccess;  // no segment has a weight
    const Choice choice =
        tactic >= 0 ? Choice::of(tactic)
                    : known_choice<Choice>({params.kind, params.groups, expected_tokens,
                                            rows_of_column * params.columns, params.depth, sms});
    return (choice.shape().swapped ? swapped : tokens_are_rows)(params, row_major_b, choice, sms,
                                                                enable_pdl, stream);
  }
};

// Checks also what TMA needs: rows at different addresses, and a depth that is not 0.
template <typename Choice, typename Params>
void run_gemm_sm90(const GemmCall& call, const Params& params,
                   const Sm90Tiles<Choice, Params>& kernels) {
  const TensorView& a = call.a.tensor;
  PRECAST_CHECK(a.size(-1) > 0, ValueError)
      << call.a.what() << " must have columns, got shape " << to_string(a.shape());
  check_rows_differ(call.a, a.size(-2), a.stride(a.ndim() - 2));
  check_rows_differ(call.b_arg, call.b.row_major ? a.size(-1) : call.columns,
                    call.b.matrix.row_stride);
  run_gemm_by(call, params, kernels);
}

}  // namespace precast
