// SPDX-License-Identifier: Apache-2.0
// The functions between the two products of an expert.
//
// Source   Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; So et al., Primer,
//          arXiv:2109.08668 (relu2); OpenAI, gpt-oss model card, arXiv:2508.10925 (alpha, beta,
//          limit)
#pragma once

#include "precast/core/host_device.cuh"
#include "precast/core/math.cuh"

namespace precast {

// The values are those of ActivationType in python/precast/_ops/moe/enums.py.
enum class ExpertFunction : int {
  gelu = 0,
  relu = 1,
  silu = 2,
  swiglu = 3,
  geglu = 4,
  swiglu_bias = 5,
  relu2 = 6,
  geglu_tanh = 8,
  identity = 9,
};

PRECAST_HOST_DEVICE constexpr bool is_gated(ExpertFunction function) {
  return function == ExpertFunction::swiglu || function == ExpertFunction::geglu ||
         function == ExpertFunction::swiglu_bias || function == ExpertFunction::geglu_tanh;
}

#if defined(__CUDACC__)

// The numbers of swiglu_bias.
struct SwigluNumbers {
  float alpha = 1.0f, beta = 0.0f, limit = -negative_infinity();
};

// Calls use(f) for the function f(up, gate); NaN stays NaN in every one.
template <typename Use>
__device__ __forceinline__ void use_gated_function(ExpertFunction function,
                                                   const SwigluNumbers& numbers, const Use& use) {
  switch (function) {
    case ExpertFunction::geglu:
      return use([](float up, float gate) { return gelu(gate) * up; });
    case ExpertFunction::geglu_tanh:
      return use([](float up, float gate) { return gelu_tanh(gate) * up; });
    case ExpertFunction::swiglu_bias:
      return use([&](float up, float gate) {
        const float limit = numbers.limit;
        const float x = gate > limit ? limit : gate;
        const float below = up > limit ? limit : up;
        const float u = below < -limit ? -limit : below;
        return x * sigmoid(numbers.alpha * x) * (u + numbers.beta);
      });
    default:
      return use([](float up, float gate) { return silu(gate) * up; });
  }
}

#endif  // __CUDACC__

}  // namespace precast
