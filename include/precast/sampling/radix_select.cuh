// SPDX-License-Identifier: Apache-2.0
// Exact thresholds of a row: its k-th largest element, or the weight down to which the largest
// elements hold a share of the mass.
//
// One pass over the row adds up what the elements count in 2048 bins of the ordered keys, from the
// largest down, 1/64 octave each. The CTAs of a cluster read each other's sums of 64 bins, then the
// 64 bins among which the wanted amount is reached. A second pass gathers the elements of that bin,
// a few hundred of the row, and each CTA finishes on the list of all by itself. Where the list is
// too long, the bin is cut into 2048 again. Shares are fixed-point masses, so that no order of
// addition matters.
//
// Small k need no bins: the k-th largest of the slabs' maxima bounds the k-th largest element, and
// few elements reach that.
#pragma once

#include "precast/sampling/radix_candidates.cuh"

namespace precast {

#if defined(__CUDACC__)

// The largest x of the row for which the elements from x up hold `need`: of their number, or of
// their mass. 0 where all do not hold the mass: nothing is cut there. `max` is the largest element,
// `maxima` those of the slabs, which only numbers want; `cleared`: the CTA called clear_bins(). All
// threads of the cluster call and get it. Other CTAs may still read this one's shared memory when
// it returns: an exchange or a barrier of the cluster has to be behind it.
template <typename Row>
__device__ __forceinline__ float select(Row& row, SelectShared& s, int ctas, uint32_t need,
                                        float max_of_row, bool by_mass, float scale,
                                        const float* maxima, bool cleared = false) {
  const float infinity = __int_as_float(0x7f800000);
  const Amount amount = {by_mass, scale};
  const int slabs = row.p.slabs;
  const uint32_t low = to_key(by_mass ? row.weighing.floor : -infinity);
  const uint32_t high = max(to_key(max_of_row), low);
  Keys keys = {high, high - low};
  int most_shift = kFirstShift;
  uint32_t reach = keys.range;  // how far down the bins of the first pass go
  if (threadIdx.x < 2 * kMostGatherings) s.counts[threadIdx.x] = 0;
  bool few = !by_mass && need <= slabs - slabs / 4;
  if (few) {
    keys.range = high - to_key(kth_of_maxima(s, maxima, slabs, need));
    cleared = false;
  } else if (by_mass) {
    // All elements lighter than this hold less than may be cut, but for roundings.
    const uint32_t light = (0x80000000u - need) / row.p.vocab;
    reach = high - max(min(to_key(__fdividef(light, scale)), high), low);
  }
#pragma unroll 1
  for (int gathering = 0;;) {
    if (few) {
      const int count = gather(row, s, &s.counts[2 * gathering++], ctas, keys, amount,
                               by_mass ? nullptr : maxima);
      if (count <= kCandidates) return from_key(find_in_list(s, count, need));
    }
    if (!cleared) {
      clear_bins(s);
      __syncthreads();
    }
    cleared = false;
    Keys covered = {keys.high, min(keys.range, reach)};
    const int shift = min(covered.shift(), most_shift);
    covered.range = min(covered.range, (uint32_t(kBins) << shift) - 1);
    if (by_mass) {
      fill_bins<true>(row, s, covered, shift, scale);
    } else {
      fill_bins<false>(row, s, covered, shift, scale);
    }
    __syncthreads();
    const Bin bin = find_in_row(s, ctas, need);
    need = bin.need;
    if (bin.at >= 0) {
      keys = covered;
      keys.narrow(bin.at, shift);
      if (keys.range == 0) return from_key(keys.high);
      // At least so many elements are in the bin.
      few = bin.amount / kCandidates <= amount(from_key(keys.high));
    } else {
      if (covered.range == keys.range) return by_mass ? 0.0f : -infinity;
      keys.high -= covered.range + 1;
      keys.range -= covered.range + 1;
      reach = keys.range;
      most_shift = kWarpSize;
      few = false;
    }
    if (!few) show_shared(ctas);  // before the bins are cleared
  }
}

#endif  // __CUDACC__

}  // namespace precast
