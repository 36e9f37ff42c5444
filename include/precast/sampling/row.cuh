// SPDX-License-Identifier: Apache-2.0
// The tiles of one row of probabilities or logits, as the CTAs of a cluster load and reduce them.
//
// Every sum has one fixed order, whatever the number of warps and CTAs: a lane adds its elements of
// a tile one by one, the lanes are added by butterfly shuffles, then the tiles of a chunk and the
// chunks of the row one by one. Each CTA of a cluster owns one or more of the 8 chunks.
//
// kOnChip   The row is read once and stays as fp32 in the shared memory of the cluster's CTAs. A
//           lane reads and writes only its own elements, so no pass over the row needs a barrier.
// !kOnChip  Rows that do not fit, and rows that are read little more than once, are streamed: each
//           pass reads the tiles that it needs again, from L2.
#pragma once

#include "precast/core/sm90/bulk_copy.cuh"
#include "precast/core/sm90/mbarrier.cuh"
#include "precast/sampling/weights.cuh"

namespace precast {

#if defined(__CUDACC__)

// One warp's view of the row. A CTA owns `cta_tiles` tiles from `first_tile` on; its warp w
// processes the tiles first_tile + w, first_tile + w + num_warps(), and so on.
//
// Why the loops over the elements are not unrolled further: a CTA runs for only a few microseconds,
// so fetching instructions that run once costs more than it saves.
template <typename T, bool kOnChip, typename InputTransform = NoInputTransform>
struct Row {
  const RowSource& p;
  InputTransform transform;
  const T* data;  // the first element of the row
  float*
      // the lane's first elements of the warp's first tile, or of its only buffer when streaming
      lane_smem;
  int first_tile;
  int cta_tiles;  // tiles of the CTA; there are none if it is not positive
  WeightTransform weights;

  // `smem` is the CTA's shared memory for the row (kOnChip), or for one tile of each warp.
  __device__ __forceinline__ Row(const RowSource& source, const InputTransform& input_transform,
                                 float* smem)
      : p(source), transform(input_transform), weights{} {
    const int max_cta_tiles = chunks_per_cta() * p.tiles_per_chunk;
    first_tile = cluster_rank() * max_cta_tiles;
    cta_tiles = min(max_cta_tiles, p.num_tiles - first_tile);
    lane_smem = smem + threadIdx.x / kWarpSize * kTileSize + threadIdx.x % kWarpSize * 4;
  }

  static __device__ __forceinline__ int warp_id() { return threadIdx.x / kWarpSize; }
  static __device__ __forceinline__ int num_warps() { return blockDim.x / kWarpSize; }

  // The distance in floats from one tile of the warp to its next in shared memory.
  static __device__ __forceinline__ int tile_stride() { return blockDim.x * kItemsPerLane; }

  __device__ __forceinline__ float fill_value() const {
    return weights.is_logits ? -__int_as_float(0x7f800000) : 0.0f;
  }

  static constexpr bool kUsesBulkCopy = kOnChip && kArchHasBulkCopy;

  // 16-bit elements are copied to the second half of their tile's buffer and widened to fp32 from
  // there.
  static constexpr int kStagingOffset = sizeof(T) == 4 ? 0 : kTileSize / 2;

  // The load of the row into shared memory. start_load() starts it and finish_load() waits for it,
  // on a barrier of the warp's own that must be initialised.
  __device__ __forceinline__ void start_load(uint64_t* barrier) {
    if constexpr (!kOnChip) return;
    if (kUsesBulkCopy && p.aligned) {
      if (threadIdx.x % kWarpSize == 0 && warp_id() < cta_tiles) {
        uint32_t bytes = 0;
#pragma unroll 1
        for (int i = warp_id(); i < cta_tiles; i += num_warps()) {
          bytes += tile_bytes(first_tile + i);
        }
        mbarrier_arrive_expect_tx(barrier, bytes);
        float* to = lane_smem;
#pragma unroll 1
        for (int i = warp_id(); i < cta_tiles; i += num_warps(), to += tile_stride()) {
          cp_async_bulk(to + kStagingOffset, data + (first_tile + i) * kTileSize,
                        tile_bytes(first_tile + i), barrier);
        }
      }
    } else {
      load_with_threads();
    }
  }

