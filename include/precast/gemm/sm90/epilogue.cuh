// SPDX-License-Identifier: Apache-2.0
// The epilogue of a tile of GEMM for sm_90a: sums are multiplied by scales of rows and a bias is
// added to them, where there are some; they are rounded once and written.
//
// Lanes write 16 bytes at once, of rows of the output. They hold two neighbours each of a row's
// columns before: stmatrix brings 32 columns of 16 rows in order in a buffer of the warp. For few
// tokens, the lanes exchange registers instead. What TMA can write of a tile is written by those
// who derive from this one.
//
// If the CTAs of a cluster split the depth, each writes its sums to its own shared memory. After a
// barrier, each adds up a share of the columns over all CTAs, always in the order of their ranks.
#pragma once

#include "precast/core/mma.cuh"
#include "precast/core/sm90/cluster_memory.cuh"
#include "precast/core/sm90/stmatrix.cuh"
#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"
#include "precast/gemm/sm90/scheduler.cuh"
#include "precast/gemm/sm90/sum_scales.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename T, typename Tile, typename Params = Sm90GemmParams>
class Fp8GemmEpilogue {
 protected:
  using Acc = float[Tile::kColumns / 2];
  static constexpr bool kIsFloat = sizeof(T) == 4;
  static constexpr bool kHasBuffer = !kIsFloat && Tile::kWarpBufferBytes > 0;
  // Columns of the tile that are written together, and a lane's pairs of neighbours in them.
  static constexpr int kGroup = Tile::kSwapped ? 16 : 32;
  static constexpr int kPairs = kGroup / 4;
  static constexpr int kGroups = (Tile::kColumns + kGroup - 1) / kGroup;
  using Pairs = float2[kPairs];
  // Whether neighbours change places where CTAs exchange sums. Why: the four registers of a store
  // decide where sums are that are not accumulators. So each is in another bank than the
  // accumulator that is added to it.
  static constexpr int kFlip = Params::kHasSumsOfBlocks ? 1 : 0;
  using Scales = SumScales<Tile, Params>;

 public:
  // `row` is the lane's first row of the tile, `buffer` that of the consumer warps, if they have
  // one; `scales` are those of the tile and the row.
  __device__ __forceinline__ Fp8GemmEpilogue(const Params& params, const GemmTile& tile, int row,
                                             const Scales& scales, uint32_t buffer = 0)
      : params_(params),
        p_(params.p),
        tile_(tile),
        scales_(scales),
        row_(row),
        buffer_(buffer + (threadIdx.x / 32 - 4) * Tile::kWarpBufferBytes) {}

  __device__ __forceinline__ void write(const Acc& sums) const {
    const Rows rows = rows_of_lane();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      Pairs pairs;
      take_pairs(sums, group, pairs);
      write_group(group, pairs, rows, group % 2);
    }
  }

  // Writes the sum over the CTAs of the cluster. The stages, which begin at `buffer`, have been
  // multiplied. The other warps of the CTA join the barriers by join_sums_of_cluster().
  __device__ __forceinline__ void write_sum_of_cluster(uint32_t buffer, const Acc& sums) const {
    constexpr int kQuads = Tile::kColumns / 8;
    static_assert(kQuads * Tile::kThreads * 16 <= Tile::kStages * Tile::kStageBytes, "the sums");
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int ctas = params_.cluster_ctas;
    named_barrier(1, Tile::kThreads);  // the other warpgroup has multiplied, too
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                       buffer + (i * Tile::kThreads + thread) * 16),
                   "f"(sums[4 * i + kFlip]), "f"(sums[4 * i + 1 - kFlip]),
                   "f"(sums[4 * i + 2 + kFlip]), "f"(sums[4 * i + 3 - kFlip])
                   : "memory");
    }
    cluster_arrive_shared();
    cluster_wait();
    const Rows rows = rows_of_lane();
    int turn = 0;
#pragma unroll 1
    for (int group = static_cast<int>(cluster_rank()); group < kGroups; group += ctas) {
      Pairs pairs;
      take_sums_of_cluster(buffer + (group * kPairs / 2 * Tile::kThreads + thread) * 16, pairs);
      write_group(group, pairs, rows, turn);
      turn ^= 1;
    }
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();  // no CTA exits while others read its sums
  }

  static __device__ __forceinline__ void join_sums_of_cluster() {
#pragma unroll 1
    for (int part = 0; part < Tile::kParts; ++part) {
      cluster_arrive_shared();
      cluster_wait();
      cluster_arrive_relaxed();
      cluster_wait();
    }
  }

 protected:
  static __device__ __forceinline__ void take_pairs(const Acc& sums, int group, Pairs& pairs) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int at = 2 * (kPairs * group + i);
      pairs[i] = float2();  // A tile of 8 tokens has half a group.
      if (at < Tile::kColumns / 2) pairs[i] = make_float2(sums[at], sums[at + 1]);
    }
  }

  // The sums of a group of columns over all CTAs; `first` is where this lane's begin.
  __device__ __forceinline__ void take_sums_of_cluster(uint32_t first, Pairs& pairs) const {
    constexpr int kQuads = (Tile::kColumns < kGroup ? Tile::kColumns : kGroup) / 8;
    const int ctas = params_.cluster_ctas;
#pragma unroll
    for (float2& pair : pairs) pair = make_float2(0.0f, 0.0f);
    // Two CTAs at once, because each read takes hundreds of clocks; a cluster has an even number.
#pragma unroll 1
    for (int rank = 0; rank < ctas; rank += 2) {
      float4 parts[2][kQuads];
#pragma unroll
      for (int cta = 0; cta < 2; ++cta) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          parts[cta][i] = load_quad(first + i * Tile::kThreads * 16, rank + cta);
        }
      }
