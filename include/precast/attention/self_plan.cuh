// SPDX-License-Identifier: Apache-2.0
// Attention without a planning kernel: every CTA finds its own share of the work from the lengths.
//
// A plan in stream_k mode (attention/scheduler.cuh) follows from the costs of the tiles before each
// tile. Where every request has one tile for each head, these are the sums of a batch's lengths,
// which a CTA computes itself sooner than another kernel starts and ends. The work tiles are those
// of a plan, to the last field. What a plan zeroes, the split counters, are zero before a launch
// and after it: the CTA that combines a tile resets them.
//
// Threads  Each thread of the CTA takes the length of a request, in rounds; the first warp sums the
//          costs; its first two lanes find where the CTA and the next one start.
#pragma once

#include "precast/attention/params.cuh"
#include "precast/attention/plan.cuh"
#include "precast/core/load_relaxed.cuh"

namespace precast {

// The most requests that a CTA plans for: it reads all lengths.
constexpr int kMostSelfPlannedRequests = 256;

// Whether CTAs can plan a batch themselves: by tiles of 16 rows, one for each request and head.
PRECAST_HOST_DEVICE constexpr bool can_plan_itself(const PlanParams& p) {
  const int64_t rows = int64_t(p.lengths.q_len_per_req) * p.shape.group_size;
  return p.lengths.qo_indptr == nullptr && rows > 0 && rows <= p.shape.block_m &&
         p.shape.block_m == kDecodeBlockM && p.shape.batch <= kMostSelfPlannedRequests &&
         !p.disable_split && p.split_size == 0 && p.max_partials >= 2 * int64_t(p.shape.ctas);
}

// The tokens of the one tile of a request.
PRECAST_HOST_DEVICE inline KvRange kv_range_of_request(const ScheduleShape& shape,
                                                       const PlannedRequest& request) {
  return kv_range_of_tile(shape, request.q_len, request.kv_len, 0);
}

// Where a CTA starts. Tiles are counted head by head: head * batch + request.
struct TileStart {
  int32_t tile;  // heads * batch if the CTA starts past the last tile
  TileBoundary boundary;
};

// `costs` [batch + 1]: the cost of the tiles of one head before that of each request.
template <typename Cost>
PRECAST_HOST_DEVICE inline TileStart find_tile_start(const ScheduleShape& shape,
                                                     const StreamKPartitionOf<Cost>& partition,
                                                     const int64_t* costs, int32_t cta) {
  TileStart start = {shape.heads * shape.batch, {0, 0, 1}};
  const Cost cost = partition.begin_of(cta);
  if (cost >= partition.total_cost) return start;
  const Cost head_cost = costs[shape.batch];
  const int32_t head = static_cast<int32_t>(cost / head_cost);
  const Cost before = head * head_cost;
  int32_t low = 0, high = shape.batch;  // finds the last request that begins by `cost`
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (before + Cost(costs[middle]) <= cost ? low : high) = middle;
  }
  const int32_t n_blocks =
      static_cast<int32_t>(costs[low + 1] - costs[low] - kTileCost) / kBlockCost;
  const TileBoundary boundary = find_boundary(partition, Cost(before + costs[low]), n_blocks, cost);
  start.tile = head * shape.batch + low;
  if (boundary.n_block > 0 && boundary.n_block == n_blocks) {
    ++start.tile;
  } else {
    start.boundary = boundary;
  }
  return start;
}

// The same from the totals of the batch. Why in 32 bits where they suffice: the GPU has no divide
// instruction, six divisions follow one another, and a CTA that starts late waits for them.
PRECAST_HOST_DEVICE inline TileStart find_tile_start(const ScheduleShape& shape,
                                                     const TileTotals& totals, const int64_t* costs,
                                                     int32_t cta) {
  const int64_t cost = totals.cost * shape.heads;
  const int32_t ctas = num_stream_k_ctas(shape, totals);
  if (cost * (ctas + 1) < (int64_t(1) << 32)) {
    return find_tile_start(shape, StreamKPartitionOf<uint32_t>(cost, ctas), costs, cta);
  }
  return find_tile_start(shape, StreamKPartition(cost, ctas), costs, cta);
}

// Iterates over the work tiles of a CTA as TileScheduler does. One thread of the CTA calls it.
class SelfPlannedScheduler {
 public:
  PRECAST_HOST_DEVICE SelfPlannedScheduler(const ScheduleShape& shape, const BatchLengths& lengths,
                                           int32_t cta, const TileStart& start,
                                           const TileStart& end)
      : shape_(shape), lengths_(lengths), cta_(cta), at_(start), end_(end) {}

  // Returns false if there is no more work.
  PRECAST_HOST_DEVICE bool get_next_work(WorkTile& work) {
    return get_next_work(work, [&](int32_t request_idx) {
      return lengths_.request(request_idx, shape_.group_size, load_relaxed);
    });
  }