  __device__ __forceinline__ void finish_load(uint64_t* barrier) {
    if (!kUsesBulkCopy || !p.aligned) return;
    if (warp_id() < cta_tiles) mbarrier_wait_parity(barrier, 0);
    if constexpr (sizeof(T) == 2) widen_tiles();
    const bool is_transformed = InputTransform::kEnabled && transform.is_active();
    if (!is_transformed && (first_tile + cta_tiles) * kTileSize <= p.vocab_size) return;
    float* smem = lane_smem;
#pragma unroll 1
    for (int i = warp_id(); i < cta_tiles; i += num_warps(), smem += tile_stride()) {
      const int remaining =
          p.vocab_size - (first_tile + i) * kTileSize - threadIdx.x % kWarpSize * 4;
      if (remaining < kTileSize) {
#pragma unroll 1
        for (int j = 0; j < kItemsPerLane; ++j) {
          const int offset = j / 4 * 4 * kWarpSize + j % 4;
          if (offset >= remaining) smem[offset] = fill_value();
        }
      }
      if (is_transformed) transform_smem_tile(transform, first_tile + i, smem);
    }
  }

  __device__ __forceinline__ void widen_tiles() const {
    float* smem = lane_smem;
#pragma unroll 1
    for (int i = warp_id(); i < cta_tiles; i += num_warps(), smem += tile_stride()) {
      const float* tile = smem - threadIdx.x % kWarpSize * 4;
      const uint2* from =
          reinterpret_cast<const uint2*>(tile + kStagingOffset) + threadIdx.x % kWarpSize;
      uint2 raw[kItemsPerLane / 4];
#pragma unroll
      for (int j = 0; j < kItemsPerLane / 4; ++j) raw[j] = from[j * kWarpSize];
      __syncwarp();  // The stores below overwrite what other lanes have just read.
#pragma unroll
      for (int j = 0; j < kItemsPerLane / 4; ++j) {
        float y[4];
        unpack_vec4<T>(raw[j], y);
        *vec4_ptr(smem, j) = make_float4(y[0], y[1], y[2], y[3]);
      }
    }
  }

  // Loads the row by loads of the threads rather than by bulk copies.
  __device__ __forceinline__ void load_with_threads() {
    float* smem = lane_smem;
#pragma unroll 1
    for (int i = warp_id(); i < cta_tiles; i += num_warps(), smem += tile_stride()) {
      stage_tile(p, data, transform, first_tile + i, fill_value(), smem);
    }
  }

  // Loads the lane's elements of a tile into shared memory and transforms them. Why it is not
  // inlined: the code is long, and every pass has a call of it.
  static __device__ __noinline__ void stage_tile(const RowSource& p, const T* data,
                                                 InputTransform transform, int tile,
                                                 float fill_value, float* smem) {
    float y[kItemsPerLane];
    load_tile(data, p, tile, fill_value, y);
    if (InputTransform::kEnabled && transform.is_active()) transform(tile, y);
    store_smem(smem, y);
  }

  static __device__ __noinline__ void transform_smem_tile(InputTransform transform, int tile,
                                                          float* smem) {
    float y[kItemsPerLane];
    load_smem(smem, y);
    transform(tile, y);
    store_smem(smem, y);
  }

  __device__ __forceinline__ uint32_t tile_bytes(int tile) const {
    const int remaining = p.vocab_size - tile * kTileSize;
    return (remaining < kTileSize ? remaining : kTileSize) * sizeof(T);
  }

  static __device__ __forceinline__ float4* vec4_ptr(float* smem, int j) {
    return reinterpret_cast<float4*>(smem + j * 4 * kWarpSize);
  }

