// SPDX-License-Identifier: Apache-2.0
// The tiles of attention for sm_90a whose queries, keys and values are all e4m3, and their tensor
// maps. attention/sm90/tile.cuh has those of 16 bits; what both have is said there.
//
// Rows of Q, K and V in shared memory are 128 bytes, or 64 where a head dimension is no multiple of
// 128. V is copied to a buffer of its own, and from there the producer transposes it.
#pragma once

#include "precast/attention/sm90/params.cuh"
#include "precast/attention/sm90/pipeline.cuh"
#include "precast/core/fp8.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
struct Sm90Fp8Storage : Sm90SharedStorage<Tile> {
  PipelineBarriers<Tile::kStagedStages> staged;  // V before it is transposed; `v` is V^T
};

// Where V lies before it is transposed: behind everything else.
template <typename Tile>
__device__ __forceinline__ uint32_t staged_values(const Sm90Buffers<Tile>& buffers, int stage) {
  return buffers.base + Sm90Buffers<Tile>::kStorageOffset + Tile::kStorageBytes +
         stage * Tile::kStagedBytes;
}

#endif  // __CUDACC__

#if defined(__CUDACC__) && defined(PRECAST_SM)

// O: the type of outputs.
template <typename O, int kDimQ, int kDimO, bool kIsGeneral>
struct Sm90Fp8Tile {
  using Query = O;  // as the epilogue calls it
  using Element = e4m3;
  static constexpr bool kConverts = false, kConvertsQueries = false;
  static constexpr bool kScalesRows = true;  // scales of heads
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kDimK = kDimQ, kDimV = kDimO;
  static constexpr int kConsumers = sm90_consumers(kDimV, 1);
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kBlockN = 128;  // a row of V^T
  static constexpr int kLeastN = 64;
  static constexpr bool kTakesTurns = false;
  // Whether Q K^T of a block is computed beside P V of the block before it. Registers are too few
  // for it where O has 256 columns, and in general kernels.
  static constexpr bool kOverlaps = !kGeneral && kDimV <= 128;
  static constexpr int kCtaThreads = kWarpgroupSize * (1 + kConsumers);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kProducerRegisters = kDimV > 128 ? 56 : 40;
  static constexpr int kConsumerRegisters = kDimV > 128 ? 224 : 232;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    (1 + kConsumers) * (65536 / kCtaThreads / 8 * 8),
                "a CTA has these registers");

  // A row of a panel, and the panels of a row.
  static constexpr int row_bytes(int dim) { return dim % 128 == 0 ? 128 : 64; }
  static constexpr int kKeyRowBytes = row_bytes(kDimK), kValueRowBytes = row_bytes(kDimV);
  static constexpr int kQueryPanels = kDimK / kKeyRowBytes, kQueryPanel = kKeyRowBytes;
  static constexpr int kQueryPanelBytes = kBlockM * kKeyRowBytes, kQueryRowBytes = kDimK;

  static constexpr int kQueryBytes = kBlockM * kDimK;
  static constexpr int kKeyBytes = kBlockN * kDimK;
  // Columns of ones beside V, as many as the tensor cores take at least.
  static constexpr int kOnes = 8;
  static constexpr int kValueBytes = kBlockN * (kDimV + kOnes);  // of V^T
  static constexpr int kStagedBytes = kBlockN * kDimV;           // of V before
  static constexpr int kStages = kDimK + kDimV > 256 ? 2 : 4;
  static constexpr int kStagedStages = 2;  // of V before it is transposed
  static constexpr int kStorageBytes = 1024;
  static constexpr int kRotaryBytes = 0;
  static constexpr int kBytesOfOneQuery = kQueryBytes + kStages * (kKeyBytes + kValueBytes) +
                                          kStagedStages * kStagedBytes + kStorageBytes;
  static constexpr int kQueryStages = kBytesOfOneQuery + kQueryBytes <= kSmemPerCta ? 2 : 1;
  static constexpr int kSharedBytes = kBytesOfOneQuery + (kQueryStages - 1) * kQueryBytes;
  static_assert(kSharedBytes <= kSmemPerCta, "a CTA has this much shared memory");

  static constexpr int kThreads = kWarpgroupSize * kConsumers;
  static constexpr bool kWarpsSplitKv = false;
  static constexpr int kCombineBatch = 8;
  // Why volatile: a row that is known from the start of the kernel to its end takes a register.
  static __device__ __forceinline__ int thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - kWarpgroupSize;
  }
  static __device__ __forceinline__ void barrier() { named_barrier(1, kThreads); }
};

#if !defined(__CUDACC_RTC__)

inline cudaError_t encode_fp8_cache(TensorMap& map, const AttentionParams& p,
                                    const AttentionCache& cache, int head_dim, int row_bytes,
                                    int block_n) {
  const uint64_t page = uint64_t(cache.page_stride) * 16, entry = uint64_t(cache.entry_stride) * 16,
                 head = uint64_t(cache.head_stride) * 16;
  const uint32_t panels = head_dim / row_bytes;
  const bool has_pages = p.kv_indices != nullptr;
  TensorMapShape shape;
  shape.dim(row_bytes, 0, row_bytes);
  if (has_pages) {
    shape.dim(p.page_size.value, entry, kAtomRows);
  } else {
    shape.dim(p.num_pages, page, block_n);
  }
  shape.dim(panels, row_bytes, panels);
  shape.dim(p.kv_heads, head, 1);
  if (has_pages) shape.dim(p.num_pages, page, 1);
  return encode_tensor_map(map, DType::e4m3, cache.data, shape, row_bytes);
}

template <typename Tile>
cudaError_t encode_fp8_params(Sm90AttentionParams& params, const AttentionParams& p) {
  params.p = p;
  params.kv_copy = choose_kv_copy(p);
  const uint32_t group = p.group_size.value, tokens = p.schedule.shape.block_m / group;
  TensorMapShape q;
  q.dim(Tile::kDimK, 0, Tile::kQueryPanel);
  q.dim(group, uint64_t(p.q_head_stride), group);
  q.dim(p.q_rows, uint64_t(p.q_stride), tokens);
  q.dim(p.kv_heads, uint64_t(p.q_head_stride) * group, 1);
  cudaError_t error = encode_tensor_map(params.q, DType::e4m3, p.q, q, Tile::kKeyRowBytes);
  if (error != cudaSuccess || params.kv_copy == KvCopy::rows) return error;
  error = encode_fp8_cache(params.k, p, p.k, Tile::kDimK, Tile::kKeyRowBytes, Tile::kBlockN);
  if (error != cudaSuccess) return error;
  return encode_fp8_cache(params.v, p, p.v, Tile::kDimV, Tile::kValueRowBytes, Tile::kBlockN);
}

#endif

#endif  // __CUDACC__ && PRECAST_SM

}  // namespace precast
