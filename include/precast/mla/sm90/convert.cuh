// SPDX-License-Identifier: Apache-2.0
// The producer warps of MLA for sm_90a, for caches of e4m3: they convert ckv and kpe to f16 on
// their way to shared memory. attention/sm90/convert.cuh says why f16; Q is converted, too, by the
// consumers. Each of the four warps converts a quarter of the rows of each panel.
//
// Two panels of ckv, 128 columns, are converted at once: they have one number of ckv_scales for
// each token. A block is in registers before its stage is empty, so what the consumers wait for is
// the conversion alone, and no read behind it. With ckv_scales there are registers for a half of
// it. The next block is on its way to L2.
//
// Precision   An e4m3 number is one of f16. With ckv_scales its product with the scale is computed
//             in fp32 and rounded to f16 once: to 2^-12 of it, or 2^-25 where it is below 2^-14.
#pragma once

#include "precast/attention/sm90/convert.cuh"
#include "precast/mla/sm90/producer.cuh"

namespace precast {

#if defined(__CUDACC__) && defined(PRECAST_SM)

// Multiplies two f16 numbers in fp32.
__device__ __forceinline__ uint32_t scale_f16_pair(uint32_t pair, float scale) {
  const float2 x = unpack_pair(f16(), pair);
  return pack_pair(f16(), x.x * scale, x.y * scale);
}

// store_as_f16() of products with `scale`.
__device__ __forceinline__ void store_scaled_as_f16(uint32_t to, uint32_t first, uint32_t second,
                                                    float scale) {
  uint32_t x[4];
  convert_to_f16(first, x[0], x[1]);
  convert_to_f16(second, x[2], x[3]);
#pragma unroll
  for (uint32_t& pair : x) pair = scale_f16_pair(pair, scale);
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

template <typename Tile>
class MlaConvertProducer : MlaProducer<Tile> {
  using Base = MlaProducer<Tile>;
  using Base::buffers_, Base::p_, Base::params_, Base::shared_;
  static constexpr int kWarps = 4, kRowsOfWarp = Tile::kBlockN / kWarps;
  // A panel has as many elements of a row as four lanes read, 16 each.
  static constexpr int kLanes = 4, kRowsAtOnce = 32 / kLanes, kReads = kRowsOfWarp / kRowsAtOnce;
  static constexpr int kGroupPanels = kMlaScaleColumns / Tile::kPanelColumns;
  // Groups of panels that share a scale.
  static constexpr int kGroups = Tile::kCkvPanels / kGroupPanels, kHalfGroups = kGroups / 2;
  static_assert(kHalfGroups >= 1, "a half has whole groups");

  // What a lane has read of a group.
  struct Group {
    uint4 x[kGroupPanels][kReads];
    float scale[kReads];
  };

 public:
  using Base::work_readers;

  __device__ __forceinline__ MlaConvertProducer(const MlaSm90Params& params,
                                                MlaSm90Storage<Tile>& shared,
                                                MlaSm90Buffers<Tile> buffers)
      : Base(params, shared, buffers) {}

  static __device__ __forceinline__ void init(const MlaSm90Params&, MlaSm90Storage<Tile>& shared) {
    shared.init(kWarps);
  }

  __device__ __forceinline__ void run(int warp) {
    this->for_each_work_of_all(warp, [&](const BlockInfo& block, int32_t blocks) {
      if (p_.ckv_scales == nullptr) {
        convert_blocks<false>(warp, block, blocks);
      } else {
        convert_blocks<true>(warp, block, blocks);
      }
    });
  }

 private:
  template <bool kScales>
  __device__ __forceinline__ void convert_blocks(int warp, const BlockInfo& block,
                                                 int32_t blocks) const {
    const WorkTile& work = block.work;
    const int lane = threadIdx.x % 32;
    // Rows behind the end of the work tile are those of its last token, which no score sees. Why:
    // ptxas waits at once for a read with a condition.
    const auto token_of = [&](int32_t i) {
      const int row = warp * kRowsOfWarp + lane % kRowsOfWarp;
      return min(first_token<Tile>(work, blocks, i) + row, work.kv_end - 1);
    };
    uint32_t next_page = this->find_page(work, token_of(0));
#pragma unroll 1
    for (int32_t i = 0; i < blocks; ++i) {
      const uint32_t page = this->valid_page(next_page), token = token_of(i);
      const MlaStage<Tile> stage = this->stage_of(i);
      const Rows ckv = rows_of_reads(this->row_address(p_.v, 0, page, token));
      const auto find_next_page = [&] {
        if (i + 1 < blocks) next_page = this->find_page(work, token_of(i + 1));
      };
      const auto prefetch_next = [&] {
        if (i + 1 < blocks) prefetch(this->valid_page(next_page), token_of(i + 1));
      };
      const auto read_kpe = [&](Group& kpe) {
        if constexpr (Tile::kDimKpe > 0) {
          read<1>(rows_of_reads(this->row_address(p_.k, 0, page, token)), 0, kpe);
        }
      };
      Group kpe;
      if constexpr (kScales) {
        // A cache has fewer than 2^31 entries.
        const uint32_t own_place = page * p_.page_size.value + this->entry_of(token);
        read_kpe(kpe);
        find_next_page();
        // Why no longer code without a loop: ptxas mixes all of it, and spills registers.
#pragma unroll 1
        for (int half = 0; half < Tile::kConsumers; ++half) {
          Group groups[kHalfGroups];
#pragma unroll
          for (int j = 0; j < kHalfGroups; ++j) {
            const int group = half * kHalfGroups + j;
            read<kGroupPanels>(ckv, group * kMlaScaleColumns, groups[j]);
            read_scales(own_place, group, groups[j]);
          }
          if (half == 0) prefetch_next();
          this->wait_empty(stage, half);
#pragma unroll
          for (int j = 0; j < kHalfGroups; ++j) {
            convert<kGroupPanels, true>(warp, stage, (half * kHalfGroups + j) * kGroupPanels,
                                        groups[j]);
          }
        }
      } else {
        Group groups[kGroups];
#pragma unroll
        for (int j = 0; j < kGroups; ++j) read<kGroupPanels>(ckv, j * kMlaScaleColumns, groups[j]);
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          if (j == kHalfGroups) {  // There are registers now.
            read_kpe(kpe);
            find_next_page();
          }
          if (j % kHalfGroups == 0) this->wait_empty(stage, j / kHalfGroups);
          convert<kGroupPanels, false>(warp, stage, j * kGroupPanels, groups[j]);
        }
      }
      if constexpr (Tile::kDimKpe > 0) {
        this->wait_empty(stage, 1 - stage.index % 2);
        convert<1, false>(warp, stage, Tile::kCkvPanels, kpe);
      }
      if constexpr (!kScales) prefetch_next();
    }
  }

  // Brings a row of the next block to L2, of which two lanes have a half each. Why: what is on its
  // way to registers is less than memory needs to be busy.
  __device__ __forceinline__ void prefetch(uint32_t page, uint32_t token) const {
    constexpr int kHalf = Tile::kDimCkv / 2;  // bytes
    const int half = threadIdx.x % 32 / kRowsOfWarp;
    const uint64_t row = this->row_address(p_.v, 0, page, token) + half * kHalf;
#pragma unroll
    for (int byte = 0; byte < kHalf; byte += 128) {
      prefetch_to_l2(reinterpret_cast<const void*>(row + byte));
    }
    if (Tile::kDimKpe > 0 && half == 0) {
      prefetch_to_l2(reinterpret_cast<const void*>(this->row_address(p_.k, 0, page, token)));
    }
  }

  // Where the rows of this lane's reads lie.
  struct Rows {
    uint64_t of[kReads];
  };

  // `own`: where the row lies that this lane has looked up.
  static __device__ __forceinline__ Rows rows_of_reads(uint64_t own) {
    const int lane = threadIdx.x % 32;
    Rows rows;
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      rows.of[j] =
          __shfl_sync(0xffffffffu, own, j * kRowsAtOnce + lane / kLanes) + lane % kLanes * 16;
    }
    return rows;
  }

