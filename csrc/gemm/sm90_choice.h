// SPDX-License-Identifier: Apache-2.0
// The memory of what the GEMMs for sm_90a choose.
#pragma once

#include <array>

#include "precast/gemm/sm90/choose.cuh"

namespace precast {

// What choose_sm90_gemm() says. Why a memory: the model takes longer than the rest of a call, and
// engines call with a few shapes again and again.
template <typename Choice>
Choice known_choice(const Fp8GemmProblem& problem) {
  struct Known {
    Fp8GemmProblem problem;
    Choice choice;
  };
  constexpr size_t kKnown = 256;
  thread_local std::array<Known, kKnown> known = {};
  const uint32_t words[] = {
      static_cast<uint32_t>(problem.kind),   static_cast<uint32_t>(problem.groups),
      static_cast<uint32_t>(problem.tokens), static_cast<uint32_t>(problem.columns),
      static_cast<uint32_t>(problem.depth),  static_cast<uint32_t>(problem.sms)};
  uint32_t hash = 0;
  for (const uint32_t word : words) hash = (hash ^ word) * 0x9e3779b1u;
  Known& here = known[(hash >> 16) % kKnown];
  if (!(here.problem == problem)) here = {problem, choose_sm90_gemm<Choice>(problem)};
  return here.choice;
}

}  // namespace precast
