// SPDX-License-Identifier: Apache-2.0
// The epilogue of a tile of block-scaled GEMM for sm_90a: the sums are rounded once and written.
//
// Registers go to global memory directly, 16 bytes at once, after an exchange between the lanes
// that hold a row's columns. Why not by TMA through shared memory: the buffer would take the place
// of a stage, and a group's last tile has tokens of the next group, which TMA cannot leave out.
//
// If the CTAs of a cluster split the depth, each writes its sums to its own shared memory. After a
// barrier, each adds up a share of the columns over all CTAs, always in the order of their ranks.
#pragma once

#include "precast/core/mma.cuh"
#include "precast/core/sm90/cluster_memory.cuh"
#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"
#include "precast/gemm/sm90/scheduler.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename T, typename Tile>
class Fp8GemmEpilogue {
  using Acc = float[Tile::kColumns / 2];
  static constexpr bool kIsFloat = sizeof(T) == 4;

 public:
  // `row` is the lane's first row of the tile.
  __device__ __forceinline__ Fp8GemmEpilogue(const Sm90GemmParams& params, const GemmTile& tile,
                                             int row)
      : params_(params), p_(params.p), tile_(tile), row_(row) {}

  __device__ __forceinline__ void write(const Acc& sums) const {
    write_groups(0, 1, [&](int i) { return make_float2(sums[2 * i], sums[2 * i + 1]); });
  }

  // Writes the sum over the CTAs of the cluster. The stages, which begin at `buffer`, have been
  // multiplied. The other warps of the CTA join the barriers by join_sums_of_cluster().
  __device__ __forceinline__ void write_sum_of_cluster(uint32_t buffer, const Acc& sums) const {
    constexpr int kPairs = Tile::kColumns / 4;
    static_assert(kPairs * Tile::kThreads * 8 <= Tile::kStages * Tile::kStageBytes, "partial sums");
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int ctas = params_.cluster_ctas;
    named_barrier(1, Tile::kThreads);  // the other warpgroup has multiplied, too
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      asm volatile(
          "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(buffer + (i * Tile::kThreads + thread) * 8),
          "f"(sums[2 * i]), "f"(sums[2 * i + 1])
          : "memory");
    }
    cluster_arrive_shared();
    cluster_wait();
    write_groups(static_cast<int>(cluster_rank()), ctas, [&](int i) {
      float2 sum = make_float2(0.0f, 0.0f);
      for (int rank = 0; rank < ctas; ++rank) {
        const float2 part = load_pair(buffer + (i * Tile::kThreads + thread) * 8, rank);
        sum.x += part.x;
        sum.y += part.y;
      }
      return sum;
    });
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

 private:
  static __device__ __forceinline__ float2 load_pair(uint32_t address, int rank) {
    float2 pair;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %2, %3;\n"
        "ld.shared::cluster.v2.f32 {%0, %1}, [remote];\n"
        "}"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(address), "r"(rank)
        : "memory");
    return pair;
  }

  // Writes every n-th group of columns, from `first` on. pair(i) are sums 2 i and 2 i + 1 of a
  // lane.
  template <typename Pair>
  __device__ __forceinline__ void write_groups(int first, int n, const Pair& pair) const {
    constexpr int kGroup = Tile::kSwapped ? 16 : 32;  // columns of the tile
#pragma unroll
    for (int group = 0; group < Tile::kColumns / kGroup; ++group) {
      if (n > 1 && group % n != first) continue;
      if constexpr (Tile::kSwapped) {
        write_swapped_group(group, pair);
      } else {
        write_group(group, pair);
      }
    }
  }

  // 32 columns of the output, of two tokens a lane.
  template <typename Pair>
  __device__ __forceinline__ void write_group(int group, const Pair& pair) const {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile_.token + row_ + 8 * half;
      const bool exists = has_token(token);
      const int column = tile_.column + 32 * group;
      if constexpr (kIsFloat) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = column + 8 * j + 2 * q;
          const float2 x = pair((4 * group + j) * 2 + half);
          if (exists && at < p_.columns) *reinterpret_cast<float2*>(place(token, at)) = x;
        }
      } else {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 x = pair((4 * group + j) * 2 + half);
          words[j] = pack_pair(T(), x.x, x.y);
        }
        write_words(words, token, exists, column + 8 * q);
      }
    }
  }

  // 16 tokens, of 16 columns of the output for each warp.
  template <typename Pair>
  __device__ __forceinline__ void write_swapped_group(int group, const Pair& pair) const {
    const int lane = threadIdx.x % 32, q = lane % 4;
    if constexpr (kIsFloat) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // eight tokens, and eight columns
        const int token = tile_.token + 16 * group + i / 2 * 8 + 2 * q;
        const int column = tile_.column + row_ + i % 2 * 8;
        const float2 x = pair(4 * group + i);
        if (column < p_.columns) {
          if (has_token(token)) *place(token, column) = x.x;
          if (has_token(token + 1)) *place(token + 1, column) = x.y;
        }
      }
    } else {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = pair(4 * group + i);
        words[i] = transpose_8x8(pack_pair(T(), x.x, x.y));
      }
      const int token = tile_.token + 16 * group + q / 2 * 8 + lane / 4;
      write_words(words, token, has_token(token), tile_.column + row_ - lane / 4 + q % 2 * 8);
    }
  }

  // Writes eight columns of a token. Before, the four lanes of a quad have two columns each of what
  // they write: words[j] is what lane j gets from this one.
  __device__ __forceinline__ void write_words(uint32_t (&words)[4], int token, bool exists,
                                              int column) const {
    transpose_in_quad(words);
    if (exists && column < p_.columns) {
      *reinterpret_cast<uint4*>(place(token, column)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ __forceinline__ bool has_token(int token) const {
    if (token >= tile_.token_end) return false;
    return p_.kind != TokenGroups::blocks || p_.group_info[token] == tile_.b_group;
  }

  __device__ __forceinline__ T* place(int token, int column) const {
    return static_cast<T*>(p_.out) + tile_.a_group * p_.out_group_stride +
           token * p_.out_row_stride + column;
  }

  const Sm90GemmParams& params_;
  const Fp8GemmParams& p_;
  const GemmTile& tile_;
  const int row_;
};

#endif  // __CUDACC__

}  // namespace precast
