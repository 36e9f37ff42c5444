// SPDX-License-Identifier: Apache-2.0
// What the kernels share that work on the rows of experts: which rows the slots of a token have,
// and how their columns are quantised.
#pragma once

#include "precast/core/types.cuh"

namespace precast {

constexpr int kExpertGroup = 128;     // columns with one scale
constexpr float kExpertEps = 1e-10f;  // the least amax

struct TokenSlots {
  const int32_t* rows;  // [tokens, count], contiguous; a number that is no row says: no expert here
  int count;
  uint32_t legal;  // how many rows there are
};

#if defined(__CUDACC__)

__device__ __forceinline__ int32_t load_number(const int32_t* source) {
  int32_t number;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(number) : "l"(source) : "memory");
  return number;
}

// Slots whose rows a thread loads before it uses the first one.
constexpr int kSlotsAtOnce = 8;

// Loads the rows of kCount slots from `first` on; -1 where there is none.
template <int kCount>
__device__ __forceinline__ void load_slots(const TokenSlots& slots, uint32_t token, int first,
                                           int32_t (&rows)[kCount]) {
  const int32_t* source = slots.rows + int64_t(token) * slots.count + first;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    rows[i] = first + i < slots.count ? load_number(source + i) : -1;
    if (static_cast<uint32_t>(rows[i]) >= slots.legal) rows[i] = -1;
  }
}

// Calls use(row, slot) for each slot of a token that has a row, in order.
template <typename Use>
__device__ __forceinline__ void for_each_slot(const TokenSlots& slots, uint32_t token,
                                              const Use& use) {
  for (int first = 0; first < slots.count; first += kSlotsAtOnce) {
    int32_t rows[kSlotsAtOnce];
    load_slots(slots, token, first, rows);
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      if (rows[i] >= 0) use(int64_t(rows[i]), first + i);
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
