// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of group_gemm_fp8_nt_groupwise with the kernels in CuTe DSL.
#include "core/ffi_export.h"
#include "gemm/fp8_gemm_call.h"
#include "gemm/group_gemm_fp8_maps.h"

namespace precast {
namespace cute_dsl {

// python/precast/cute_dsl/group_gemm_fp8.py
extern const DType group_gemm_fp8_of_1_dtype_o;
using GroupGemmKernel = cudaError_t(uint32_t ctas, bool enable_pdl, cudaStream_t stream,
                                    const TensorMap& a, const TensorMap& b, const void* m_indptr,
                                    const void* a_scale, const void* b_scale, const void* out,
                                    int64_t a_scale_row, int64_t a_scale_depth,
                                    int64_t b_scale_group, int64_t b_scale_column,
                                    int64_t b_scale_depth, int64_t out_stride, int32_t tokens,
                                    int32_t columns, int32_t blocks, int32_t groups);
GroupGemmKernel group_gemm_fp8_of_1, group_gemm_fp8_of_2;

}  // namespace cute_dsl

namespace {

struct CuteKernels {
  static constexpr const char* kChoices = "0 for clusters of one CTA or 1 for clusters of two";

  static DType dtype_o() { return cute_dsl::group_gemm_fp8_of_1_dtype_o; }
  static bool has_choice(int64_t choice, TokenGroups) { return choice < 2; }
  static cudaError_t launch(const Fp8GemmParams& p, int choice, int expected_tokens, int sms,
                            bool enable_pdl, cudaStream_t stream) {
    PRECAST_CHECK(!p.a_scale.packed, ValueError)
        << "group_gemm_fp8_nt_groupwise: a_scale must be float32 with backend='cute_dsl', got "
           "int32; pass backend='trtllm'";
    const int column_blocks = ceil_div(p.columns, kFp8Block);
    // On an H200 two CTAs that share tokens are faster where a group has one tile of them.
    const bool shares_tokens = expected_tokens <= kFp8Block && column_blocks > 1;
    const int cluster = choice >= 0 ? choice + 1 : shares_tokens ? 2 : 1;
    GroupGemmMaps maps;
    const cudaError_t status = encode_group_gemm_maps(maps, p, cluster);
    if (status != cudaSuccess) return status;
    // Each group may have a tile that is not full.
    const int64_t tiles =
        (int64_t(p.tokens) / kFp8Block + p.groups) * ceil_div(column_blocks, cluster);
    const int64_t clusters = std::min<int64_t>(tiles, std::max(sms / cluster, 1));
    const auto run = cluster == 1 ? cute_dsl::group_gemm_fp8_of_1 : cute_dsl::group_gemm_fp8_of_2;
    return run(static_cast<uint32_t>(clusters * cluster), enable_pdl, stream, maps.a, maps.b,
               p.group_info, p.a_scale.data, p.b_scale.data, p.out, p.a_scale.block_stride,
               p.a_scale.depth_stride, p.b_scale.group_stride, p.b_scale.block_stride,
               p.b_scale.depth_stride, p.out_row_stride, p.tokens, p.columns,
               ceil_div(p.depth, kFp8Block), p.groups);
  }
};

}  // namespace

PRECAST_EXPORT(group_gemm_fp8_nt_groupwise_cute_dsl,
               Fp8GemmEntries<CuteKernels>::group_gemm_fp8_nt_groupwise)

}  // namespace precast
