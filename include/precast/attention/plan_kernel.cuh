// SPDX-License-Identifier: Apache-2.0
// Writes the plan of an attention kernel on the device, so that no length comes to the host.
//
// Layout   attention/plan.cuh
// Threads  the first CTA plans. A thread takes a request, then a tile, then a CTA of the attention
//          kernel, and so on in rounds; sums over requests and tiles are scans of the CTA. Others,
//          if there are any, copy tables meanwhile: the first reads what they copy from.
// Traffic  12 bytes a request and the plan: what counts is latency. Batches of up to kFewTiles
//          keep what they search in shared memory.
// Measured 2026-11-21 on an H200, one graph node: 4.2 us for one request, 4.8 us for 64, 5.2 us for
//          256; 6.0 us for a prefill of 32768 tokens in 1024 tiles.
#pragma once

#include "precast/attention/plan.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/warp.cuh"

namespace precast {

#if defined(__CUDACC__)

constexpr int kPlanThreads = 512;
constexpr int kFewTiles = 2048;

struct PlanShared {
  int64_t warps[kPlanThreads / kWarpSize];
  int64_t costs[kFewTiles + 1];
  int32_t places[kLengthSteps];
  int32_t longest;
};

// Sum of `x` over the threads before, and `total` over all. All threads must call.
__device__ __forceinline__ int64_t sum_before(int64_t x, int64_t& total, PlanShared& shared) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int64_t sum = x;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == kWarpSize - 1) shared.warps[warp] = sum;
  __syncthreads();
  int64_t before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kPlanThreads / kWarpSize; ++i) {
    if (i < warp) before += shared.warps[i];
    total += shared.warps[i];
  }
  __syncthreads();  // Why: the next call writes them.
  return before + sum - x;
}

// Two counts below 2^31 that are summed at once.
__device__ inline int64_t pair_of(int32_t low, int32_t high) { return low | int64_t(high) << 32; }
__device__ inline int32_t low_of(int64_t pair) { return static_cast<int32_t>(pair & 0x7fffffff); }
__device__ inline int32_t high_of(int64_t pair) { return static_cast<int32_t>(pair >> 32); }

class DevicePlan {
 public:
  __device__ DevicePlan(const PlanParams& params, PlanShared& shared)
      : p_(params), shared_(shared), layout_(params.shape.batch, params.shape.ctas) {
    requests_ = reinterpret_cast<PlannedRequest*>(p_.plan + layout_.requests);
  }

  __device__ void write() {
    plan_requests();
    plan_tiles();
    const ScheduleMode mode = choose_mode(p_, sums_);
    ListSums list;
    int32_t chunk = p_.whole ? 0 : p_.chunk;
    if (mode == ScheduleMode::stream) {
      plan_stream();
    } else {
      list = chunk_that_fits(chunk);
      if (chunk > 0) {
        list_chunks(chunk);
      } else {
        list_whole();
      }
    }
    const PlanHeader header = header_of(p_, mode, sums_, list, chunk);
    if (threadIdx.x == 0) *reinterpret_cast<PlanHeader*>(p_.plan) = header;
    int32_t* counters = p_.plan + layout_.counters;
    int64_t count = p_.shape.ctas;
    if (mode == ScheduleMode::list) {
      counters = p_.plan + header.counters_at;
      count = header.ints - header.counters_at;
    }
    for (int64_t i = threadIdx.x; i < count; i += kPlanThreads) counters[i] = 0;
  }

