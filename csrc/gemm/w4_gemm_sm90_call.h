// SPDX-License-Identifier: Apache-2.0
// How the bindings of products with weights of 4 bits for Hopper launch them.
#pragma once

#include "gemm/gemm_sm90_call.h"
#include "gemm/w4_gemm_entries.h"
#include "precast/gemm/sm90/w4_tile.cuh"

namespace precast {

using LaunchW4 = cudaError_t (*)(const W4GemmParams& params, const W4Choice& choice, int sms,
                                 bool enable_pdl, cudaStream_t stream);

struct W4Tiles {
  static constexpr const char* kTactics = "a tile below 6";
  static_assert(W4Family::kTiles == 6, "kTactics");
  LaunchW4 launch_tile;
  const unsigned char* b_scales;

  static bool has_tactic(int64_t tactic, TokenGroups) { return tactic < W4Family::kTiles; }
  cudaError_t launch(const GemmParams& params, bool, int tactic, int expected_tokens, int sms,
                     bool enable_pdl, cudaStream_t stream) const {
    const W4Choice choice = tactic >= 0
                                ? W4Choice{tactic, 0, 0.0}
                                : choose_w4_gemm(params.tokens, params.columns, expected_tokens);
    return launch_tile({params, b_scales}, choice, sms, enable_pdl, stream);
  }
};

// The `Kernels` of W4GemmEntries for a module's outputs and kernels.
template <const DType& kDtypeO, LaunchW4 kLaunch>
struct W4Sm90Kernels {
  static DType dtype_o() { return kDtypeO; }
  static void run(const GemmCall& call, const W4GemmParams& params) {
    const TensorView& a = call.a.tensor;
    check_rows_differ(call.a, a.size(0), a.stride(0));
    run_gemm_by(call, params, W4Tiles{kLaunch, params.b_scales});
  }
};

}  // namespace precast
