// SPDX-License-Identifier: Apache-2.0
// The producer warps of attention for sm_90a, for keys and values of e4m3. They convert values to
// f16 on their way to shared memory. So they do with keys where wgmma multiplies these in f16, too;
// other keys are copied as they are, by TMA or with cp.async (attention/sm90/tile.cuh says when).
//
// Each of the four warps converts a quarter of the rows, and copies the keys of these rows. A lane
// reads 16 elements at once. All that it reads of a block is on its way while it waits for an empty
// buffer.
//
// Why f16: it holds each e4m3 number exactly, and one instruction converts two. To bf16 it takes
// several.
#pragma once

#include "precast/attention/sm90/producer.cuh"
#include "precast/core/fp8.cuh"

namespace precast {

#if defined(__CUDACC__)

// Reads 16 bytes. They pass by L1, because nobody reads them again.
__device__ __forceinline__ uint4 load_once(uint64_t address) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address));
  return x;
}

// Converts four e4m3 numbers to f16. Why in PTX: the instruction takes either half of a register,
// for which the compiler shifts if it is a variable of its own.
__device__ __forceinline__ void convert_to_f16(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// Stores eight e4m3 numbers as f16, at a multiple of 16.
__device__ __forceinline__ void store_as_f16(uint32_t to, uint32_t first, uint32_t second) {
  uint32_t x[4];
  convert_to_f16(first, x[0], x[1]);
  convert_to_f16(second, x[2], x[3]);
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

template <typename Tile>
class Sm90ConvertProducer : Sm90Producer<Tile> {
  using Base = Sm90Producer<Tile>;
  using Base::buffers_, Base::p_, Base::params_, Base::shared_;
  using Layout = typename Tile::ValueLayout;
  using State = PipelineState<Tile::kStages>;
  static constexpr int kWarps = 4, kRowsOfWarp = Tile::kBlockN / kWarps;
  // A panel has as many elements of a row in f16 as kLanes lanes read in e4m3, 16 each.
  static constexpr int kLanes = Layout::kPanelBytes / 32, kRowsAtOnce = 32 / kLanes;
  static constexpr int kReads = kRowsOfWarp / kRowsAtOnce;  // of a panel
  static constexpr int kKeyPanels = Tile::kConvertsKeys ? Tile::KeyLayout::kPanels : 0;
  static constexpr int kValuePanels = Layout::kPanels;
  static constexpr int kMostPanels = kKeyPanels > kValuePanels ? kKeyPanels : kValuePanels;
  static_assert(!Tile::kConvertsKeys || Tile::KeyLayout::kPanelBytes == Layout::kPanelBytes,
                "keys and values lie alike");
  // What a lane has read of a block of keys or values.
  using Reads = uint4[kReads][kMostPanels];

 public:
  __device__ __forceinline__ Sm90ConvertProducer(const Sm90AttentionParams& params,
                                                 Sm90SharedStorage<Tile>& shared,
                                                 Sm90Buffers<Tile> buffers)
      : Base(params, shared, buffers) {}

  // Each warp that takes part arrives once, but threads where they copy keys with cp.async.
  static __device__ __forceinline__ void init(const Sm90AttentionParams& params,
                                              Sm90SharedStorage<Tile>& shared) {
    const uint32_t copies = params.kv_copy == KvCopy::box    ? 1
                            : params.kv_copy == KvCopy::rows ? kWarpgroupSize
                                                             : kWarps;
    Base::init(shared, Tile::kConvertsKeys ? kWarps : copies, kWarps);
  }
  // The producer warps that read work tiles.
  static __device__ __forceinline__ uint32_t work_readers(const Sm90AttentionParams&) {
    return kWarps;
  }

  __device__ __forceinline__ void run(int warp) {
    this->for_each_work_of_all(warp, [&](const BlockInfo& block) {
      if (block.work.kv_begin < block.work.kv_end) process(warp, block);
    });
  }

 private:
  // Fills the buffers of K and V with the KV blocks of a work tile, the last block first.
  __device__ __forceinline__ void process(int warp, const BlockInfo& block) {
    const WorkTile& work = block.work;
    // The KV block, and the page of this lane's row in it. Rows behind the end of the work tile are
    // those of its last token, which no score sees. Why: ptxas waits at once for a read with a
    // condition, and for one whose result a loop hands on.
    int32_t begin = work.kv_begin + (num_kv_blocks<Tile>(work) - 1) * Tile::kBlockN;
    const auto token = [&] {
      const int row = warp * kRowsOfWarp + threadIdx.x % kRowsOfWarp;
      return min(begin + row, work.kv_end - 1);
    };
    uint32_t page = this->find_page(work, token());
    while (begin >= work.kv_begin) {
      page = this->valid_page(page);
      const uint64_t value = this->row_address(p_.v, block.kv_head, page, token());
      Reads reads;
      if constexpr (Tile::kConvertsKeys) {
        read<kKeyPanels>(this->row_address(p_.k, block.kv_head, page, token()), reads);
      } else {
        copy_keys(warp, block, begin, page, token());
        read<kValuePanels>(value, reads);
      }
      begin -= Tile::kBlockN;
      if (begin >= work.kv_begin) page = this->find_page(work, token());
      if constexpr (Tile::kConvertsKeys) {
        convert<kKeyPanels>(warp, shared_.k, buffers_.k(0), reads);
        read<kValuePanels>(value, reads);
      }
      convert<kValuePanels>(warp, shared_.v, buffers_.v(0), reads);
      ++count_;
    }
  }

  // -- Keys that are only copied ------------------------------------------------------------------

  // Copies this warp's rows of the keys of the KV block at token `begin`. `page` and `token` are
  // those of this lane's row. Keys of no pages are one copy, of warp 0.
  __device__ __forceinline__ void copy_keys(int warp, const BlockInfo& block, int32_t begin,
                                            uint32_t page, uint32_t token) {
    using KeyLayout = typename Tile::KeyLayout;
    if (params_.kv_copy == KvCopy::box && warp != 0) return;
    const State state = State::after(count_);
    const int first_row = warp * kRowsOfWarp;
    uint64_t* const full = &shared_.k.full[state.stage];
    const uint32_t target = buffers_.k(state.stage);
    shared_.k.wait_empty(state, "an empty buffer of K");
    if (params_.kv_copy == KvCopy::rows) {
      this->template copy_rows<KeyLayout, kRowsOfWarp, 1>(
          this->row_address(p_.k, block.kv_head, page, token), target, first_row,
          block.work.kv_end - begin - first_row);
      cp_async_arrive(full);
    } else if (params_.kv_copy == KvCopy::box) {
      this->template copy_box_of_block<KeyLayout>(params_.k, target, full, block, begin);
    } else {
      const int row_of_box = threadIdx.x % 32 * this->rows_of_box() % 32;
      this->template copy_boxes<KeyLayout, kRowsOfWarp>(params_.k, target, full, block, begin,
                                                        first_row,
                                                        __shfl_sync(0xffffffffu, page, row_of_box));
    }
  }

  // -- Keys or values that are converted ----------------------------------------------------------

  // Reads what this lane converts of kPanels panels of its warp's rows. `own` is where the row of
  // this lane lies.
  template <int kPanels>
  static __device__ __forceinline__ void read(uint64_t own, Reads& reads) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const uint64_t from =
          __shfl_sync(0xffffffffu, own, i * kRowsAtOnce + lane / kLanes) + lane % kLanes * 16;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        reads[i][panel] = load_once(from + panel * (Layout::kPanelBytes / 2));
      }
    }
  }

  // Converts what has been read of K or V to a stage of its buffers, the first of which is at
  // `buffer`.
  template <int kPanels>
  __device__ __forceinline__ void convert(int warp, PipelineBarriers<Tile::kStages>& barriers,
                                          uint32_t buffer, const Reads& reads) const {
    constexpr int kStageBytes = Tile::kBlockN * kPanels * Layout::kPanelBytes;
    const State state = State::after(count_);
    const int lane = threadIdx.x % 32;
    barriers.wait_empty(state, "an empty buffer of K or V");
    // Eight lanes store to different banks: two or four rows, of which these are even chunks.
    const uint32_t target = buffer + state.stage * kStageBytes +
                            Layout::offset(warp * kRowsOfWarp + lane / kLanes, lane % kLanes * 2);
    const uint32_t next_chunk = target ^ 16;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const uint4 x = reads[i][panel];
        const uint32_t offset = (panel * Tile::kBlockN + i * kRowsAtOnce) * Layout::kPanelBytes;
        store_as_f16(target + offset, x.x, x.y);
        store_as_f16(next_chunk + offset, x.z, x.w);
      }
    }
    fence_shared_for_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barriers.full[state.stage]);
  }

  uint32_t count_ = 0;  // KV blocks until now
};

#endif  // __CUDACC__

}  // namespace precast