  static __device__ __forceinline__ void load_smem(float* smem, float (&y)[kItemsPerLane]) {
#pragma unroll
    for (int j = 0; j < kItemsPerLane / 4; ++j) {
      const float4 v = *vec4_ptr(smem, j);
      y[4 * j] = v.x;
      y[4 * j + 1] = v.y;
      y[4 * j + 2] = v.z;
      y[4 * j + 3] = v.w;
    }
  }

  static __device__ __forceinline__ void store_smem(float* smem, const float (&y)[kItemsPerLane]) {
#pragma unroll
    for (int j = 0; j < kItemsPerLane / 4; ++j) {
      *vec4_ptr(smem, j) = make_float4(y[4 * j], y[4 * j + 1], y[4 * j + 2], y[4 * j + 3]);
    }
  }

  // Whether a tile that is streamed goes through shared memory.
  __device__ __forceinline__ bool needs_staging(int tile) const {
    return !p.aligned || (tile + 1) * kTileSize > p.vocab_size ||
           (InputTransform::kEnabled && transform.is_active());
  }

  // Loads the lane's elements of a tile: logits before apply_softmax(), weights after it. The
  // threshold is not applied.
  __device__ __forceinline__ void load(int tile, float* smem, float (&y)[kItemsPerLane]) const {
    if constexpr (kOnChip) {
      load_smem(smem, y);
    } else {
      if (needs_staging(tile)) {
        stage_tile(p, data, transform, tile, fill_value(), lane_smem);
        load_smem(lane_smem, y);
      } else {
        load_full_tile(data, tile, y);
      }
      if (weights.is_active) {
#pragma unroll
        for (int i = 0; i < kItemsPerLane; ++i) y[i] = exp_weight(y[i], weights);
      }
    }
  }

  // Calls f(i, y) for each tile first_tile + i of the warp.
  template <typename F>
  __device__ __forceinline__ void for_each_tile(const F& f) {
    float* smem = lane_smem;
#pragma unroll 1
    for (int i = warp_id(); i < cta_tiles; i += num_warps(), smem += tile_stride()) {
      float y[kItemsPerLane];
      load(first_tile + i, smem, y);
      f(i, y);
    }
  }

  // Reduces each tile of the warp. The lane's elements go in order to add() of a copy of `initial`;
  // then finish_tile(i, accumulator, k, other, both) is called. `other` belongs to a second tile k
  // if `both`: two tiles at a time hide latency. Tiles for which needs_tile(i) is false count as
  // empty. With kApplySoftmax, logits whose row maximum is known are replaced by their weights.
  template <bool kApplySoftmax, typename Accumulator, typename NeedsTile, typename FinishTile>
  __device__ __forceinline__ void reduce_tiles(const Accumulator& initial,
                                               const NeedsTile& needs_tile,
                                               const FinishTile& finish_tile) {
    if constexpr (!kOnChip) {
#pragma unroll 1
      for (int i = warp_id(); i < cta_tiles; i += num_warps()) {
        Accumulator accumulator = initial;
        if (needs_tile(i)) {
          float y[kItemsPerLane];
          load(first_tile + i, lane_smem, y);
#pragma unroll
          for (int j = 0; j < kItemsPerLane; ++j) accumulator.add(y[j]);
        }
        finish_tile(i, accumulator, i, accumulator, false);
      }
    } else if (kApplySoftmax && weights.is_active && !weights.is_stored) {
      float* smem = lane_smem;
#pragma unroll 1
      for (int i = warp_id(); i < cta_tiles; i += num_warps(), smem += tile_stride()) {
        Accumulator accumulator = initial;
#pragma unroll 1
        for (int half = 0; half < kItemsPerLane / 4; half += 4) {
          float4 y[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) y[j] = *vec4_ptr(smem, half + j);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            y[j] = exp_weights(y[j], weights);
            *vec4_ptr(smem, half + j) = y[j];
            accumulate_vec4(accumulator, y[j]);
          }
        }
        finish_tile(i, accumulator, i, accumulator, false);
      }
      weights.is_stored = true;
    } else {
      float* smem = lane_smem;
#pragma unroll 1
      for (int i = warp_id(); i < cta_tiles; i += 2 * num_warps(), smem += 2 * tile_stride()) {
        const int k = i + num_warps();
        const bool both = k < cta_tiles, needs_one = needs_tile(i),
                   needs_other = both && needs_tile(k);
        Accumulator one = initial, other = initial;
        if (needs_one && needs_other) {
#pragma unroll 1
          for (int half = 0; half < kItemsPerLane / 4; half += 4) {
            float4 y[4], z[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              y[j] = *vec4_ptr(smem, half + j);
              z[j] = *vec4_ptr(smem + tile_stride(), half + j);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              accumulate_vec4(one, y[j]);
              accumulate_vec4(other, z[j]);
            }
          }
        } else if (needs_one || needs_other) {
          Accumulator accumulator = initial;
          reduce_smem_tile(needs_one ? smem : smem + tile_stride(), accumulator);
          (needs_one ? one : other) = accumulator;
        }
        finish_tile(i, one, k, other, both);
      }
    }
  }

