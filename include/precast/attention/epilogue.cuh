// SPDX-License-Identifier: Apache-2.0
// The epilogue of a work tile: from the softmax state of its rows to the output.
//
//   out = acc_o / row_sum * out_scale      lse = row_max + log2(row_sum)
//
// A tile that is not split is written to the output. A split of a tile is written to the split
// workspace as a partial result, and attention/combine.cuh combines the splits. In the 16-row tile
// each warp has attended to other tokens, so the CTA combines its warps in shared memory first.
//
// Layout   out               [tokens, heads, head_dim_vo], lse [tokens, heads]
//          a partial result  acc_o [kRows, kDimV] f32, then (row_max, row_sum) [kRows] f32
#pragma once

#include "precast/attention/softmax.cuh"

namespace precast {

#if defined(__CUDACC__)

// What a query head adds to its rows' results. Why apart from these: a thread loads it for all its
// rows before it needs the first.
struct HeadTerms {
  float sink = 0.0f, v_scale = 1.0f;

  HeadTerms() = default;
  __device__ __forceinline__ HeadTerms(const AttentionParams& p, int32_t q_head) {
    if (p.sinks != nullptr) sink = load_scalar(p.sinks + q_head);
    if (p.v_scale != nullptr) v_scale = load_scalar(p.v_scale + q_head * p.v_scale_step);
  }
};

// The factor that turns acc_o of a row into the output, and the lse of the row.
struct RowResult {
  float factor, lse;

  __device__ __forceinline__ RowResult(const AttentionParams& p, int32_t q_head, float row_max,
                                       float row_sum)
      : RowResult(p, HeadTerms(p, q_head), row_max, row_sum) {}

  // A sink adds to row_sum only.
  __device__ __forceinline__ RowResult(const AttentionParams& p, const HeadTerms& head,
                                       float row_max, float row_sum) {
    float scale = 1.0f;
    if (p.sinks != nullptr) {
      const float sink = head.sink * kLog2E;
      const float new_max = fmaxf(row_max, sink);
      scale = exp2_relative(row_max, new_max);
      row_sum = row_sum * scale + exp2_relative(sink, new_max);
      row_max = new_max;
    }
    // Why not row_sum > 0: NaN must stay NaN.
    const bool is_empty = row_sum == 0.0f;
    factor = is_empty ? 0.0f : scale * p.out_scale * fast_reciprocal(row_sum);
    if (p.v_scale != nullptr) factor *= head.v_scale;
    lse = is_empty ? negative_infinity() : row_max + __log2f(row_sum);
  }
};

// The row's output, from the first column that this CTA computes.
template <typename Q>
__device__ __forceinline__ Q* output_row(const AttentionParams& p, const BlockInfo& block,
                                         const PackGqaRow& row) {
  return static_cast<Q*>(p.out) + int64_t(block.work.q_begin + row.q_idx) * p.out_stride +
         row.q_head * p.out_head_stride + block.v_column;
}

__device__ __forceinline__ void write_lse(const AttentionParams& p, const BlockInfo& block,
                                          const PackGqaRow& row, float lse) {
  if (p.lse == nullptr || block.v_column != 0) return;
  const int64_t heads = int64_t(p.kv_heads) * p.group_size.value;
  p.lse[int64_t(block.work.q_begin + row.q_idx) * heads + row.q_head] = lse * p.lse_factor;
}

// Calls put(column, x, y) for each pair of neighbouring columns that this lane holds of a row.
template <typename Tile, typename Put>
__device__ __forceinline__ void for_each_column_pair(const float (&acc_o)[Tile::kWarpDimV / 8][4],
                                                     int half, const Put& put) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < Tile::kWarpDimV / 16; ++c) {
    const float* even = acc_o[2 * c] + 2 * half;
    const float* odd = acc_o[2 * c + 1] + 2 * half;
    if constexpr (Tile::kFp8) {
      put(16 * c + 4 * q, even[0], odd[0]);
      put(16 * c + 4 * q + 2, even[1], odd[1]);
    } else {
      put(16 * c + 2 * q, even[0], even[1]);
      put(16 * c + 8 + 2 * q, odd[0], odd[1]);
    }
  }
}

