// SPDX-License-Identifier: Apache-2.0
// How the splits of a tile are added up, in their order (attention/combine.cuh says by which CTAs):
//
//   row_max = max of the splits'    row_sum = sum of row_sum * 2^(its row_max - row_max)
//   out     = sum of acc_o * 2^(its row_max - row_max), as attention/epilogue.cuh writes it
//
// Threads  Each has groups of four columns, whose splits it loads in batches. Or four lanes of a
//          warp share a group; or a warp has whole rows of 128 columns or more.
#pragma once

#include "precast/attention/epilogue.cuh"

namespace precast {

#if defined(__CUDACC__)

// Combines all splits of kItems groups of four columns: of the groups `first`,
// `first` + kThreads,
// ..., of which there are `count`, row by row. Why several: each waits for
// loads, and where a tile has few splits, a group has few of them.
template <typename Tile, typename Q, int kItems = 1>
__device__ __forceinline__ void combine_columns(const AttentionParams& p, const BlockInfo& block,
                                                int first, int count) {
  constexpr int kColumns = Tile::kDimV / 4;
  constexpr int kBatch = Tile::kCombineBatch / kItems;
  const int32_t num_splits = block.work.num_splits;
  // Offsets in units of 16 bytes. Split 0 does not fit the step of the other
  // splits.
  constexpr uint32_t kPartial = kPartialFloats<Tile> / 4;
  const uint32_t first_split = block.work.partial(0) * kPartial,
                 step = block.work.partial_step * kPartial;
  uint32_t next = block.work.partial(1) * kPartial - step;
  const PartialResult base = PartialResult::at<Tile>(p.partials);
  const auto row_of = [&](int item) { return (first + item * Tile::kThreads) / kColumns; };
  const auto column_of = [&](int item) { return (first + item * Tile::kThreads) % kColumns * 4; };
  CombinedColumns combined[kItems];
  for (int32_t begin = 0; begin < num_splits; begin += kBatch) {
    float4 acc_o[kItems][kBatch];
    float2 row_stats[kItems][kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint64_t bytes = uint64_t(begin + j == 0 ? first_split : next) * 16;
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const bool exists = begin + j < num_splits && first + item * Tile::kThreads < count;
        const int row = row_of(item);
        const char* const from_o = reinterpret_cast<const char*>(
            base.acc_o + PartialResult::offset<Tile>(row, column_of(item)));
        const char* const from_stats = reinterpret_cast<const char*>(base.row_stats + row);
        acc_o[item][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        row_stats[item][j] = make_float2(negative_infinity(), 0.0f);
        if (exists) acc_o[item][j] = __ldcg(reinterpret_cast<const float4*>(from_o + bytes));
        if (exists)
          row_stats[item][j] = __ldcg(reinterpret_cast<const float2*>(from_stats + bytes));
      }
      next += step;
      keep_in_register(next);
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) combined[item].add(acc_o[item], row_stats[item]);
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    if (first + item * Tile::kThreads >= count) break;
    write_combined<Q>(p, block, row_of(item), column_of(item), combined[item]);
  }
}

// Combines all splits of a group of four columns, of which there are `count`,
// by four lanes of a warp, which add every fourth split each. All lanes of the
// warp call it.
constexpr int kCombineLanes = 4;
template <typename Tile, typename Q>
__device__ __forceinline__ void combine_columns_by_lanes(const AttentionParams& p,
                                                         const BlockInfo& block, int group,
                                                         int count) {
  constexpr int kColumns = Tile::kDimV / 4, kBatch = Tile::kCombineBatch;
  constexpr uint32_t kPartial = kPartialFloats<Tile> / 4;  // in units of 16 bytes
  const int32_t num_splits = block.work.num_splits;
  const int lane = threadIdx.x % 32 / (32 / kCombineLanes);
  const uint32_t first_split = block.work.partial(0) * kPartial,
                 step = block.work.partial_step * kPartial,
                 before_second = block.work.partial(1) * kPartial - step;
  const PartialResult base = PartialResult::at<Tile>(p.partials);
  const int row = group / kColumns, column = group % kColumns * 4;
  const char* const from_o =
      reinterpret_cast<const char*>(base.acc_o + PartialResult::offset<Tile>(row, column));
  const char* const from_stats = reinterpret_cast<const char*>(base.row_stats + row);
  CombinedColumns combined;
  for (int32_t begin = lane; begin - lane < num_splits; begin += kBatch * kCombineLanes) {
    float4 acc_o[kBatch];
    float2 row_stats[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t split = begin + j * kCombineLanes;
      const bool exists = split < num_splits && group < count;
      const uint64_t bytes = uint64_t(split == 0 ? first_split : before_second + split * step) * 16;
      acc_o[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      row_stats[j] = make_float2(negative_infinity(), 0.0f);
      if (exists) acc_o[j] = __ldcg(reinterpret_cast<const float4*>(from_o + bytes));
      if (exists) row_stats[j] = __ldcg(reinterpret_cast<const float2*>(from_stats + bytes));
    }
    combined.add(acc_o, row_stats);
  }
#pragma unroll
  for (int distance = 32 / kCombineLanes; distance < 32; distance *= 2) {
    combine_lanes(combined, distance);
  }
  if (lane == 0 && group < count) write_combined<Q>(p, block, row, column, combined);
}

// Combines all splits of whole rows, of which there are at most kSplits, by a
// warp: of the rows `row`, `row` + `step`, ..., kRows in all. Why whole rows:
// what follows from row_max and row_sum is computed once for many columns.
template <typename Tile, typename Q, int kRows, int kSplits>
__device__ __forceinline__ void combine_rows(const AttentionParams& p, const BlockInfo& block,
                                             int first_row, int step) {
  constexpr int kGroups = Tile::kDimV / 128;  // of four columns, of a lane
  static_assert(Tile::kDimV % 128 == 0, "a lane has whole groups");
  const int lane = threadIdx.x % 32;
  float4 acc_o[kRows][kSplits][kGroups];
  float2 row_stats[kRows][kSplits];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i * step;
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      const bool exists = row < block.num_rows && split < block.work.num_splits;
      const PartialResult from = PartialResult::at<Tile>(
          p.partials + int64_t(block.work.partial(exists ? split : 0)) * kPartialFloats<Tile>);
      row_stats[i][split] = make_float2(negative_infinity(), 0.0f);
      if (exists) row_stats[i][split] = __ldcg(from.row_stats + row);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int offset = PartialResult::offset<Tile>(row, 4 * (lane + 32 * group));
        acc_o[i][split][group] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (exists) {
          acc_o[i][split][group] = __ldcg(reinterpret_cast<const float4*>(from.acc_o + offset));
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i * step;
    if (row >= block.num_rows) break;
    float row_max = negative_infinity(), row_sum = 0.0f, scale[kSplits];
#pragma unroll
    for (const float2& stats : row_stats[i]) row_max = fmaxf(row_max, stats.x);
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      scale[split] = exp2_relative(row_stats[i][split].x, row_max);
      row_sum = fmaf(row_stats[i][split].y, scale[split], row_sum);
    }
    const PackGqaRow packed(p, block, row);
    const RowResult result(p, packed.q_head, row_max, row_sum);
    Q* const out = output_row<Q>(p, block, packed) + 4 * lane;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int split = 0; split < kSplits; ++split) {
        const float4& x = acc_o[i][split][group];
        sum.x = fmaf(x.x, scale[split], sum.x);
        sum.y = fmaf(x.y, scale[split], sum.y);
        sum.z = fmaf(x.z, scale[split], sum.z);
        sum.w = fmaf(x.w, scale[split], sum.w);
      }
      uint2 bits;
      bits.x = pack_pair(Q(), sum.x * result.factor, sum.y * result.factor);
      bits.y = pack_pair(Q(), sum.z * result.factor, sum.w * result.factor);
      *reinterpret_cast<uint2*>(out + 128 * group) = bits;
    }
    if (lane == 0) write_lse(p, block, packed, result.lse);
  }
}

#endif  // __CUDACC__

}  // namespace precast
