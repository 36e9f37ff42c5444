// SPDX-License-Identifier: Apache-2.0
// GEMM of groups of bf16 tokens with a weight of 4 bits for each, for sm_90a: the layouts of
// gemm/w4_weight.cuh and gemm/gemm_params.cuh, computed by wgmma, or mma for few tokens,
// whose first operand is the weight, in registers. Groups are ranges of tokens.
//
// Threads  A CTA computes tiles until none is left. Two warps of its producer warpgroup copy the
//          operands, packed as they are; its one or two consumer warpgroups unpack 64 rows of the
//          weight each and multiply them (gemm/sm90/w4_sums.cuh).
// Traffic  Tile by tile, tokens are read from L2 once for 64 or 128 columns, and the weight once
//          for each tile of tokens, with its scales; the output is written once.
// Source   definition
// Measured 2026-11-27 on an H200, gpt-oss-120b's first product (128 experts, 5888 x 2944): 16 and
//          64 tokens, 4 experts each, 175 and 296 us, 0.78 and 0.80 of the reading of the experts
//          touched at 4300 GB/s; 8192 tokens 2200 us, 516 TFLOP/s.
#pragma once

#include "precast/gemm/sm90/plain.cuh"
#include "precast/gemm/sm90/plain_epilogue.cuh"
#include "precast/gemm/sm90/w4_few.cuh"
#include "precast/gemm/sm90/w4_sums.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename OutType>
struct W4Types {
  using Problem = W4GemmParams;
  using Operand = bf16;
  using Bias = bf16;
  using Out = OutType;
  using Family = W4Family;
  template <typename Tile, typename Barriers, typename Params>
  using TileSums = W4Sums<Tile, Barriers, Params>;
  template <typename Tile>
  using Epilogue = PlainEpilogue<W4Types, Tile>;
  static constexpr bool kHasScales = false, kHasSumsOfBlocks = false;
  static constexpr bool kIsGated = false;
};

template <typename Out>
struct W4LaunchParams : PlainLaunchParams<W4Types<Out>> {
  TensorMap scales;  // [weights, columns / 64, depth / 128 blocks]
};

// One warp copies the tokens of each stage, one the weight and its scales.
template <typename Out, typename Tile>
class W4Producer {
  using Params = W4LaunchParams<Out>;
  using Storage = PlainStorage<Tile>;

 public:
  static __device__ __forceinline__ uint32_t arrivals(const Params&) { return 2; }

  __device__ __forceinline__ W4Producer(const Params& params, Storage& shared,
                                        Sm90GemmBuffers<Tile, Storage> buffers)
      : params_(params), shared_(shared), base_(buffers.base) {}

  __device__ __forceinline__ void run(int warp) {
    if (warp == 0) {
      fill(Tile::kTokenBytes, [&](uint64_t* full, uint32_t stage, const GemmTile& tile, int block) {
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
          copy_box(stage + panel * Tile::kPanelBytes, &params_.a, full,
                   block * kW4Depth + panel * Tile::kPanelDepth, tile.token, 0);
        }
      });
    }
    if (warp == 2) {
      constexpr int kBytes = Tile::kWeightBytes + Tile::kScaleBytes;
      fill(kBytes, [&](uint64_t* full, uint32_t stage, const GemmTile& tile, int block) {
        copy_box(stage + Tile::kTokenBytes, &params_.b, full, block * (Tile::kBandBytes / 4),
                 tile.column / kW4BandColumns, tile.b_group);
        copy_box(stage + Tile::kScaleOffset, &params_.scales, full,
                 block * (kW4ScaleBytes<typename Tile::Weight> / 4), tile.column / kW4Columns,
                 tile.b_group);
      });
    }
    __syncwarp();
  }

 private:
  // Fills all stages as far as this warp does it: where one is empty, a lane announces `bytes` and
  // calls copy(full, address of the stage, tile, block of the depth), which starts the copies.
  template <typename Copy>
  __device__ __forceinline__ void fill(uint32_t bytes, const Copy& copy) {
    PipelineState<Tile::kStages> state;
    GemmScheduler<Tile, PlainLaunchParams<W4Types<Out>>> scheduler(params_);
    const DepthRange depth(params_);
    const bool is_chosen = elect_lane();
    for (GemmTile tile; scheduler.next(tile);) {
      if (is_chosen) {
#pragma unroll 1
        for (int block = depth.begin; block < depth.end; ++block) {
          shared_.stages.wait_empty(state, "an empty stage for a part of an operand");
          uint64_t* full = &shared_.stages.full[state.stage];
          mbarrier_arrive_expect_tx(full, bytes);
          copy(full, base_ + state.stage * Tile::kStageBytes, tile, block);
          state.advance();
        }
      }
      __syncwarp();
    }
  }

  const Params& params_;
  Storage& shared_;
  const uint32_t base_;
};

