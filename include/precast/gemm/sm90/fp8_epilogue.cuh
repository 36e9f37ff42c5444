// SPDX-License-Identifier: Apache-2.0
// The epilogue of a tile of block-scaled GEMM for sm_90a: that of epilogue.cuh, or by TMA where
// rows are tokens and outputs have 16 bits. A warp has buffers for all that it writes of a tile, so
// it goes on with the next tile at once.
//
// TMA cannot leave out rows of a box. Where not all 16 rows of a warp belong to the group, at the
// end of a group, the warp writes by its lanes.
//
// If the CTAs of a cluster split the depth, each sends its sums to the CTA that adds up these
// columns over all CTAs, always in the order of their ranks. Why not a read by that one: it would
// wait for a barrier before, for each answer, and for a barrier behind the last one. A thread keeps
// its own sums in the same place, where no other thread reads them.
#pragma once

#include "precast/gemm/sm90/epilogue.cuh"
#include "precast/gemm/sm90/store_boxes.cuh"

namespace precast {

#if defined(__CUDACC__)

// The groups of a lane's two rows, where each token says its own. Why loaded before the tile is
// multiplied: a load takes some hundred clocks.
struct RowGroups {
  int of_row[2];
};

template <typename T, typename Tile>
class Fp8BoxEpilogue : public Fp8GemmEpilogue<T, Tile> {
  using Base = Fp8GemmEpilogue<T, Tile>;
  using Acc = float[Tile::kColumns / 2];
  using Pairs = typename Base::Pairs;
  static constexpr int kGroups = Base::kGroups;           // of columns
  static constexpr int kQuads = Base::kPairs / 2;         // of a lane's sums in a group
  static constexpr int kQuadBytes = Tile::kThreads * 16;  // of all lanes
  // The most that a CTA gets: sums of some groups from each CTA.
  static constexpr int kMostSlots = 8 * ceil_div(kGroups, 8);
  static_assert(kMostSlots * kQuads * kQuadBytes <= Tile::kStages * Tile::kStageBytes, "the sums");

 public:
  using Base::Base;
  static constexpr bool kStoresBoxes = sizeof(T) == 2 && Tile::kBuffers > 0;