 private:
  // Those with queries, one behind another.
  __device__ void plan_requests() {
    // Sums of tiles in the high bits, over those of requests, never get past them: so many tiles
    // have no room, and more count as so many.
    constexpr int kCountBits = 25;
    const int64_t most = p_.plan_ints / (kItemInts + 2);
    static_assert((int64_t(0x7fffffff) / (kItemInts + 2)) * (kPlanThreads + 1) <
                      int64_t(1) << (63 - kCountBits),
                  "they fit");
    int64_t carry = 0;
    for (int32_t base = 0; base < p_.shape.batch; base += kPlanThreads) {
      const int32_t number = base + threadIdx.x;
      PlannedRequest request = {};
      if (number < p_.shape.batch) request = p_.lengths.request(number, p_.shape.group);
      const bool counts = request.q_len > 0;
      const int64_t tiles = min(int64_t(tiles_of(p_.shape, request.q_len)), most);
      int64_t total;
      const int64_t before = carry + sum_before(counts | tiles << kCountBits, total, shared_);
      const int32_t place = static_cast<int32_t>(before & ((1 << kCountBits) - 1));
      request.tiles_before = static_cast<int32_t>(before >> kCountBits);
      if (counts) requests_[place] = request;
      carry += total;
      carry -= max(int64_t(0), (carry >> kCountBits) - most) << kCountBits;
    }
    sums_.requests = static_cast<int32_t>(carry & ((1 << kCountBits) - 1));
    sums_.tiles = static_cast<int32_t>(carry >> kCountBits);
    // More queries than the workspace has room for: more than q has, for run() would refuse so
    // small a workspace. Nothing is planned.
    if (plan_room(p_.shape, sums_.tiles) > p_.plan_ints) {
      sums_.requests = sums_.tiles = 0;
    }
    costs_ = sums_.tiles <= kFewTiles
                 ? shared_.costs
                 : reinterpret_cast<int64_t*>(p_.plan +
                                              (p_.plan_ints - costs_ints(sums_.tiles)) / 4 * 4);
    __syncthreads();
  }

  // The planned request that a tile of all belongs to.
  __device__ int32_t request_of(int32_t tile) const {
    if (sums_.requests == sums_.tiles) return tile;
    int32_t low = 0, high = sums_.requests;
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      (requests_[middle].tiles_before <= tile ? low : high) = middle;
    }
    return low;
  }

  struct TileOf {
    int32_t index, tile;
    TokenRange tokens;
  };

  __device__ TileOf tile_of(int32_t number) const {
    TileOf of;
    of.index = request_of(number);
    const PlannedRequest& request = requests_[of.index];
    of.tile = number - request.tiles_before;
    of.tokens = tokens_of(p_.shape, request.q_len, request.kv_len, of.tile);
    return of;
  }

  __device__ void plan_tiles() {
    if (threadIdx.x == 0) {
      costs_[0] = 0;
      shared_.longest = 0;
    }
    __syncthreads();
    int32_t longest = 0;
    for (int32_t base = 0; base < sums_.tiles; base += kPlanThreads) {
      const int32_t number = base + threadIdx.x;
      int64_t cost = 0, total;
      if (number < sums_.tiles) cost = cost_of(tile_of(number).tokens);
      const int64_t before = sums_.cost + sum_before(cost, total, shared_);
      if (number < sums_.tiles) costs_[number + 1] = before + cost;
      if (cost > longest) longest = static_cast<int32_t>(cost);
      sums_.cost += total;
    }
    longest = static_cast<int32_t>(__reduce_max_sync(0xffffffffu, longest));
    if (threadIdx.x % kWarpSize == 0) atomicMax(&shared_.longest, longest);
    __syncthreads();
    sums_.longest = shared_.longest;
  }

  __device__ void plan_stream() {
    const Cuts cuts(sums_.cost * p_.shape.heads, ctas_of_line(p_.shape, sums_));
    CtaStart* starts = reinterpret_cast<CtaStart*>(p_.plan + layout_.starts);
    for (int32_t cta = threadIdx.x; cta <= p_.shape.ctas; cta += kPlanThreads) {
      starts[cta] = start_of(p_.shape, cuts, requests_, sums_, costs_, cta);
    }
  }

  __device__ ListSums chunk_that_fits(int32_t& chunk) {
    for (;; chunk = longer_chunk(chunk)) {
      ListSums list;
      if (chunk == 0) {
        list.items = sums_.tiles;
        return list;
      }
      int64_t items = 0, slots = 0;
      for (int32_t number = threadIdx.x; number < sums_.tiles; number += kPlanThreads) {
        const int32_t parts = parts_of(tile_of(number).tokens, chunk);
        items += parts;
        slots += parts > 1 ? parts : 0;
      }
      sum_before(items, list.items, shared_);
      sum_before(slots, list.slots, shared_);
      const int64_t ints =
          layout_.rest + list_ints(p_.shape, sums_, list) + costs_ints(sums_.tiles);
      if (ints <= p_.plan_ints && list.slots * p_.shape.heads <= p_.slots) return list;
    }
  }

  __device__ ListItem* items() const { return reinterpret_cast<ListItem*>(p_.plan + layout_.rest); }

  __device__ void list_chunks(int32_t chunk) {
    int64_t carry = 0;
    for (int32_t base = 0; base < sums_.tiles; base += kPlanThreads) {
      const int32_t number = base + threadIdx.x;
      TileOf of = {};
      int32_t parts = 0;
      if (number < sums_.tiles) {
        of = tile_of(number);
        parts = parts_of(of.tokens, chunk);
      }
      int64_t total;
      const int64_t before =
          carry + sum_before(pair_of(parts, parts > 1 ? parts : 0), total, shared_);
      for (int32_t part = 0; part < parts; ++part) {
        items()[low_of(before) + part] = {of.index, of.tile, part, high_of(before)};
      }
      carry += total;
    }
  }

  // The longest first, by counting; tiles of a step come in any order.
  __device__ void list_whole() {
    for (int i = threadIdx.x; i < kLengthSteps; i += kPlanThreads) shared_.places[i] = 0;
    __syncthreads();
    for (int32_t number = threadIdx.x; number < sums_.tiles; number += kPlanThreads) {
      atomicAdd(&shared_.places[step_of(number)], 1);
    }
    __syncthreads();
    static_assert(kLengthSteps == 2 * kPlanThreads, "a thread has two steps");
    int32_t* mine = shared_.places + 2 * threadIdx.x;
    const int32_t first = mine[0], second = mine[1];
    int64_t total;
    const int32_t before = static_cast<int32_t>(sum_before(first + second, total, shared_));
    mine[0] = before;
    mine[1] = before + first;
    __syncthreads();
    for (int32_t number = threadIdx.x; number < sums_.tiles; number += kPlanThreads) {
      const int32_t index = request_of(number);
      items()[atomicAdd(&shared_.places[step_of(number)], 1)] = {
          index, number - requests_[index].tiles_before, 0, 0};
    }
  }

  __device__ int32_t step_of(int32_t tile) const {
    return length_step(costs_[tile + 1] - costs_[tile], sums_.longest);
  }

  const PlanParams& p_;
  PlanShared& shared_;
  const PlanLayout layout_;
  PlannedRequest* requests_;
  int64_t* costs_;
  LineSums sums_;
};