// -- Partial results ------------------------------------------------------------------------------

// The softmax state of a tile's rows in memory.
struct PartialResult {
  float* acc_o;       // [kRows, kDimV]
  float2* row_stats;  // [kRows] of (row_max, row_sum)

  // From an address in the split workspace, or in memory of the same layout.
  template <typename Tile>
  static __device__ __forceinline__ PartialResult at(float* memory) {
    return {memory, reinterpret_cast<float2*>(memory + Tile::kBlockM * Tile::kDimV)};
  }

  // The offset of a column of acc_o. Columns are swizzled in blocks of eight, so that lanes of four
  // rows have no bank conflicts in shared memory.
  template <typename Tile>
  static __device__ __forceinline__ int offset(int row, int column) {
    return row * Tile::kDimV + (Tile::kDimV % 32 == 0 ? column ^ (row & 3) * 8 : column);
  }
};

template <typename Tile>
constexpr int64_t kPartialFloats = attention_partial_floats(Tile::kBlockM, Tile::kDimV);

// The partial result of a split in the split workspace.
template <typename Tile>
__device__ __forceinline__ PartialResult partial_result(const AttentionParams& p,
                                                        const WorkTile& work) {
  return PartialResult::at<Tile>(p.partials + work.partial(work.split_idx) * kPartialFloats<Tile>);
}

// The partial results of the warps of a CTA (16-row tile): acc_o is in a free stage of the warp's
// pipeline, the rest is here.
template <typename Tile>
struct WarpResults {
  float2 row_stats[Tile::kPipelines][Tile::kWarpsSplitKv ? Tile::kBlockM : 1];
  int stage_offsets[Tile::kPipelines];  // bytes from the start of the warp's stages

  __device__ __forceinline__ PartialResult of(unsigned char* smem_kv, int warp_kv) {
    float* acc_o =
        reinterpret_cast<float*>(smem_kv + warp_kv * Tile::kPipelineBytes + stage_offsets[warp_kv]);
    return {acc_o, row_stats[warp_kv]};
  }
};

// Writes the rows of this warp that exist, after OnlineSoftmax::finalize().
template <typename Tile>
__device__ __forceinline__ void write_partial(const OnlineSoftmax<Tile>& softmax, int32_t num_rows,
                                              const PartialResult& target) {
  const int first_column = WarpPartition<Tile>::first_column();
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of_lane<Tile>(m, half);
      if (row >= num_rows) continue;
      for_each_column_pair<Tile>(softmax.acc_o[m], half, [&](int column, float x, float y) {
        const int offset = PartialResult::offset<Tile>(row, first_column + column);
        *reinterpret_cast<float2*>(target.acc_o + offset) = make_float2(x, y);
      });
      if (threadIdx.x % 4 == 0 && first_column == 0) {
        target.row_stats[row] = make_float2(softmax.row_max[m][half], softmax.row_sum[m][half]);
      }
    }
  }
}

// -- Output of a tile that is not split -----------------------------------------------------------

// A predicated store. Why not a branch: the stores stand side by side.
__device__ __forceinline__ void store_if(bool exists, uint4* to, const uint4& x) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(exists ? 1u : 0u)
      : "memory");
}

