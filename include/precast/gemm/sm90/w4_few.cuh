// SPDX-License-Identifier: Apache-2.0
// GEMM with a weight of 4 bits for groups of few tokens: the same product as gemm/sm90/w4.cuh, as a
// stream of the weight through registers.
//
// Threads  A CTA computes 16 columns for up to eight tokens, then the next ones. Its warps split
//          the depth. A warp needs no other one before the sums are added up, so that a CTA has
//          the latency of one load of everything, instead of a pipeline's for each 128 of the
//          depth.
// Copies   A lane loads its words of a chunk of the depth to registers, coalesced and each from a
//          different line, and the warp copies the tokens of the chunk to its own shared memory.
//          The next tile's begin before the sums of this one are added up.
// Sums     Partial sums of the warps are added in the order of the depth.
// Traffic  The weight once for each eight tokens of a group; tokens once from L2 for each 16
//          columns.
// Source   definition
// Measured 2026-11-27 on an H200, MXFP4, gpt-oss-120b's first product (128 experts, 5888 x 2944),
//          other experts in each call: 1, 4, 8 and 16 rows 8.2, 15.8, 26.9 and 48.1 us, where a
//          read of the experts touched at 4300 GB/s takes 2.1, 8.6, 17.1 and 32.3.
#pragma once

#include "precast/core/cp_async.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/math.cuh"
#include "precast/core/mma.cuh"
#include "precast/gemm/int4_weight.cuh"
#include "precast/gemm/mxfp4_weight.cuh"
#include "precast/gemm/sm90/choose.cuh"

namespace precast {

#if defined(__CUDACC__)

constexpr int kW4FewTokens = 8;

// What a CTA computes: `count` tokens of a group from `token` on.
struct W4FewTile {
  int group, token, count;
};

// Finds the tiles of tokens of all groups, in their order. All lanes of a warp use it together.
class W4FewTiles {
  static constexpr int kPerLane = 4, kAtOnce = 32 * kPerLane;  // groups
  static constexpr uint32_t kAll = 0xffffffffu;

 public:
  __device__ __forceinline__ explicit W4FewTiles(const GemmParams& p) : p_(p) {}

  // Finds tile number `number`, which never decreases. Returns whether there is one.
  __device__ __forceinline__ bool find(int number, W4FewTile& tile) {
    while (number - before_ >= here_) {
      if (first_ + kAtOnce >= p_.groups) return false;
      first_ += kAtOnce;
      before_ += here_;
      load();
    }
    const int wanted = number - before_;
    const int source = __ffs(__ballot_sync(kAll, until_ > wanted)) - 1;
    int left = wanted - (until_ - tiles_of_lane());
    int in_lane = 0, begin = ends_[0], end = ends_[1];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      const int tiles = tiles_of(end - begin);
      if (in_lane == i - 1 && left >= tiles) {
        left -= tiles;
        in_lane = i;
        begin = ends_[i];
        end = ends_[i + 1];
      }
    }
    tile.group = first_ + source * kPerLane + __shfl_sync(kAll, in_lane, source);
    tile.token = __shfl_sync(kAll, begin + left * kW4FewTokens, source);
    tile.count = min(__shfl_sync(kAll, end, source) - tile.token, kW4FewTokens);
    return true;
  }

 private:
  static __device__ __forceinline__ int tiles_of(int tokens) {
    return ceil_div(tokens, kW4FewTokens);
  }
  __device__ __forceinline__ int tiles_of_lane() const {
    int tiles = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) tiles += tiles_of(ends_[i + 1] - ends_[i]);
    return tiles;
  }

  // Why so many groups at once: their loads do not wait for each other.
  __device__ __forceinline__ void load() {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i <= kPerLane; ++i) {
      const int group = min(first_ + lane * kPerLane + i, p_.groups);
      const int start = static_cast<const int32_t*>(p_.group_info)[group];
      ends_[i] = min(max(start, 0), p_.tokens);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) ends_[i + 1] = max(ends_[i + 1], ends_[i]);
    until_ = tiles_of_lane();
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(kAll, until_, distance);
      if (lane >= distance) until_ += before;
    }
    here_ = __shfl_sync(kAll, until_, 31);
  }

  const GemmParams& p_;
  int first_ = -kAtOnce;       // of the groups at hand
  int before_ = 0, here_ = 0;  // tiles of the groups before, and of these
  int ends_[kPerLane + 1];     // of this lane's groups, behind the begin of the first
  int until_;                  // tiles up to the end of them
};

