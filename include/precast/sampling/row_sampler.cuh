// SPDX-License-Identifier: Apache-2.0
// Sampling of one token from a row by a cluster of CTAs, and the exchange of data between the CTAs.
//
// A CTA owns one or more of the row's 8 chunks. Sums, maxima and counts are all-gathered: each CTA
// reduces its chunks and writes 8 bytes a chunk to the shared memory of every CTA, with stores that
// complete on an mbarrier of the receiver. So the cluster needs no barrier but the first. Every CTA
// samples the chunk; only the CTA that owns this chunk samples the tile and the token.
#pragma once

#include "precast/sampling/accumulators.cuh"
#include "precast/sampling/inverse_cdf.cuh"
#include "precast/sampling/sampler_storage.cuh"

namespace precast {

#if defined(__CUDACC__)

// The statistics of the chunks lie in two buffers that alternate. Every CTA takes part in each
// all-gather after a barrier of its own threads; so a CTA that has received all statistics of one
// all-gather knows that no other CTA still reads those of the previous one.
template <typename T, bool kOnChip, typename InputTransform = NoInputTransform>
struct Sampler {
  static constexpr bool kIsOnChip = kOnChip;

  SamplerStorage& s;
  float* tile_maxima;  // of all tiles of the row, if they were gathered
  float2* tile_stats;  // of the CTA's tiles
  int* tile_argmax;    // index of each tile's maximum, if the second maxima are computed
  Row<T, kOnChip, InputTransform> row;
  int ctas;
  int cta_chunks;  // chunks of the CTA
  uint32_t num_exchanges = 0;
  uint32_t num_broadcasts = 0;     // calls of broadcast_weight()
  bool has_tile_maxima = false;    // tile_stats[].y holds the maxima of the tiles, or NaN
  bool has_second_maxima = false;  // tile_stats[].x holds their second largest elements

  // The number of floats ahead of the row in the CTA's dynamic shared memory.
  static __host__ __device__ __forceinline__ int header_floats(int tiles_per_chunk,
                                                               int cta_chunks) {
    return (kNumChunks * tiles_per_chunk + 3 * cta_chunks * tiles_per_chunk + 31) / 32 * 32;
  }

  // `smem` is the CTA's dynamic shared memory.
  __device__ __forceinline__ Sampler(SamplerStorage& shared, const RowSource& source, float* smem,
                                     const InputTransform& transform = {})
      : s(shared),
        tile_maxima(smem),
        tile_stats(reinterpret_cast<float2*>(smem + kNumChunks * source.tiles_per_chunk)),
        tile_argmax(reinterpret_cast<int*>(tile_stats + chunks_per_cta() * source.tiles_per_chunk)),
        row(source, transform, smem + header_floats(source.tiles_per_chunk, chunks_per_cta())),
        ctas(cluster_size()),
        cta_chunks(chunks_per_cta()) {}

  __device__ __forceinline__ uint32_t buffer() const { return num_exchanges % 2; }
  __device__ __forceinline__ const float2* chunk_stats() const { return s.chunk_stats[buffer()]; }

  // Waits for the previous grid and starts to load the row, whose address `choose()` sets.
  template <typename F>
  __device__ __forceinline__ void begin(const F& choose) {
    if (threadIdx.x % kWarpSize == 0) {
      mbarrier_init(load_barrier());
      if (ctas > 1 && threadIdx.x == 0) {
        mbarrier_init(&s.chunk_barriers[0]);
        mbarrier_init(&s.chunk_barriers[1]);
        mbarrier_init(&s.tile_maxima_barrier);
        mbarrier_init(&s.sampled_barrier);
        mbarrier_init(&s.candidates_barrier);
      }
      fence_mbarrier_init();
    }
    __syncwarp();
    if (ctas > 1) cluster_arrive_relaxed();
    launch_dependent_grids();
    wait_on_dependent_grids();
    choose();
    row.start_load(load_barrier());
  }

  // Selects the row of an output and returns its index; the first row if the index is not one of a
  // row.
  __device__ __forceinline__ int64_t select_row(uint32_t output) {
    const int64_t requested = row_index_of(row.p, output);
    const bool row_exists = static_cast<uint64_t>(requested) < row.p.num_rows;
    // Why shared memory: a register would cost more.
    if (threadIdx.x == 0) s.row_exists = row_exists;
    const int64_t row_index = row_exists ? requested : 0;
    row.data = static_cast<const T*>(row.p.data) + row_index * row.p.stride;
    return row_index;
  }