// Writes the output of this warp's rows through shared memory: `stage`, which no warp reads any
// more. Why: neighbouring lanes then write 16 bytes of one row, not 4 bytes of eight rows.
template <typename Tile, typename Q>
__device__ __forceinline__ void write_output(const AttentionParams& p, const BlockInfo& block,
                                             const OnlineSoftmax<Tile>& softmax,
                                             unsigned char* stage) {
  using Partition = WarpPartition<Tile>;
  using StagedRows = SharedRows<Tile::kWarpDimV * 2, false>;
  constexpr int kChunks = StagedRows::kChunks;
  constexpr int kStride = StagedRows::kStride;
  // Rows of a warp that fit in the stage. They are less than 8 with FP8 and head_dim 512, which is
  // written without shared memory.
  constexpr int kFit = Tile::kStageBytes / (Tile::kWarps * kStride);
  constexpr int kStagedRows = kFit >= Partition::kRows ? Partition::kRows : kFit >= 16 ? 16 : 8;
  const int lane = threadIdx.x % 32;
  float factors[Partition::kRows / 8];
  if (p.lse == nullptr && p.sinks == nullptr) {  // the head of a row does not matter
#pragma unroll
    for (int i = 0; i < Partition::kRows / 8; ++i) {
      factors[i] =
          RowResult(p, 0, softmax.row_max[i / 2][i % 2], softmax.row_sum[i / 2][i % 2]).factor;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Partition::kRows / 8; ++i) {
      const int m = i / 2, half = i % 2, row = row_of_lane<Tile>(m, half);
      const PackGqaRow packed(p, block, row);
      const RowResult result(p, packed.q_head, softmax.row_max[m][half], softmax.row_sum[m][half]);
      factors[i] = result.factor;
      if (lane % 4 == 0 && Partition::half() == 0 && row < block.num_rows) {
        write_lse(p, block, packed, result.lse);
      }
    }
  }
  if constexpr (kFit < 8) {
#pragma unroll
    for (int i = 0; i < Partition::kRows / 8; ++i) {
      const int row = row_of_lane<Tile>(i / 2, i % 2);
      if (row >= block.num_rows) continue;
      Q* const out = output_row<Q>(p, block, PackGqaRow(p, block, row)) + Partition::first_column();
      for_each_column_pair<Tile>(softmax.acc_o[i / 2], i % 2, [&](int column, float x, float y) {
        *reinterpret_cast<uint32_t*>(out + column) = pack_pair(Q(), x * factors[i], y * factors[i]);
      });
    }
    return;
  }
  unsigned char* const staged = stage + threadIdx.x / 32 * kStagedRows * kStride;
  const RowOffsets offsets(p, block, Partition::first_row(), Partition::kRows, p.out_stride,
                           p.out_head_stride);
  uint4* const out = static_cast<uint4*>(p.out) + (block.v_column + Partition::first_column()) / 8;
#pragma unroll
  for (int i = 0; i < Partition::kRows / 8; ++i) {
    const int row = i * 8 % kStagedRows + lane / 4;
    for_each_column_pair<Tile>(softmax.acc_o[i / 2], i % 2, [&](int column, float x, float y) {
      unsigned char* const target = staged + StagedRows::offset(row, column / 8) + column % 8 * 2;
      *reinterpret_cast<uint32_t*>(target) = pack_pair(Q(), x * factors[i], y * factors[i]);
    });
    if ((i + 1) * 8 % kStagedRows != 0) continue;
    __syncwarp();
    constexpr int kRounds = (kStagedRows * kChunks + 31) / 32;
    constexpr int kBatch = kRounds < 8 ? kRounds : 8;  // loads before the first store
#pragma unroll
    for (int begin = 0; begin < kRounds; begin += kBatch) {
      uint4 bits[kBatch];
      uint32_t to[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int place = (begin + j) * 32 + lane, row = place / kChunks;
        to[j] = offsets.of((i + 1) * 8 - kStagedRows + row % kStagedRows);
        if (row >= kStagedRows) to[j] = RowOffsets::kNoRow;
        bits[j] = *reinterpret_cast<const uint4*>(
            staged + StagedRows::offset(row % kStagedRows, place % kChunks));
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int place = (begin + j) * 32 + lane;
        store_if(to[j] != RowOffsets::kNoRow, out + to[j] + place % kChunks, bits[j]);
      }
    }
    __syncwarp();
  }
}

// -- Combining partial results --------------------------------------------------------------------

// Four columns of a row, combined from partial results, kCount at a time.
struct CombinedColumns {
  float4 acc_o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float2 row_stats = make_float2(negative_infinity(), 0.0f);  // row_max, row_sum