// `kBlocks` of 128 of the depth are a chunk; `kBands` of 16 columns are a tile.
template <typename Weight_, int kWarps_, int kBlocks_, int kBands_, int kCtas_>
struct W4FewShape {
  using Weight = Weight_;
  static constexpr int kWarps = kWarps_, kBlocks = kBlocks_, kBands = kBands_, kCtas = kCtas_;
  static constexpr int kThreads = 32 * kWarps, kColumns = kBands * kW4BandColumns;
  // Rows of tokens, 16 bytes apart from where they share banks.
  static constexpr int kRowBytes = kBlocks * kW4Depth * 2 + 16;
  static constexpr int kTokenBytes = kW4FewTokens * kRowBytes;  // of a warp
  // Rows of sums of the tokens: 8 q + g differs for all lanes 4 g + q, so do their banks.
  static constexpr int kSumPitch = kColumns + 4;
  static constexpr int kSumBytes = kW4FewTokens * kSumPitch * 4;
  // Two sets of sums: so a warp may write the next ones before all have read these.
  static constexpr int kBytes = kWarps * (kTokenBytes + 2 * kSumBytes);
};

// What a warp has of a chunk of the depth.
template <typename Shape, typename Params>
class W4FewChunk {
  using Weight = typename Shape::Weight;
  using Scales = W4Scales<Weight>;
  static constexpr int kBlocks = Shape::kBlocks, kBands = Shape::kBands;
  static constexpr int kScaleWords = Scales::kWords;

 public:
  using Acc = float[kBands][4];

  // `tokens` is the shared address of the warp's tokens.
  __device__ __forceinline__ W4FewChunk(const Params& p, uint32_t tokens)
      : p_(p), depth_blocks_(p.depth / kW4Depth), tokens_(tokens) {}

  // Starts the loads of the `count` blocks from `block` on.
  __device__ __forceinline__ void load(const W4FewTile& tile, int column, int block, int count) {
    const int lane = threadIdx.x % 32;
    const int64_t band = (int64_t(tile.group) * p_.columns + column) / kW4BandColumns;
    const char* words = static_cast<const char*>(p_.b.data) +
                        (band * depth_blocks_ + block) * (2 * kW4BandBytes) + lane * 16;
    const int64_t scale_block = (int64_t(tile.group) * p_.columns + column) / kW4Columns;
    const unsigned char* scales = p_.b_scales +
                                  (scale_block * depth_blocks_ + block) * kW4ScaleBytes<Weight> +
                                  lane / 4 * 16 + column % kW4Columns / kW4BandColumns * 4;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (i >= count) break;
#pragma unroll
      for (int j = 0; j < kBands; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          words_[i][j][half] = load_once(words + int64_t(j) * depth_blocks_ * (2 * kW4BandBytes) +
                                         (2 * i + half) * kW4BandBytes);
        }
#pragma unroll
        for (int k = 0; k < kScaleWords; ++k) {
          scales_[i][j][k] = __ldg(reinterpret_cast<const uint32_t*>(
              scales + i * kW4ScaleBytes<Weight> + j * 4 + k * 128));
        }
      }
    }
    const int chunk = lane % 16;
    const char* from = static_cast<const char*>(p_.a.data) + block * (kW4Depth * 2) + chunk * 16;
#pragma unroll 1
    for (int row = lane / 16; row < tile.count; row += 2) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (i >= count) break;
        cp_async(tokens_ + row * Shape::kRowBytes + i * (kW4Depth * 2) + chunk * 16,
                 from + (tile.token + row) * p_.a.row_stride + i * (kW4Depth * 2));
      }
    }
  }

  // Adds the products of the chunk that was loaded last. Lanes of tokens that do not exist multiply
  // another one, whose sums are not written.
  __device__ __forceinline__ void multiply(int count, int tokens, Acc& acc) const {
    cp_async_wait_all();
    __syncwarp();
    const int lane = threadIdx.x % 32;
    const uint32_t row = tokens_ + min(lane % 8, tokens - 1) * Shape::kRowBytes + lane / 8 * 16;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (i >= count) break;
      float sums[2][kBands][4] = {};  // of even and odd parts: products wait less for each other
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t b[4];
        ldmatrix_x4(b, row + i * (kW4Depth * 2) + pair * 64);
#pragma unroll
        for (int j = 0; j < kBands; ++j) {
          const Scales scales(scales_[i][j]);
          const uint4& words = words_[i][j][pair / 2];
          uint32_t a[4];
          scales.unpack(pair % 2 == 0 ? words.x : words.z, pair, a);
          mma_m16n8k16<bf16>(sums[0][j], a, b[0], b[1]);
          scales.unpack(pair % 2 == 0 ? words.y : words.w, pair, a);
          mma_m16n8k16<bf16>(sums[1][j], a, b[2], b[3]);
        }
      }
