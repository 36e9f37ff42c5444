// SPDX-License-Identifier: Apache-2.0
// What the kernels share that multiply rows of a mixture of experts by low-rank weights: the pairs
// of a token and an expert, and where the weights of a pair are.
//
//   A pair p is token sorted_token_ids[p] at expert expert_ids[p]; lora_indices says the adapter of
//   each token. A pair has no weights, and is skipped, where its token, its expert or its adapter
//   does not exist (-1, say), or where the table holds the address 0.
#pragma once

#include "precast/core/types.cuh"

namespace precast {

constexpr int kLoraThreads = 128;
constexpr int kLoraVector = 8;  // numbers in 16 bytes
// Why: without a limit ptxas takes so few registers that it adds up one vector before it loads the
// next.
constexpr int kShrinkCtasPerSm = 6;
constexpr int kExpandCtasPerSm = 8;

struct LoraPairs {
  const int64_t* tokens_of;   // [pairs]
  const int64_t* experts_of;  // [pairs]
  const int64_t* loras_of;    // [tokens]
  int64_t tokens;
  uint32_t pairs;
};

// Matrices of one shape for each slice, adapter and expert: at an address of the table, or at
// strides from the base of one of two slices. Strides are in elements.
struct LoraWeights {
  const int64_t* table;  // [slices, experts], addresses of adapter 0; or null
  const void* bases[2];  // without a table
  int64_t expert_stride;
  int64_t lora_stride;
  int64_t experts;
  int64_t loras;
};

#if defined(__CUDACC__)

// Why volatile: loads that do not depend on each other stay together, in front of the branches.
__device__ __forceinline__ int64_t load_index(const int64_t* source) {
  int64_t index;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(index) : "l"(source) : "memory");
  return index;
}

// The adapter of a token, or -1.
__device__ __forceinline__ int64_t lora_of(const LoraPairs& pairs, const LoraWeights& weights,
                                           int64_t token) {
  if (token < 0 || token >= pairs.tokens) return -1;
  const int64_t lora = load_index(pairs.loras_of + token);
  return lora < weights.loras ? lora : -1;
}

// The matrix of a slice, an adapter that exists, and an expert; null where there is none.
template <typename T>
__device__ __forceinline__ const T* weights_of(const LoraWeights& weights, uint32_t slice,
                                               int64_t lora, int64_t expert) {
  if (expert < 0 || expert >= weights.experts) return nullptr;
  const T* matrix =
      static_cast<const T*>(weights.bases[slice & 1]) + expert * weights.expert_stride;
  if (weights.table != nullptr) {
    matrix = reinterpret_cast<const T*>(weights.table[slice * weights.experts + expert]);
    if (matrix == nullptr) return nullptr;
  }
  return matrix + lora * weights.lora_stride;
}

// The product of two vectors of 8 numbers.
__device__ __forceinline__ float dot(const float (&a)[kLoraVector], const float (&b)[kLoraVector]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLoraVector; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

#endif  // __CUDACC__

}  // namespace precast