  template <int kCount>
  __device__ __forceinline__ void add(const float4 (&partial_o)[kCount],
                                      const float2 (&partial_stats)[kCount]) {
    float new_max = row_stats.x;
#pragma unroll
    for (int i = 0; i < kCount; ++i) new_max = fmaxf(new_max, partial_stats[i].x);
    const float scale = exp2_relative(row_stats.x, new_max);
    row_stats = make_float2(new_max, row_stats.y * scale);
    acc_o = make_float4(acc_o.x * scale, acc_o.y * scale, acc_o.z * scale, acc_o.w * scale);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float partial_scale = exp2_relative(partial_stats[i].x, new_max);
      row_stats.y = fmaf(partial_stats[i].y, partial_scale, row_stats.y);
      acc_o.x = fmaf(partial_o[i].x, partial_scale, acc_o.x);
      acc_o.y = fmaf(partial_o[i].y, partial_scale, acc_o.y);
      acc_o.z = fmaf(partial_o[i].z, partial_scale, acc_o.z);
      acc_o.w = fmaf(partial_o[i].w, partial_scale, acc_o.w);
    }
  }
};

// Combines what the lanes of a warp have found that lie `distance` apart: each gets the result.
__device__ __forceinline__ void combine_lanes(CombinedColumns& columns, int distance) {
  const auto other = [&](float x) { return __shfl_xor_sync(0xffffffffu, x, distance); };
  const float new_max = fmaxf(columns.row_stats.x, other(columns.row_stats.x));
  const float scale = exp2_relative(columns.row_stats.x, new_max);
  const auto sum = [&](float x) { return x * scale + other(x * scale); };
  columns.row_stats = make_float2(new_max, sum(columns.row_stats.y));
  columns.acc_o = make_float4(sum(columns.acc_o.x), sum(columns.acc_o.y), sum(columns.acc_o.z),
                              sum(columns.acc_o.w));
}

// Writes the output of four columns of a row, and the row's lse with the first of them.
template <typename Q>
__device__ __forceinline__ void write_combined(const AttentionParams& p, const BlockInfo& block,
                                               int row, int column,
                                               const CombinedColumns& combined) {
  const PackGqaRow packed(p, block, row);
  const RowResult result(p, packed.q_head, combined.row_stats.x, combined.row_stats.y);
  uint2 bits;
  bits.x = pack_pair(Q(), combined.acc_o.x * result.factor, combined.acc_o.y * result.factor);
  bits.y = pack_pair(Q(), combined.acc_o.z * result.factor, combined.acc_o.w * result.factor);
  *reinterpret_cast<uint2*>(output_row<Q>(p, block, packed) + column) = bits;
  if (column == 0) write_lse(p, block, packed, result.lse);
}

// Combines the warps of a CTA (16-row tile), and writes the output, or the partial result of the
// split. All threads of the CTA must call it, after a barrier.
template <typename Tile, typename Q>
__device__ __forceinline__ void combine_warps(const AttentionParams& p, const BlockInfo& block,
                                              unsigned char* smem_kv, WarpResults<Tile>& results) {
  constexpr int kColumns = Tile::kDimV / 4;
  const bool is_whole = block.work.num_splits == 1;
  for (int i = threadIdx.x; i < block.num_rows * kColumns; i += Tile::kThreads) {
    const int row = i / kColumns, column = i % kColumns * 4;
    const int offset = PartialResult::offset<Tile>(row, column);
    float4 acc_o[Tile::kPipelines];
    float2 row_stats[Tile::kPipelines];
#pragma unroll
    for (int warp_kv = 0; warp_kv < Tile::kPipelines; ++warp_kv) {
      const PartialResult partial = results.of(smem_kv, warp_kv);
      acc_o[warp_kv] = *reinterpret_cast<const float4*>(partial.acc_o + offset);
      row_stats[warp_kv] = partial.row_stats[row];
    }
    CombinedColumns combined;
    combined.add(acc_o, row_stats);
    if (is_whole) {
      write_combined<Q>(p, block, row, column, combined);
    } else {
      const PartialResult partial = partial_result<Tile>(p, block.work);
      *reinterpret_cast<float4*>(partial.acc_o + offset) = combined.acc_o;
      if (column == 0) partial.row_stats[row] = combined.row_stats;
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
