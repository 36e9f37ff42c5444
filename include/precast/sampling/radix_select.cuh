// SPDX-License-Identifier: Apache-2.0
// Radix selection of the exact threshold of a row: its k-th largest element for top-k, or the
// weight down to which the largest elements hold the top-p share of the mass.
//
// A first pass over the row builds a histogram of 2048 bins of the ordered keys, from the largest
// down, 1/64 octave each. A prefix sum over the histograms of all CTAs finds the bin of the
// threshold. A second pass gathers the elements of this bin, a few hundred of the row, and each CTA
// selects among them by itself. If they are too many, the bin is divided into 2048 bins again.
// Masses are in fixed point, so that the order of addition does not matter.
//
// A small k needs no histogram: the k-th largest of the tile maxima is a lower bound on the k-th
// largest element, and few elements reach it.
#pragma once

#include "precast/sampling/radix_candidates.cuh"

namespace precast {

#if defined(__CUDACC__)

// Returns the largest x of the row such that the amounts of all elements from x up sum to at least
// `target`: their number, or with by_mass their fixed-point mass. Returns 0 if the whole row has
// less mass; the threshold then drops nothing. `tile_maxima` is read only without by_mass.
// `cleared` says that the CTA has called clear_bins(). All threads of the cluster call it and get
// the result. Other CTAs may still read this CTA's shared memory when it returns, so an all-gather
// or a barrier of the cluster must follow.
template <typename Row>
__device__ __forceinline__ float radix_select(Row& row, RadixSelectStorage& s, int ctas,
                                              uint32_t target, float row_max, bool by_mass,
                                              float scale, const float* tile_maxima,
                                              bool cleared = false) {
  const float infinity = __int_as_float(0x7f800000);
  const ItemAmount amount = {by_mass, scale};
  const int num_tiles = row.p.num_tiles;
  const uint32_t low = to_ordered_key(by_mass ? row.weights.threshold : -infinity);
  const uint32_t high = max(to_ordered_key(row_max), low);
  KeyRange keys = {high, high - low};
  int max_shift = kFirstShift;
  // The histogram of the first pass covers keys down to this distance from the maximum.
  uint32_t max_distance = keys.range;
  if (threadIdx.x < 2 * kMaxGathers) s.candidate_counts[threadIdx.x] = 0;
  bool uses_candidates = !by_mass && target <= num_tiles - num_tiles / 4;
  if (uses_candidates) {
    keys.range = high - to_ordered_key(kth_tile_maximum(s, tile_maxima, num_tiles, target));
    cleared = false;
  } else if (by_mass) {
    // All elements below this weight together hold less mass than may be dropped, apart from
    // rounding.
    const uint32_t negligible = (0x80000000u - target) / row.p.vocab_size;
    max_distance = high - max(min(to_ordered_key(__fdividef(negligible, scale)), high), low);
  }
#pragma unroll 1
  for (int num_gathers = 0;;) {
    if (uses_candidates) {
      const int count = gather_candidates(row, s, &s.candidate_counts[2 * num_gathers++], ctas,
                                          keys, amount, by_mass ? nullptr : tile_maxima);
      if (count <= kMaxCandidates) return from_ordered_key(select_from_list(s, count, target));
    }
    if (!cleared) {
      clear_bins(s);
      __syncthreads();
    }
    cleared = false;
    KeyRange covered = {keys.high, min(keys.range, max_distance)};
    const int shift = min(covered.shift(), max_shift);
    covered.range = min(covered.range, (uint32_t(kBins) << shift) - 1);
    if (by_mass) {
      fill_bins<true>(row, s, covered, shift, scale);
    } else {
      fill_bins<false>(row, s, covered, shift, scale);
    }
    __syncthreads();
    const Bin bin = find_bin_in_row(s, ctas, target);
    target = bin.remaining;
    if (bin.index >= 0) {
      keys = covered;
      keys.narrow(bin.index, shift);
      if (keys.range == 0) return from_ordered_key(keys.high);
      // The bin has at least this many elements.
      uses_candidates = bin.amount / kMaxCandidates <= amount(from_ordered_key(keys.high));
    } else {
      if (covered.range == keys.range) return by_mass ? 0.0f : -infinity;
      keys.high -= covered.range + 1;
      keys.range -= covered.range + 1;
      max_distance = keys.range;
      max_shift = kWarpSize;
      uses_candidates = false;
    }
    if (!uses_candidates) publish_smem(ctas);  // Must precede the clearing of the bins.
  }
}

#endif  // __CUDACC__

}  // namespace precast
