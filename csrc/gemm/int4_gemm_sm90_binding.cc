// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the products with weights of int4 for Hopper. They take what TMA can
// copy: rows at different addresses. Callers have the kernels for every GPU for the rest.
#include "core/ffi_export.h"
#include "gemm/gemm_sm90_call.h"
#include "gemm/w4_gemm_entries.h"
#include "precast/gemm/sm90/w4_tile.cuh"

namespace precast {

// csrc/gemm/int4_gemm_sm90.cu
extern const DType int4_gemm_sm90_dtype_o;
cudaError_t int4_gemm_sm90(const W4GemmParams& params, const W4Choice& choice, int sms,
                           bool enable_pdl, cudaStream_t stream);

namespace {

struct W4Tiles {
  static constexpr const char* kTactics = "a tile below 5";
  static_assert(W4Family::kTiles == 5, "kTactics");
  const unsigned char* b_scales;

  static bool has_tactic(int64_t tactic, TokenGroups) { return tactic < W4Family::kTiles; }
  cudaError_t launch(const GemmParams& params, bool, int tactic, int expected_tokens, int sms,
                     bool enable_pdl, cudaStream_t stream) const {
    const W4Choice choice =
        tactic >= 0 ? W4Choice{tactic, 0, 0.0} : choose_w4_gemm(expected_tokens);
    return int4_gemm_sm90({params, b_scales}, choice, sms, enable_pdl, stream);
  }
};

struct Sm90Kernels {
  static DType dtype_o() { return int4_gemm_sm90_dtype_o; }
  static void run(const GemmCall& call, const W4GemmParams& params) {
    const TensorView& a = call.a.tensor;
    check_rows_differ(call.a, a.size(0), a.stride(0));
    run_gemm_by(call, params, W4Tiles{params.b_scales});
  }
};

}  // namespace

PRECAST_EXPORT(grouped_mm_int4_sm90, W4GemmEntries<Sm90Kernels>::grouped_mm_int4)

}  // namespace precast