  __device__ __forceinline__ uint64_t* load_barrier() const {
    return &s.load_barriers[row.warp_id()];
  }

  // Waits until the row has been loaded and all CTAs of the cluster have started.
  __device__ __forceinline__ void wait_for_row() {
    if (ctas > 1) cluster_wait();
    row.finish_load(load_barrier());
  }

  // All-gathers the statistics of the chunks. compute_stats() writes those of the CTA's tiles to
  // tile_stats, and `reduction` combines the tiles of a chunk.
  template <typename Reduction, typename ComputeStats>
  __device__ __forceinline__ void all_gather(const ComputeStats& compute_stats,
                                             const Reduction& reduction = {}) {
    ++num_exchanges;
    uint64_t* barrier = &s.chunk_barriers[buffer()];
    const int lane = threadIdx.x % kWarpSize;
    if (ctas > 1 && threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(barrier, kNumChunks * sizeof(float2));
    }
    compute_stats();
    __syncthreads();
#pragma unroll 1
    for (int chunk = row.warp_id(); chunk < cta_chunks; chunk += row.num_warps()) {
      const int first = chunk * row.p.tiles_per_chunk;
      const float2 sum =
          reduction.reduce(tile_stats + first, min(row.p.tiles_per_chunk, row.cta_tiles - first));
      float2* target = &s.chunk_stats[buffer()][cluster_rank() * cta_chunks + chunk];
      if (ctas == 1) {
        *target = sum;
      } else if (lane < ctas) {
        store_async(target, barrier, lane, sum);
      }
    }
    if (ctas == 1) {
      __syncthreads();
    } else {
      mbarrier_wait_parity(barrier, (num_exchanges - 1) / 2 % 2);
    }
  }

  __device__ __forceinline__ void set_tile_stats(int tile, float x, float y) {
    if (threadIdx.x % kWarpSize == 0) tile_stats[tile] = {x, y};
  }

  __device__ __forceinline__ void set_tile_stats(int tile, float x) {
    if (threadIdx.x % kWarpSize == 0) tile_stats[tile].x = x;
  }

  // Whether the weight of some element of the tile may be `threshold` or more.
  __device__ __forceinline__ bool may_reach(int tile, float threshold) const {
    if (!has_tile_maxima) return true;
    const float max = tile_stats[tile].y;
    return !((row.weights.is_active ? exp_weight(max, row.weights) : max) < threshold);
  }

  // Writes the mass of each tile to tile_stats.
  template <bool kApplySoftmax, typename Accumulator>
  __device__ __forceinline__ void compute_tile_masses(const Accumulator& initial) {
    row.template reduce_tiles<kApplySoftmax>(
        initial, [&](int i) { return may_reach(i, row.weights.threshold); },
        [&](int i, Accumulator first, int k, Accumulator second, bool both) {
          first.mass = warp_sum(first.mass);
          if (both) second.mass = warp_sum(second.mass);
          set_tile_stats(i, first.mass);
          if (both) set_tile_stats(k, second.mass);
        });
  }

  __device__ __forceinline__ void all_gather_mass() {
    all_gather<MassMaxReduction>([&] {
      if (row.weights.is_logits || row.weights.threshold > 0.0f) {
        compute_tile_masses<true>(ThresholdMassAccumulator{0.0f, row.weights.threshold});
      } else {
        compute_tile_masses<false>(MassAccumulator{0.0f});
      }
    });
  }