  template <typename Accumulator>
  static __device__ __forceinline__ void reduce_smem_tile(float* smem, Accumulator& accumulator) {
#pragma unroll 1
    for (int half = 0; half < kItemsPerLane / 4; half += 4) {
      float4 y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = *vec4_ptr(smem, half + j);
#pragma unroll
      for (int j = 0; j < 4; ++j) accumulate_vec4(accumulator, y[j]);
    }
  }

  template <typename Accumulator>
  static __device__ __forceinline__ void accumulate_vec4(Accumulator& accumulator, float4 y) {
    accumulator.add(y.x);
    accumulator.add(y.y);
    accumulator.add(y.z);
    accumulator.add(y.w);
  }

  // Reduces the lane's elements of tile first_tile + i of the warp, after a pass over all tiles.
  template <typename Accumulator>
  __device__ __forceinline__ void reduce_tile(int i, Accumulator& accumulator) const {
    float* smem = lane_smem + (i - warp_id()) * kTileSize;
    if constexpr (kOnChip) {
      reduce_smem_tile(smem, accumulator);
    } else {
      float y[kItemsPerLane];
      load(first_tile + i, smem, y);
#pragma unroll
      for (int j = 0; j < kItemsPerLane; ++j) accumulator.add(y[j]);
    }
  }

  // Whether the warp processes tile first_tile + i.
  __device__ __forceinline__ bool owns_tile(int i) const {
    int visited = warp_id();
    while (visited < i) visited += num_warps();
    return visited == i;
  }

  // Returns the weight of the j-th element of `lane` in tile first_tile + i, or 0 if it is below
  // the threshold. reduce_tile() of the same tile must have been called before.
  __device__ __forceinline__ float weight_at(int i, int lane, int j) const {
    const int index = index_in_tile(lane, j);
    const float* tile = lane_smem - static_cast<int>(threadIdx.x % kWarpSize) * 4;
    float y;
    if constexpr (kOnChip) {
      y = tile[(i - warp_id()) * kTileSize + index];
    } else {
      if (needs_staging(first_tile + i)) {
        __syncwarp();
        y = tile[index];
      } else {
        y = load_as_float(data + (first_tile + i) * kTileSize + index);
      }
      if (weights.is_active) y = exp_weight(y, weights);
    }
    return y < weights.threshold ? 0.0f : y;
  }

  __device__ __forceinline__ void reset(bool logits) {
    weights = {logits, false, false, 0.0f, 0.0f, 0.0f};
  }

  __device__ __forceinline__ void apply_softmax(float row_max, float scale_log2) {
    weights.is_active = true;
    weights.row_max = row_max;
    weights.scale_log2 = scale_log2;
  }

  // Weights below `threshold` count as 0 from now on.
  __device__ __forceinline__ void raise_threshold(float threshold) {
    weights.threshold = fmaxf(weights.threshold, threshold);
  }
};

#endif  // __CUDACC__

}  // namespace precast
