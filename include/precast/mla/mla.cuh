// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention (MLA) over pages of compressed keys and values, for every GPU.
//
//   out[i, h] = sum_j softmax_j(logit(i, h, j)) ckv[j]
//   logit(i, h, j) = scale * (q_nope[i, h] . ckv[j] + kpe_ratio * q_pe[i, h] . kpe[j]), or -inf if
//                    the causal mask hides j from query i
//
// Layout   q_nope, out  [tokens, heads, head_dim_ckv]      any two strides, unit stride in a row
//          q_pe         [tokens, heads, head_dim_kpe]
//          ckv          [pages, page_size, head_dim_ckv]   any two strides; f16, bf16 or e4m3
//          kpe          [pages, page_size, head_dim_kpe]
//          lse          [tokens, heads]                    base 2, or base e
// Threads  A CTA iterates over the work tiles that the plan gives it (attention/scheduler.cuh), and
//          for each over its KV blocks (mla/mainloop.cuh). A tile is 16 or 64 packed rows (token,
//          head), because all heads share a KV head (mla/tile.cuh).
// Traffic  ckv and kpe are read once for every tile: a row of ckv serves both products.
// Source   DeepSeek-V2, arXiv:2405.04434, section 2.1, with absorbed weights; Dao,
//          FlashAttention-2, arXiv:2307.08691; Ye et al., FlashInfer, arXiv:2501.01005, for packed
//          heads, page tables and split-KV.
#pragma once

#include "precast/core/launch.cuh"
#include "precast/mla/mainloop.cuh"

namespace precast {

#if defined(__CUDACC__)

// kHasScales: with ckv_scales.
template <typename Tile, typename Q, typename KV, bool kHasScales>
__global__ __launch_bounds__(Tile::kThreads,
                             Tile::kCtasPerSm) void MlaKernel(const __grid_constant__ MlaParams p) {
  extern __shared__ __align__(128) unsigned char mla_smem[];
  __shared__ MlaSharedStorage<Tile> shared;
  static_assert(sizeof shared <= Tile::kStaticBytes, "MlaSharedStorage fits");
  launch_dependent_grids();
  wait_on_dependent_grids();
  MlaMainloop<Tile, Q, KV, kHasScales>(p, mla_smem, shared).run();
}

#if !defined(__CUDACC_RTC__)

template <typename Tile, typename Q, typename KV, bool kHasScales>
cudaError_t launch_mla_kernel(const MlaParams& p, bool enable_pdl, cudaStream_t stream) {
  const auto kernel = MlaKernel<Tile, Q, KV, kHasScales>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(p.schedule.shape.ctas), dim3(Tile::kThreads), enable_pdl, stream, p,
                Tile::kSharedBytes);
}

template <typename Tile, typename Q, typename KV>
cudaError_t launch_mla_tile(const MlaParams& p, bool enable_pdl, cudaStream_t stream) {
  if constexpr (!Tile::kExists) {
    return cudaErrorInvalidValue;
  } else {
    if (p.ckv_scales == nullptr) {
      return launch_mla_kernel<Tile, Q, KV, false>(p, enable_pdl, stream);
    }
    if constexpr (Tile::kFp8) return launch_mla_kernel<Tile, Q, KV, true>(p, enable_pdl, stream);
    return cudaErrorInvalidValue;
  }
}

// Launches the kernel of tiles of kRows rows, for which the plan was made.
template <typename Q, typename KV, int kDimCkv, int kDimKpe, int kRows>
cudaError_t launch_mla(const MlaParams& p, bool enable_pdl, cudaStream_t stream) {
  MlaParams rescaled = p;
  rescaled.scale *= Fp8Rescale<KV>::kScale;
  rescaled.out_scale *= Fp8Rescale<KV>::kScale;
  return launch_mla_tile<MlaTile<sizeof(KV), kDimCkv, kDimKpe, kRows>, Q, KV>(rescaled, enable_pdl,
                                                                              stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
