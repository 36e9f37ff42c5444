// SPDX-License-Identifier: Apache-2.0
// Attention for sm_90a: the formula and the layouts of attention/attention.cuh, computed by wgmma
// on tiles that TMA copies.
//
// Threads  A CTA has an SM for itself. Its producer warpgroup finds work tiles and copies Q, K and
//          V; its two or three consumer warpgroups compute 64 packed rows each. They meet at
//          mbarriers alone.
// Traffic  K and V are read once for every tile of packed queries.
// Source   Shah et al., FlashAttention-3, arXiv:2407.08608: warp specialisation and the overlap of
//          softmax and MMAs. PackGQA, split-KV and schedule: attention/attention.cuh.
#pragma once

#include "precast/attention/sm90/convert.cuh"
#include "precast/attention/sm90/copy.cuh"
#include "precast/attention/sm90/mainloop.cuh"
#include "precast/core/launch.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile, bool kConverts = Tile::kConverts>
struct ProducerOf {
  using Type = Sm90CopyProducer<Tile>;
};
template <typename Tile>
struct ProducerOf<Tile, true> {
  using Type = Sm90ConvertProducer<Tile>;
};

// Who computes a tile, what they share, and what a launch passes to them.
template <typename TileType, typename StorageType, typename ProducerType, typename ConsumerType>
struct Sm90RolesOf {
  using Tile = TileType;
  using Params = Sm90AttentionParams;
  using Buffers = Sm90Buffers<Tile>;
  using Storage = StorageType;
  using Producer = ProducerType;
  using Consumer = ConsumerType;

  // One thread calls it.
  static __device__ __forceinline__ void init(const Params& params, Storage& shared) {
    prefetch_tensor_map(&params.q);
    prefetch_tensor_map(&params.k);
    prefetch_tensor_map(&params.v);
    shared.q.init(1, Tile::kConsumerWarps);
    Producer::init(params, shared);
  }
};

template <typename Tile>
using Sm90Roles =
    Sm90RolesOf<Tile, Sm90SharedStorage<Tile>, typename ProducerOf<Tile>::Type, Sm90Consumer<Tile>>;

template <typename Roles>
__global__ __launch_bounds__(Roles::Tile::kCtaThreads,
                             1) void Sm90AttentionKernel(const __grid_constant__
                                                         typename Roles::Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Tile = typename Roles::Tile;
  using Buffers = typename Roles::Buffers;
  extern __shared__ __align__(1024) unsigned char sm90_attention_smem[];
  const Buffers buffers = {shared_address(sm90_attention_smem)};
  using Storage = typename Roles::Storage;
  using Producer = typename Roles::Producer;
  static_assert(sizeof(Storage) <= Tile::kStorageBytes, "kStorageBytes");
  Storage& shared = *reinterpret_cast<Storage*>(sm90_attention_smem + Buffers::kStorageOffset);
  launch_next_grid(params.p.overlap);
  // With three consumers, ptxas spills a few registers because of it.
  if (Tile::kConsumers == 2 && threadIdx.x / 32 == 1) prefetch_plan(params.p.schedule);
  if (threadIdx.x == 0) {
    Roles::init(params, shared);
    shared.work.init(1, Producer::work_readers(params) + Tile::kConsumerWarps);
    shared.combine.begin_clock = clock();
    fence_mbarrier_init();
  }
  __syncthreads();
  wait_on_previous_grid(params.p.overlap);
  // Why a shuffle: the compiler knows then that all lanes of a warp take the same branch.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < 4) {
    decrease_registers<Tile::kProducerRegisters>();
    if (warp == 0) prefetch_sinks(params.p);
    Producer(params, shared, buffers).run(warp);
  } else {
    increase_registers<Tile::kConsumerRegisters>();
    typename Roles::Consumer(params, shared, buffers, warp / 4 - 1).run();
  }
  end_behind_previous_grid(params.p.overlap);
#endif
}

#if !defined(__CUDACC_RTC__)

// Params are AttentionParams or what has more.
template <typename Roles, typename Params>
cudaError_t launch_sm90_roles(const Params& p, bool enable_pdl, cudaStream_t stream) {
  using Tile = typename Roles::Tile;
  typename Roles::Params params;
  cudaError_t error = encode_params<Tile>(params, p);
  if (error != cudaSuccess) return error;
  const auto kernel = Sm90AttentionKernel<Roles>;
  error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(p.schedule.shape.ctas), dim3(Tile::kCtaThreads), enable_pdl, stream,
                params, Tile::kSharedBytes);
}

template <typename Q, typename KV, int kDimQ, int kDimO>
cudaError_t launch_sm90_attention(const AttentionParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.schedule.shape.ctas == 0) return cudaSuccess;
  using Plain = Sm90Roles<Sm90Tile<Q, KV, kDimQ, kDimO, false>>;
  using General = Sm90Roles<Sm90Tile<Q, KV, kDimQ, kDimO, true>>;
  return is_plain(p) ? launch_sm90_roles<Plain>(p, enable_pdl, stream)
                     : launch_sm90_roles<General>(p, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