template <typename Out, typename Tile>
__global__ __launch_bounds__(Tile::kCtaThreads, Tile::kCtasPerSm) void W4GemmKernel(
    const __grid_constant__ W4LaunchParams<Out> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char w4_gemm_smem[];
  using Types = W4Types<Out>;
  run_gemm_cta<Tile, PlainStorage<Tile>, W4Producer<Out, Tile>, PlainConsumer<Types, Tile>,
               typename Types::template Epilogue<Tile>>(params, w4_gemm_smem);
#endif
}

#if !defined(__CUDACC_RTC__)

// The map of a part of the weight: rows of so many bytes for each 128 of the depth, of which a copy
// takes `box_rows` such pieces, one below the other. TMA counts four bytes as one number.
inline cudaError_t encode_w4(TensorMap& map, const void* data, const GemmParams& p, int piece_bytes,
                             int rows, int box_rows) {
  const uint64_t row_bytes = uint64_t(p.depth / kW4Depth) * piece_bytes;
  TensorMapShape shape;
  shape.dim(row_bytes / 4, 0, piece_bytes / 4)
      .dim(rows, row_bytes, box_rows)
      .dim(p.weights, rows * row_bytes, 1);
  shape.l2_bytes = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  shape.is_swizzled = false;
  return encode_tensor_map(map, DType::f32, data, shape);
}

template <typename Out, typename Tile>
cudaError_t launch_w4_gemm_tile(const W4GemmParams& p, const W4Choice& choice, int sms,
                                bool enable_pdl, cudaStream_t stream) {
  W4LaunchParams<Out> params = {};
  params.p = p;
  params.has_vector_rows = has_vector_rows<Out>(p);
  cudaError_t error =
      encode_gemm_matrix(params.a, DType::bf16, p.a, 1, p.tokens, p.depth, Tile::kTokens);
  if (error != cudaSuccess) return error;
  error = encode_w4(params.b, p.b.data, p, Tile::kBandBytes, p.columns / kW4BandColumns,
                    Tile::kRows / kW4BandColumns);
  if (error != cudaSuccess) return error;
  error = encode_w4(params.scales, p.b_scales, p, kW4ScaleBytes<typename Tile::Weight>,
                    p.columns / kW4Columns, Tile::kRows / kW4Columns);
  if (error != cudaSuccess) return error;
  error = plan_gemm_units<Tile>(params, choice, sms);
  if (error != cudaSuccess) return error;
  constexpr int kBytes = Sm90GemmBuffers<Tile, PlainStorage<Tile>>::kBytes;
  static_assert(kBytes <= Tile::kSharedBytes, "a CTA has this much shared memory");
  return launch_gemm_ctas<Tile>(W4GemmKernel<Out, Tile>, kBytes, enable_pdl, stream, params);
}

// Launches the product on `stream` with the tile of a choice. The problem is not empty.
template <typename Weight, typename Out, int kTile = 0>
cudaError_t launch_w4_gemm(const W4GemmParams& p, const W4Choice& choice, int sms, bool enable_pdl,
                           cudaStream_t stream) {
  if constexpr (kTile == W4Family::kTiles) {
    return cudaErrorInvalidValue;
  } else {
    if (choice.tile == kTile) {
      constexpr Sm90TileShape kShape = W4Family::tile(kTile);
      if constexpr (kTile == kW4FewTile) {
        using Shape = W4FewShape<Weight, 4, 3, kShape.rows / kW4BandColumns, kShape.ctas>;
        return launch_w4_few<Out, Shape>(p, sms, enable_pdl, stream);
      } else {
        using Tile = W4Tile<Weight, kShape.rows, kShape.columns, kShape.ctas>;
        return launch_w4_gemm_tile<Out, Tile>(p, choice, sms, enable_pdl, stream);
      }
    }
    return launch_w4_gemm<Weight, Out, kTile + 1>(p, choice, sms, enable_pdl, stream);
  }
}

#endif

#endif  // __CUDACC__

}  // namespace precast