  static __device__ __forceinline__ RowGroups load_groups(const Sm90GemmParams& params,
                                                          const GemmTile& tile, int row) {
    RowGroups groups = {};
    if constexpr (kStoresBoxes && Tile::kTokens <= kFp8Block) {
      if (params.p.kind == TokenGroups::blocks) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = tile.token + row + 8 * half;
          groups.of_row[half] = token < tile.token_end ? group_number(params.p, token) : -1;
        }
      }
    }
    return groups;
  }

  // Writes part `kPart` of the tile. All lanes of the warp call it.
  template <int kPart>
  __device__ __forceinline__ void write_tile(const Acc& sums, const RowGroups& groups) const {
    if constexpr (kStoresBoxes) {
      const int first = this->tile_.token + this->row_ - static_cast<int>(threadIdx.x) % 32 / 4;
      const int end = this->tile_.token_end, own = this->tile_.b_group;
      // Rows that do not exist are no reason to write the others in another way.
      const bool has_box = this->p_.kind == TokenGroups::blocks
                               ? groups.of_row[0] == own && groups.of_row[1] == own
                               : this->p_.kind == TokenGroups::equal ||
                                     first + Tile::Box::kRows <= end || first >= end;
      // Why a vote: the compiler knows then that all lanes take the same way. Where they may not,
      // it has no uniform registers for wgmma.
      const bool by_tma = __all_sync(0xffffffffu, has_box);
      using Box = typename Tile::Box;
      write_boxes<T, Box, Tile::kColumns, Tile::kBuffers, Tile::kBoxes>(
          by_tma, &this->params_.out, this->buffer_, kPart * Tile::kBoxes, this->tile_.column,
          first, this->tile_.a_group, first < end ? this->p_.columns : 0,
          [&](int group, float2(&pairs)[8]) { this->take_pairs(sums, group, pairs); },
          [&](uint32_t box, int column) { this->template write_box<Box>(box, first, column); });
    } else {
      this->write(sums);
    }
  }

  // Writes the sum over the CTAs of the cluster. The stages begin at `buffer`, `barrier` is the
  // mbarrier of received sums, whose phase is kPart. The other warps of the CTA join by
  // join_sums_of_cluster().
  template <int kPart>
  __device__ __forceinline__ void write_sum_of_cluster(uint32_t buffer, uint64_t* barrier,
                                                       const Acc& sums) const {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int ctas = this->params_.cluster_ctas, log2 = __ffs(ctas) - 1;
    const int own = static_cast<int>(cluster_rank());
    const uint32_t lane = buffer + thread * 16;
    const auto slot = [&](int group, int rank) {
      return lane + ((group >> log2) * ctas + rank) * (kQuads * kQuadBytes);
    };
    join();  // all warps of all CTAs have multiplied what lies there
    const int slots = ((kGroups - own + ctas - 1) >> log2) * (ctas - 1);  // from the other CTAs
    if (thread == 0) mbarrier_arrive_expect_tx(barrier, slots * (kQuads * kQuadBytes));
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int owner = group & (ctas - 1);
      const uint32_t target = address_in(slot(group, own), owner);
      const uint32_t arrives = address_in(shared_address(barrier), owner);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const int first = 4 * (group * kQuads + i);
        // Why neighbours change places: the four registers of a store decide where sums are. So
        // each is in another bank than the accumulator that is added to it.
        send_quad(owner == own, slot(group, own) + i * kQuadBytes, target + i * kQuadBytes, arrives,
                  sums[first + 1], sums[first], sums[first + 3], sums[first + 2]);
      }
    }
    mbarrier_wait_parity(barrier, kPart, "the sums of the cluster");
    const typename Base::Rows rows = this->rows_of_lane();
    int turn = 0;
#pragma unroll 1
    for (int group = own; group < kGroups; group += ctas) {
      Pairs pairs;
      take_received(slot(group, 0), ctas, pairs);
      this->write_group(group, pairs, rows, turn);
      turn ^= 1;
    }
  }

  static __device__ __forceinline__ void join_sums_of_cluster() {
#pragma unroll 1
    for (int part = 0; part < Tile::kParts; ++part) join();
  }

 private:
  static __device__ __forceinline__ void join() {
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
  }

  // The sums of a group of columns over all CTAs, from what each has sent.
  static __device__ __forceinline__ void take_received(uint32_t first, int ctas, Pairs& pairs) {
#pragma unroll
    for (float2& pair : pairs) pair = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (int rank = 0; rank < ctas; ++rank) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float4 x = load_quad(first + (rank * kQuads + i) * kQuadBytes);
        pairs[2 * i].x += x.y;
        pairs[2 * i].y += x.x;
        pairs[2 * i + 1].x += x.w;
        pairs[2 * i + 1].y += x.z;
      }
    }
  }

  // The address in shared memory of CTA `rank` of the cluster.
  static __device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
  }
  // Writes four sums to this CTA's `own` address, where this thread will read them, or to `target`
  // of another CTA, and completes 16 bytes on its mbarrier. Without a branch.
  static __device__ __forceinline__ void send_quad(bool stays, uint32_t own, uint32_t target,
                                                   uint32_t barrier, float x0, float x1, float x2,
                                                   float x3) {
    asm volatile(
        "{\n"
        ".reg .pred stays;\n"
        "setp.ne.s32 stays, %0, 0;\n"
        "@stays st.shared.v4.f32 [%1], {%4, %5, %6, %7};\n"
        "@!stays st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%2], "
        "{%4, %5, %6, %7}, [%3];\n"
        "}" ::"r"(stays ? 1 : 0),
        "r"(own), "r"(target), "r"(barrier), "f"(x0), "f"(x1), "f"(x2), "f"(x3)
        : "memory");
  }
  static __device__ __forceinline__ float4 load_quad(uint32_t address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
  }
};

#endif  // __CUDACC__

}  // namespace precast