#pragma unroll
      for (int cta = 0; cta < 2; ++cta) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          const float4 x = parts[cta][i];
          pairs[2 * i].x += kFlip ? x.y : x.x;
          pairs[2 * i].y += kFlip ? x.x : x.y;
          pairs[2 * i + 1].x += kFlip ? x.w : x.z;
          pairs[2 * i + 1].y += kFlip ? x.z : x.w;
        }
      }
    }
  }

  static __device__ __forceinline__ float4 load_quad(uint32_t address, int rank) {
    float4 quad;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
        "}"
        : "=f"(quad.x), "=f"(quad.y), "=f"(quad.z), "=f"(quad.w)
        : "r"(address), "r"(rank)
        : "memory");
    return quad;
  }

  // The output's rows of a lane, from the tile's first column on.
  struct Rows {
    T* begin[2];
    bool exists[2];
  };
  __device__ __forceinline__ Rows rows_of_lane() const {
    Rows rows = {};
    if constexpr (kHasBuffer) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = tile_.token + row_ + 8 * half;
        rows.exists[half] = has_token(token);
        rows.begin[half] = place(token, tile_.column);
      }
    }
    return rows;
  }

  // Writes a group of columns, of which a lane has these pairs of sums in the order of its
  // accumulator. `turn` is 0 and 1 by turns.
  __device__ __forceinline__ void write_group(int group, Pairs& pairs, const Rows& rows,
                                              int turn) const {
    finish(group, pairs);
    if constexpr (Tile::kSwapped) {
      write_swapped_group(group, pairs);
    } else if constexpr (kHasBuffer) {
      static_assert(!Params::kHasAnyRows, "rows of whole vectors");
      write_rows(group, pairs, rows, turn);
    } else {
      write_vectors(group, pairs);
    }
  }

  // 32 columns of the output, of two tokens a lane.
  __device__ __forceinline__ void write_vectors(int group, const Pairs& pairs) const {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile_.token + row_ + 8 * half;
      const bool exists = has_token(token);
      const int column = tile_.column + 32 * group;
      if constexpr (kIsFloat) {
        T* const to = place(token, column);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int further = 8 * j + 2 * q;
          const float2 x = pairs[2 * j + half];
          if (32 * group + 8 * j >= Tile::kColumns) break;  // the tile ends in a group
          if (!exists || column + further >= p_.columns) continue;
          if (has_vectors()) {
            *reinterpret_cast<float2*>(to + further) = x;
          } else {
            to[further] = x.x;
            if (column + further + 1 < p_.columns) to[further + 1] = x.y;
          }
        }
      } else {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 x = pairs[2 * j + half];
          words[j] = pack_pair(T(), x.x, x.y);
        }
        const bool in_tile = Tile::kColumns % 32 == 0 || 32 * group + 8 * q < Tile::kColumns;
        write_words(words, token, exists && in_tile, column + 8 * q);
      }
    }
  }

  // The same by one half of the warp's buffer after the other: so lanes have
  // read a half when another group comes to it. A row is 64 bytes; 16 of them lie where no
  // two of eight rows, or of the columns of two rows, share a bank.
  __device__ __forceinline__ void write_rows(int group, const Pairs& pairs, const Rows& rows,
                                             int turn) const {
    const int lane = threadIdx.x % 32;
    const uint32_t buffer = buffer_ + turn * (16 * 64);
    const auto place_of = [&](int row, int eight) {
      return buffer + row * 64 + (eight ^ row / 2 % 4) * 16;
    };
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = pairs[2 * j + i];
        words[i] = pack_pair(T(), x.x, x.y);
      }
      stmatrix_x4(place_of(lane % 16, j + lane / 16), words);
    }
    __syncwarp();
    const int column = 32 * group + lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      copy_eight_if(rows.begin[half] + column, place_of(lane / 4 + 8 * half, lane % 4),
                    rows.exists[half] && tile_.column + column < p_.columns);
    }
  }

  // Copies 16 bytes of shared memory to the output. Why in one piece: a branch takes longer.
  static __device__ __forceinline__ void copy_eight_if(T* to, uint32_t from, bool exists) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .b32 x<4>;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "ld.shared.v4.b32 {x0, x1, x2, x3}, [%1];\n"
        "@p st.global.v4.b32 [%0], {x0, x1, x2, x3};\n"
        "}" ::"l"(to),
        "r"(from), "r"(exists ? 1 : 0)
        : "memory");
  }

  // 16 tokens, of 16 columns of the output for each warp.
  __device__ __forceinline__ void write_swapped_group(int group, const Pairs& pairs) const {
    const int lane = threadIdx.x % 32, q = lane % 4;
    if constexpr (kIsFloat) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // eight tokens, and eight columns
        if (16 * group + i / 2 * 8 >= Tile::kColumns) break;
        const int token = tile_.token + 16 * group + i / 2 * 8 + 2 * q;
        const int column = tile_.column + row_ + i % 2 * 8;
        const float2 x = pairs[i];
        if (column < p_.columns) {
          if (has_token(token)) *place(token, column) = x.x;
          if (has_token(token + 1)) *place(token + 1, column) = x.y;
        }
      }
    } else {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = pairs[i];
        words[i] = transpose_8x8(pack_pair(T(), x.x, x.y));
      }
      const int in_tile = 16 * group + q / 2 * 8 + lane / 4, token = tile_.token + in_tile;
      const bool exists =
          (Tile::kColumns % 16 == 0 || in_tile < Tile::kColumns) && has_token(token);
      write_words(words, token, exists, tile_.column + row_ - lane / 4 + q % 2 * 8);
    }
  }

  // Writes eight columns of a token. Before, the four lanes of a quad have two columns each of what
  // they write: words[j] is what lane j gets from this one.
  __device__ __forceinline__ void write_words(uint32_t (&words)[4], int token, bool exists,
                                              int column) const {
    transpose_in_quad(words);
    if (exists) write_eight(words, token, column);
  }

  // Writes a box of shared memory to the output, from this token and column on, as far as the tile
  // has columns. Eights that lanes write at a time follow each other, so that rows are written as
  // whole lines.
  template <typename Box>
  __device__ __forceinline__ void write_box(uint32_t box, int token, int column) const {
    constexpr int kEights = Box::kColumns / 8;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < Box::kRows * kEights; i += 32) {
      const int row = i / kEights, eight = i % kEights;
      uint32_t words[4];
      load_shared_words(words, box + Box::place(row, eight));
      const bool in_tile =
          Tile::kColumns % Box::kColumns == 0 || column + 8 * eight < tile_.column + Tile::kColumns;
      if (in_tile && has_token(token + row)) write_eight(words, token + row, column + 8 * eight);
    }
  }
  static __device__ __forceinline__ void load_shared_words(uint32_t (&words)[4], uint32_t address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  }

  // Writes eight columns of a token that exists, as far as these do.
  __device__ __forceinline__ void write_eight(const uint32_t (&words)[4], int token,
                                              int column) const {
    if (column >= p_.columns) return;
    T* const to = place(token, column);
    if (has_vectors()) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = i % 2 == 0 ? words[i / 2] : words[i / 2] >> 16;
      if (column + i < p_.columns) reinterpret_cast<uint16_t*>(to)[i] = uint16_t(bits);
    }
  }

  // Whether a lane's eight columns are 16 bytes that can be written at once.
  __device__ __forceinline__ bool has_vectors() const {
    if constexpr (Params::kHasAnyRows) return params_.has_vector_rows;
    return true;
  }

  // What is left to do to the sums of a group of columns, as write_vectors() has them.
  __device__ __forceinline__ void finish(int group, Pairs& pairs) const {
    if constexpr (Params::kHasScales) {
      // Why: the compiler would load those of all groups before, for which registers are too few.
      asm volatile("" ::: "memory");
      scales_.multiply(kGroup * group, pairs);
    }
    if constexpr (Params::kHasBias) add_bias(group, pairs);
  }

  __device__ __forceinline__ void add_bias(int group, Pairs& pairs) const {
    if (p_.bias == nullptr) return;
    const int q = threadIdx.x % 4;
    if constexpr (Tile::kSwapped) {
      const float of_row[2] = {bias(tile_.column + row_), bias(tile_.column + row_ + 8)};
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        pairs[i].x += of_row[i % 2];
        pairs[i].y += of_row[i % 2];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPairs / 2; ++j) {
        const int column = tile_.column + 32 * group + 8 * j + 2 * q;
        const float x = bias(column), y = bias(column + 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          pairs[2 * j + half].x += x;
          pairs[2 * j + half].y += y;
        }
      }
    }
  }
  __device__ __forceinline__ float bias(int column) const {
    using Bias = typename Params::Bias;
    return column < p_.columns ? to_float(static_cast<const Bias*>(p_.bias)[column]) : 0.0f;
  }

  __device__ __forceinline__ bool has_token(int token) const {
    if (token >= tile_.token_end) return false;
    return p_.kind != TokenGroups::blocks || group_number(p_, token) == tile_.b_group;
  }

  __device__ __forceinline__ T* place(int token, int column) const {
    return static_cast<T*>(p_.out) + tile_.a_group * p_.out_group_stride +
           token * p_.out_row_stride + column;
  }

  const Params& params_;
  const decltype(Params::p)& p_;
  const GemmTile& tile_;
  const Scales scales_;
  const int row_;
  const uint32_t buffer_;  // of the warp
};

#endif  // __CUDACC__

}  // namespace precast