  // All-gathers maxima, and masses if `Accumulator` has them. With `per_tile` every CTA also gets
  // the maximum of each tile, which is possible once a kernel.
  template <typename Accumulator>
  __device__ __forceinline__ void all_gather_max(const Accumulator& initial, bool per_tile) {
    const int lane = threadIdx.x % kWarpSize;
    if (per_tile && ctas > 1 && threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(&s.tile_maxima_barrier, row.p.num_tiles * sizeof(float));
    }
    const auto reduce_tile_max = [&](int i, const Accumulator& accumulator) {
      const float max = warp_max(accumulator.max);
      if constexpr (Accumulator::kHasSecond) {
        const uint32_t ties = __ballot_sync(0xffffffffu, accumulator.max == max);
        const float second =
            warp_max(accumulator.max == max ? accumulator.second : accumulator.max);
        const int from = __ffs(ties) - 1,
                  index = __shfl_sync(0xffffffffu, accumulator.first_index, from);
        set_tile_stats(i, (ties & (ties - 1)) != 0 ? max : second, max);
        if (lane == 0) {
          tile_argmax[i] = ((row.first_tile + i) * kWarpSize + from) * kItemsPerLane + index;
        }
      } else {
        set_tile_stats(i, sizeof(Accumulator) > sizeof(float) ? warp_sum(accumulator.mass) : 0.0f,
                       max);
      }
      if (!per_tile || lane >= ctas) return;
      float* target = tile_maxima + row.first_tile + i;
      if (ctas == 1) {
        *target = max;
      } else {
        store_async(reinterpret_cast<uint32_t*>(target), &s.tile_maxima_barrier, lane,
                    __float_as_uint(max));
      }
    };
    all_gather<MassMaxReduction>([&] {
      row.template reduce_tiles<false>(
          initial, [](int) { return true; },
          [&](int i, const Accumulator& first, int k, const Accumulator& second, bool both) {
            reduce_tile_max(i, first);
            if (both) reduce_tile_max(k, second);
          });
    });
    has_second_maxima = Accumulator::kHasSecond;
    if (per_tile && ctas > 1) mbarrier_wait_parity(&s.tile_maxima_barrier, 0);
  }

  // For rows of probabilities.
  __device__ __forceinline__ void all_gather_mass_and_max(bool per_tile = false) {
    all_gather_max(MassMaxAccumulator{0.0f, -__int_as_float(0x7f800000)}, per_tile);
  }

  __device__ __forceinline__ void all_gather_max_ignoring_nan(bool per_tile) {
    all_gather_max(MaxAccumulator{-__int_as_float(0x7f800000)}, per_tile);
  }

  // Calls radix_select().
  __device__ __forceinline__ float select_threshold(uint32_t target, float max, bool by_mass,
                                                    float scale) {
    if constexpr (InputTransform::kEnabled) {
      return select_out_of_line(row, s.select, ctas, target, max, by_mass, scale, tile_maxima);
    } else {
      return radix_select(row, s.select, ctas, target, max, by_mass, scale, tile_maxima);
    }
  }

  // Why it is not inlined: kernels with an input transform select in two places.
  static __device__ __noinline__ float select_out_of_line(Row<T, kOnChip, InputTransform> row,
                                                          RadixSelectStorage& shared, int ctas,
                                                          uint32_t target, float max, bool by_mass,
                                                          float scale, const float* tile_maxima) {
    return radix_select(row, shared, ctas, target, max, by_mass, scale, tile_maxima);
  }

  // The row maximum and the total mass come from the last all-gather.
  __device__ __forceinline__ float row_max() const {
    float max = chunk_stats()[0].y;
#pragma unroll
    for (int i = 1; i < kNumChunks; ++i) max = max_or_nan(max, chunk_stats()[i].y);
    return max;
  }

  __device__ __forceinline__ float total_mass() const {
    float sum = chunk_stats()[0].x;
#pragma unroll
    for (int i = 1; i < kNumChunks; ++i) sum += chunk_stats()[i].x;
    return sum;
  }

  // Generates the random words of all draws. An all-gather must follow before they are read.
  __device__ __forceinline__ void generate_random_words(const RandomSource& random,
                                                        uint32_t output) {
    if (threadIdx.x < kMaxDraws) {
      s.random_words[threadIdx.x] = random.philox_words(output, threadIdx.x);
    }
  }

  // Samples a chunk by the gathered masses; returns its index and its mass.
  __device__ __forceinline__ SampledChunk sample_chunk(float u) const {
    const float target = u * total_mass();
    SampledChunk sampled = {-1, 0.0f};
    int last = 0;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kNumChunks; ++i) {
      const float chunk_mass = chunk_stats()[i].x;
      sum += chunk_mass;
      if (sampled.index < 0 && chunk_mass > 0.0f) {
        last = i;
        sampled.mass = chunk_mass;
      }
      if (sampled.index < 0 && sum > target) sampled.index = i;
    }
    if (sampled.index < 0) sampled.index = last;
    return sampled;
  }