#pragma unroll
      for (int j = 0; j < kBands; ++j) {
        const Scales scales(scales_[i][j]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float sum = sums[0][j][k] + sums[1][j][k];
          acc[j][k] = Scales::kScaleSums
                          ? fmaf(sum, k < 2 ? scales.low() : scales.high(), acc[j][k])
                          : acc[j][k] + sum;
        }
      }
    }
    __syncwarp();  // all lanes have read the tokens
  }

 private:
  static __device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
  }

  const Params& p_;
  const int depth_blocks_;
  const uint32_t tokens_;
  uint4 words_[kBlocks][kBands][2];
  uint32_t scales_[kBlocks][kBands][kScaleWords];
};

struct W4FewParams {
  W4GemmParams p;
  int column_units;
};

template <typename Out, typename Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kCtas) void W4FewKernel(
    const __grid_constant__ W4FewParams params) {
  extern __shared__ __align__(16) unsigned char w4_few_smem[];
  const W4GemmParams& p = params.p;
  launch_dependent_grids();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  float* const all_sums =
      reinterpret_cast<float*>(w4_few_smem + Shape::kWarps * Shape::kTokenBytes);
  constexpr int kSums = Shape::kSumBytes / 4;  // of a warp
  const int blocks = p.depth / kW4Depth;
  const int begin = warp * blocks / Shape::kWarps, end = (warp + 1) * blocks / Shape::kWarps;
  W4FewChunk<Shape, W4GemmParams> chunk(p, shared_address(w4_few_smem) + warp * Shape::kTokenBytes);
  wait_on_dependent_grids();
  W4FewTiles tiles(p);
  W4FewTile tile = {}, next = {};
  int column = 0, next_column = 0, unit = blockIdx.x, block = end, count = 0, turn = 0;
  bool has_tile = false, has_next = true;
  float acc[Shape::kBands][4] = {};
#pragma unroll 1
  do {
    if (has_tile) chunk.multiply(count, tile.count, acc);
    block += Shape::kBlocks;
    const bool is_last = block >= end;  // chunk of the tile; so it is before the first tile
    if (is_last) {
      const int number = unit / params.column_units;
      next_column = (unit - number * params.column_units) * Shape::kColumns;
      unit += gridDim.x;
      has_next = tiles.find(number, next);
      block = begin;
    }
    count = min(end - block, Shape::kBlocks);
    if (has_next) chunk.load(next, next_column, block, count);
    if (!is_last) continue;
    if (has_tile) {
      float* const sums = all_sums + turn * (Shape::kWarps * kSums);
      float* const own = sums + warp * kSums + lane % 4 * 2 * Shape::kSumPitch + lane / 4;
#pragma unroll
      for (int j = 0; j < Shape::kBands; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          own[k % 2 * Shape::kSumPitch + 16 * j + k / 2 * 8] = acc[j][k];
          acc[j][k] = 0.0f;
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < tile.count * Shape::kColumns; i += Shape::kThreads) {
        const int token = i / Shape::kColumns, in_tile = i % Shape::kColumns;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < Shape::kWarps; ++w) {
          sum += sums[w * kSums + token * Shape::kSumPitch + in_tile];
        }
        static_cast<Out*>(p.out)[(tile.token + token) * p.out_row_stride + column + in_tile] =
            from_float<Out>(sum * MmaOperands<bf16, typename Shape::Weight>::kRescale);
      }
      turn ^= 1;
    }
    tile = next;
    column = next_column;
    has_tile = has_next;
  } while (has_next);
}

#if !defined(__CUDACC_RTC__)

template <typename Out, typename Shape>
cudaError_t launch_w4_few(const W4GemmParams& p, int sms, bool enable_pdl, cudaStream_t stream) {
  W4FewParams params = {p, ceil_div(p.columns, Shape::kColumns)};
  // Each group may end a tile.
  const int64_t tiles = std::min<int64_t>(p.tokens, p.tokens / kW4FewTokens + p.groups);
  if (tiles * params.column_units > kMostGemmUnits) return cudaErrorInvalidValue;
  const int64_t ctas = std::min<int64_t>(tiles * params.column_units, int64_t(sms) * Shape::kCtas);
  const auto kernel = W4FewKernel<Out, Shape>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(ctas)), dim3(Shape::kThreads), enable_pdl,
                stream, params, Shape::kBytes);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
