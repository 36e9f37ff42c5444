// SPDX-License-Identifier: Apache-2.0
// MLA for sm_90a: the formula of mla/params.cuh, computed by wgmma on tiles that TMA copies.
//
// Threads  A CTA has an SM for itself. Its producer warpgroup finds work tiles and copies Q and KV
//          blocks; its two consumer warpgroups compute 64 packed rows together, each of them half
//          of the columns of the output (mla/sm90/tile.cuh). They meet at mbarriers.
// Traffic  ckv and kpe are read once for every 64 packed rows: 128 heads read them twice, the
//          second time from L2. CTAs that read the same are clusters (cluster_ctas_of()).
// Splits   as in attention: the CTAs of a tile write partial results and combine them in the same
//          launch (attention/combine.cuh).
// Source   mla/sm90/mainloop.cuh
#pragma once

#include "precast/attention/sm90/attention.cuh"
#include "precast/core/sm90/cluster.cuh"
#include "precast/mla/sm90/convert.cuh"
#include "precast/mla/sm90/mainloop.cuh"

namespace precast {

#if defined(__CUDACC__) && defined(PRECAST_SM)

template <typename Tile, bool kConverts = Tile::kConverts>
struct MlaProducerOf {
  using Type = MlaCopyProducer<Tile>;
};
template <typename Tile>
struct MlaProducerOf<Tile, true> {
  using Type = MlaConvertProducer<Tile>;
};

template <typename TileType>
struct MlaSm90Roles {
  using Tile = TileType;
  using Params = MlaSm90Params;
  using Buffers = MlaSm90Buffers<Tile>;
  using Storage = MlaSm90Storage<Tile>;
  using Producer = typename MlaProducerOf<Tile>::Type;
  using Consumer = MlaConsumers<Tile>;

  // One thread calls it.
  static __device__ __forceinline__ void init(const Params& params, Storage& shared) {
    prefetch_tensor_map(&params.q);
    prefetch_tensor_map(&params.ckv);
    if (Tile::kDimKpe > 0) {
      prefetch_tensor_map(&params.q_pe);
      prefetch_tensor_map(&params.kpe);
    }
    Producer::init(params, shared);
  }
};

#if !defined(__CUDACC_RTC__)

// Threads copy KV blocks, or convert them.
template <typename Q, typename KV, int kDimCkv, int kDimKpe>
cudaError_t launch_mla_sm90_threads(const MlaParams& p, bool enable_pdl, cudaStream_t stream) {
  return launch_sm90_roles<MlaSm90Roles<MlaSm90Tile<Q, KV, kDimCkv, kDimKpe, false>>>(p, enable_pdl,
                                                                                      stream);
}

// TMA copies KV blocks. Does the same as launch_sm90_roles(), in clusters.
template <typename Q, int kDimCkv, int kDimKpe>
cudaError_t launch_mla_sm90_boxes(const MlaParams& p, bool enable_pdl, cudaStream_t stream) {
  using Tile = MlaSm90Tile<Q, Q, kDimCkv, kDimKpe, true>;
  MlaSm90Params params;
  cudaError_t error = encode_params<Tile>(params, p);
  if (error != cudaSuccess) return error;
  const auto kernel = Sm90AttentionKernel<MlaSm90Roles<Tile>>;
  error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  const ScheduleShape& shape = p.schedule.shape;
  const auto launch_in = [&](int cluster) {
    return launch_clusters(kernel, dim3(shape.ctas), dim3(Tile::kCtaThreads), cluster,
                           Tile::kSharedBytes, enable_pdl, stream, params);
  };
  const int cluster = cluster_ctas_of(shape.heads, shape.ctas);
  error = launch_in(cluster);
  // A part of a GPU may have no room for a cluster.
  return cluster > 1 && is_cluster_too_large(error) ? launch_in(1) : error;
}

// `by_threads`: launches the kernel above, which is compiled in another file.
template <typename Q, typename KV, int kDimCkv, int kDimKpe, typename ByThreads>
cudaError_t launch_mla_sm90(const MlaParams& p, bool enable_pdl, cudaStream_t stream,
                            const ByThreads& by_threads) {
  if (p.schedule.shape.ctas == 0) return cudaSuccess;
  if constexpr (sizeof(KV) == sizeof(Q)) {
    if (box_rows_of<kDimKpe>(p) > 0) {
      return launch_mla_sm90_boxes<Q, kDimCkv, kDimKpe>(p, enable_pdl, stream);
    }
  }
  return by_threads(p, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__ && PRECAST_SM

}  // namespace precast