  // Samples a token by the weights whose masses were gathered, with the random words of `round`.
  // The warp that holds the token gets it; all other warps get the id -1.
  __device__ __forceinline__ Token sample_token(uint32_t round) {
    const uint4& words = s.random_words[round];
    const SampledChunk sampled = sample_chunk(to_uniform(words.x));
    Token token = {-1, 0.0f, is_valid_mass(total_mass())};
    const int chunk = sampled.index - cluster_rank() * cta_chunks;
    if (chunk < 0 || chunk >= cta_chunks) return token;
    const int first = chunk * row.p.tiles_per_chunk;
    const int tile =
        first + sample_tile(tile_stats + first, min(row.p.tiles_per_chunk, row.cta_tiles - first),
                            sampled.mass, to_uniform(words.y));
    if (!row.owns_tile(tile)) return token;
    ThresholdMassAccumulator accumulator = {0.0f, row.weights.threshold};
    row.reduce_tile(tile, accumulator);
    const SampledItem item =
        sample_item(row, tile, accumulator.mass, to_uniform(words.z), to_uniform(words.w));
    token.id = (row.first_tile + tile) * kTileSize + item.index;
    token.weight = item.weight;
    return token;
  }

  // Returns the first element that equals `max`, which must be the gathered maximum, with weight 1.
  // If `max` is NaN or infinite, the token is not valid.
  __device__ __forceinline__ Token first_argmax(float max) const {
    Token token = {-1, 1.0f, fabsf(max) < __int_as_float(0x7f800000)};
    int chunk = 0;
    while (token.valid && chunk < kNumChunks - 1 && !(chunk_stats()[chunk].y == max)) ++chunk;
    chunk -= cluster_rank() * cta_chunks;
    if (chunk < 0 || chunk >= cta_chunks) return token;
    int tile = chunk * row.p.tiles_per_chunk;
    while (token.valid && tile < row.cta_tiles - 1 && !(tile_stats[tile].y == max)) ++tile;
    if (!row.owns_tile(tile)) return token;
    FirstMatchAccumulator first = {max, 0, kItemsPerLane};
    row.reduce_tile(tile, first);
    const int lane = threadIdx.x % kWarpSize;
    const int index =
        first.first_index < kItemsPerLane ? index_in_tile(lane, first.first_index) : kTileSize - 1;
    token.id = (row.first_tile + tile) * kTileSize + __reduce_min_sync(0xffffffffu, index);
    return token;
  }

  // Gives the sampled token's weight to all threads of the cluster.
  __device__ __forceinline__ float broadcast_weight(const Token& token) {
    const int lane = threadIdx.x % kWarpSize;
    if (ctas > 1 && threadIdx.x == 0) mbarrier_arrive_expect_tx(&s.sampled_barrier, sizeof(float2));
    if (token.id >= 0) {
      const float2 value = {token.weight, 0.0f};
      if (ctas == 1) {
        s.sampled = value;
      } else if (lane < ctas) {
        store_async(&s.sampled, &s.sampled_barrier, lane, value);
      }
    }
    if (ctas == 1) {
      __syncthreads();
    } else {
      mbarrier_wait_parity(&s.sampled_barrier, num_broadcasts++ % 2);
    }
    return s.sampled.x;
  }

  // Returns the exact mass of the elements at or above the threshold in the unit of
  // to_fixed_point(). It replaces the gathered masses.
  __device__ __forceinline__ uint32_t fixed_point_total(float scale) {
    all_gather<CountReduction>([&] {
      row.template reduce_tiles<false>(
          FixedPointMassAccumulator{row.weights.threshold, scale, 0},
          [&](int i) { return may_reach(i, row.weights.threshold); },
          [&](int i, FixedPointMassAccumulator first, int k, FixedPointMassAccumulator second,
              bool both) {
            set_tile_stats(i, __uint_as_float(__reduce_add_sync(0xffffffffu, first.mass)));
            if (both) {
              set_tile_stats(k, __uint_as_float(__reduce_add_sync(0xffffffffu, second.mass)));
            }
          });
    });
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kNumChunks; ++i) sum += __float_as_uint(chunk_stats()[i].x);
    return sum;
  }
};

#endif  // __CUDACC__

}  // namespace precast
