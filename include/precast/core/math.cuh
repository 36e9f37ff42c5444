// SPDX-License-Identifier: Apache-2.0
// Activation functions in fp32, with the fast exponential and division: relative error below 2e-5
// where the result exceeds 1e-36, far under the rounding of a 16-bit output.
#pragma once

#include "precast/core/types.cuh"

namespace precast {

#if defined(__CUDACC__)

// x / (1 + exp(-x)); below -88 the exponential is infinite and the quotient 0, as it should
// (Hendrycks and Gimpel 2016; Ramachandran et al. 2017).
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// 1 / (1 + exp(-x)), 0 below -88.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// x * Phi(x) with the error function (Hendrycks and Gimpel, arXiv:1606.08415).
__device__ __forceinline__ float gelu(float x) {
  return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

// The tanh approximation of gelu in the same paper: 0.5 x (1 + tanh(u)) = x sigmoid(2 u) with
// u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_tanh(float x) {
  const float two_u = 1.5957691216057308f * x * (1.0f + 0.044715f * x * x);
  return __fdividef(x, 1.0f + __expf(-two_u));
}

#endif  // __CUDACC__

}  // namespace precast