constexpr int kNumbersPerCta = 4 * kPlanThreads;
constexpr int64_t kMostCopyingCtas = 128;

// The share of CTA `cta` of `ctas` that copy.
__device__ inline void copy_tables(const PlanParams& p, uint32_t cta, uint32_t ctas) {
  const int64_t step = int64_t(ctas) * kPlanThreads;
#pragma unroll
  for (int table = 0; table < kTableCopies; ++table) {
    const TableCopy copy = p.copies[table];
#pragma unroll 4
    for (int64_t i = int64_t(cta) * kPlanThreads + threadIdx.x; i < copy.count; i += step) {
      copy.to[i] = copy.from[i];
    }
  }
}

__global__ __launch_bounds__(kPlanThreads,
                             1) void AttentionPlanKernel(const __grid_constant__ PlanParams p) {
  __shared__ PlanShared shared;
  allow_next_grid();
  wait_for_previous_grid();
  if (blockIdx.x > 0) {
    copy_tables(p, blockIdx.x - 1, gridDim.x - 1);
  } else {
    DevicePlan(p, shared).write();
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the plan and its copies on `stream`. `p.plan_ints` must hold the layout for no tiles.
inline cudaError_t launch_attention_plan(const PlanParams& p, bool enable_pdl,
                                         cudaStream_t stream) {
  int64_t most = 0;
  for (const TableCopy& copy : p.copies) most = copy.count > most ? copy.count : most;
  const int64_t copying = (most + kNumbersPerCta - 1) / kNumbersPerCta;
  const dim3 grid(1 +
                  static_cast<unsigned>(copying < kMostCopyingCtas ? copying : kMostCopyingCtas));
  return launch(AttentionPlanKernel, grid, dim3(kPlanThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