  // The same, with `request_of` to say the lengths of a request.
  template <typename RequestOf>
  PRECAST_HOST_DEVICE bool get_next_work(WorkTile& work, const RequestOf& request_of) {
    const bool ends_here = at_.tile == end_.tile;
    if (ends_here ? at_.boundary.n_block >= end_.boundary.n_block : at_.tile > end_.tile) {
      return false;
    }
    const int32_t head = quotient(at_.tile, shape_.batch);
    const PlannedRequest r = request_of(at_.tile - head * shape_.batch);
    const KvRange range = kv_range_of_request(shape_, r);
    const TileBoundary &from = at_.boundary, &to = end_.boundary;
    const int32_t kv_begin = range.begin + from.n_block * kKvBlockSize;
    const int32_t kv_end = ends_here ? range.begin + to.n_block * kKvBlockSize : range.end;
    const int32_t splits = from.n_block > 0 ? from.num_splits : ends_here ? to.num_splits : 1;
    const int32_t first_cta = from.n_block > 0 ? from.first_cta : ends_here ? to.first_cta : cta_;
    // As in TileScheduler; a test compares every field.
    work = {r.request_idx,     head,     0,      r.q_begin,        r.q_len, r.kv_start,
            r.kv_len,          kv_begin, kv_end, cta_ - first_cta, splits,  first_cta,
            2 * first_cta + 1, 2,        1};
    if (ends_here) {
      at_.boundary.n_block = end_.boundary.n_block;
    } else {
      at_.boundary.n_block = 0;
      ++at_.tile;
    }
    return true;
  }

 private:
  ScheduleShape shape_;
  BatchLengths lengths_;
  int32_t cta_;
  TileStart at_, end_;
};

// The kernel of a tile that needs no plan.
template <typename Base>
struct SelfPlannedTile : Base {
  static constexpr bool kPlansItself = true;
};

#if defined(__CUDACC__)

// The lengths from which a thread plans: those of the requests threadIdx.x + i * kThreads.
template <int kThreads>
struct LengthsOfThread {
  static constexpr int kCount = kMostSelfPlannedRequests / kThreads;
  int32_t kv_start[kCount], kv_len[kCount];

  __device__ __forceinline__ explicit LengthsOfThread(const AttentionParams& p) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      kv_start[i] = kv_len[i] = 0;
      const int32_t at = threadIdx.x + i * kThreads;
      if (at >= p.schedule.shape.batch) continue;
      const PlannedRequest r = p.lengths.request(at, p.schedule.shape.group_size, load_relaxed);
      kv_start[i] = r.kv_start;
      kv_len[i] = r.kv_len;
    }
  }

  __device__ __forceinline__ bool differ(const LengthsOfThread& other) const {
    bool differs = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      differs |= (kv_start[i] != other.kv_start[i]) | (kv_len[i] != other.kv_len[i]);
    }
    return differs;
  }
};

// Shared memory of plan_cta(), free after the next barrier.
struct SelfPlanScratch {
  int64_t costs[kMostSelfPlannedRequests + 1];
  int32_t kv_start[kMostSelfPlannedRequests], kv_len[kMostSelfPlannedRequests];

  __device__ __forceinline__ PlannedRequest request(int32_t request_idx, int32_t q_len) const {
    return {request_idx, request_idx * q_len, q_len, kv_start[request_idx], kv_len[request_idx], 0};
  }
};

// The scheduler of this CTA, in its first thread. All threads of the CTA must call it.
template <int kThreads>
__device__ __forceinline__ SelfPlannedScheduler plan_cta(const AttentionParams& p,
                                                         const LengthsOfThread<kThreads>& lengths,
                                                         SelfPlanScratch& scratch) {
  const ScheduleShape& shape = p.schedule.shape;
  const uint32_t batch = shape.batch;
  int64_t* const costs = scratch.costs;
#pragma unroll
  for (int i = 0; i < LengthsOfThread<kThreads>::kCount; ++i) {
    const uint32_t at = threadIdx.x + i * kThreads;
    if (at >= batch) break;
    scratch.kv_start[at] = lengths.kv_start[i];
    scratch.kv_len[at] = lengths.kv_len[i];
    const PlannedRequest request = scratch.request(at, p.lengths.q_len_per_req);
    costs[at + 1] = tile_cost(kv_range_of_request(shape, request));
  }
  if (batch > 32) __syncthreads();  // All others are the first warp's own.
  TileStart start = {};
  if (threadIdx.x < 32) {
    TileTotals totals;
    totals.num_requests = totals.num_tiles = shape.batch;
    for (uint32_t base = 0; base < batch; base += 32) {
      const uint32_t i = base + threadIdx.x, count = min(batch - base, 32u);
      // 32 of the longest requests fit 32 bits.
      static_assert(int64_t(kMaxKvLen) / kKvBlockSize * kBlockCost + kTileCost < 0xffffffffll / 32);
      const uint32_t cost = i < batch ? static_cast<uint32_t>(costs[i + 1]) : 0;
      uint32_t sum = cost;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        if (distance >= count) break;
        const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (threadIdx.x >= distance) sum += other;
      }
      if (i < batch) costs[i + 1] = totals.cost + sum;
      totals.cost += __shfl_sync(0xffffffffu, sum, count - 1);
      const int64_t longest = __reduce_max_sync(0xffffffffu, cost);
      if (longest > totals.max_cost) totals.max_cost = longest;
    }
    if (threadIdx.x == 0) costs[0] = 0;
    __syncwarp();
    if (threadIdx.x < 2) start = find_tile_start(shape, totals, costs, blockIdx.x + threadIdx.x);
    __syncwarp();
  }
  TileStart end;
  end.tile = __shfl_down_sync(0xffffffffu, start.tile, 1);
  const TileBoundary& own = start.boundary;
  end.boundary.n_block = __shfl_down_sync(0xffffffffu, own.n_block, 1);
  end.boundary.first_cta = __shfl_down_sync(0xffffffffu, own.first_cta, 1);
  end.boundary.num_splits = __shfl_down_sync(0xffffffffu, own.num_splits, 1);
  return SelfPlannedScheduler(shape, p.lengths, blockIdx.x, start, end);
}

#endif  // __CUDACC__

}  // namespace precast