  // Reads kPanels panels from a column on.
  template <int kPanels>
  static __device__ __forceinline__ void read(const Rows& rows, int column, Group& to) {
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        to.x[panel][j] = load_once(rows.of[j] + column + panel * Tile::kPanelColumns);
      }
    }
  }

  // `own`: the place in ckv_scales of the row that this lane has looked up.
  __device__ __forceinline__ void read_scales(uint32_t own, int group, Group& to) const {
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      const uint32_t place =
          __shfl_sync(0xffffffffu, own, j * kRowsAtOnce + threadIdx.x % 32 / kLanes);
      to.scale[j] = __ldg(p_.ckv_scales + uint64_t(place) * kGroups + group);
    }
  }

  // Converts what has been read of kPanels panels, and says that they are full.
  template <int kPanels, bool kScales>
  __device__ __forceinline__ void convert(int warp, const MlaStage<Tile>& stage, int first_panel,
                                          const Group& from) const {
    const int lane = threadIdx.x % 32;
    // Eight lanes store to different banks: two rows, of which these are even chunks.
    const uint32_t target =
        buffers_.stage(stage.index) + first_panel * Tile::kPanelBytes +
        Tile::Panel::offset(warp * kRowsOfWarp + lane / kLanes, lane % kLanes * 2);
    const uint32_t next_chunk = target ^ 16;
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      // A wait that ends at once. Why: ptxas mixes no code across it, for which it would spill.
      if constexpr (kScales) this->wait_empty(stage, first_panel / Tile::kHalfPanels);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const uint4& x = from.x[panel][j];
        const uint32_t offset = panel * Tile::kPanelBytes + j * kRowsAtOnce * 128;
        if constexpr (kScales) {
          store_scaled_as_f16(target + offset, x.x, x.y, from.scale[j]);
          store_scaled_as_f16(next_chunk + offset, x.z, x.w, from.scale[j]);
        } else {
          store_as_f16(target + offset, x.x, x.y);
          store_as_f16(next_chunk + offset, x.z, x.w);
        }
      }
    }
    fence_shared_for_async();
    __syncwarp();
    if (lane < kPanels) {
      mbarrier_arrive(&shared_.full[stage.index][first_panel + lane]);
    }
  }
};

#endif  // __CUDACC__ && PRECAST_SM

}  // namespace precast
