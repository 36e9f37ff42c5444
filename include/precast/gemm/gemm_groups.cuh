// SPDX-License-Identifier: Apache-2.0
// What the device reads of groups of tokens: where they begin, and which weight they have.
#pragma once

#include "precast/gemm/gemm_params.cuh"

namespace precast {

#if defined(__CUDACC__)

// Entry i of what says the groups: see TokenGroups.
__device__ __forceinline__ int group_number(const Fp8GemmParams& p, int i) {
  return p.group_info[i];
}
__device__ __forceinline__ int group_number(const GemmParams& p, const void* numbers, int i) {
  if (!p.info_is_int64) return static_cast<const int32_t*>(numbers)[i];
  const int64_t number = static_cast<const int64_t*>(numbers)[i];
  return static_cast<int>(min(max(number, int64_t(-1)), int64_t(0x7fffffff)));
}
__device__ __forceinline__ int group_number(const GemmParams& p, int i) {
  return group_number(p, p.group_info, i);
}

// The weight of a group, or a number that is none.
__device__ __forceinline__ int weight_of_group(const Fp8GemmParams& p, int group) {
  return group < p.groups ? group : -1;
}
__device__ __forceinline__ int weight_of_group(const GemmParams& p, int group) {
  const int weight =
      p.weight_of_group == nullptr ? group : group_number(p, p.weight_of_group, group);
  return weight < p.weights ? weight : -1;
}

#endif  // __CUDACC__

}  // namespace precast
