// SPDX-License-Identifier: Apache-2.0
// Attention for sm_90a whose queries, keys and values are all e4m3: attention/sm90/attention.cuh
// with other producers and consumers. Outputs have 16 bits.
#pragma once

#include "precast/attention/sm90/attention.cuh"
#include "precast/attention/sm90/fp8_producer.cuh"
#include "precast/attention/sm90/fp8_products.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
using Sm90Fp8Roles =
    Sm90RolesOf<Tile, Sm90Fp8Storage<Tile>, Sm90Fp8Producer<Tile>, Sm90Fp8Consumer<Tile>>;

#if !defined(__CUDACC_RTC__)

template <typename O, int kDimQ, int kDimO>
cudaError_t launch_sm90_fp8_attention(const AttentionParams& p, bool enable_pdl,
                                      cudaStream_t stream) {
  if (p.schedule.shape.ctas == 0) return cudaSuccess;
  // Why one kernel for 256 columns: ptxas spills registers of the plain one.
  using Plain = Sm90Fp8Roles<Sm90Fp8Tile<O, kDimQ, kDimO, (kDimO > 128)>>;
  using General = Sm90Fp8Roles<Sm90Fp8Tile<O, kDimQ, kDimO, true>>;
  return is_plain(p) ? launch_sm90_roles<Plain>(p, enable_pdl, stream)
                     : launch_sm90_roles<General>(p, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
