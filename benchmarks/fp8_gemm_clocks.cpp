// SPDX-License-Identifier: Apache-2.0
// The model by which the block-scaled GEMM for Hopper chooses, as a library for fit_fp8_gemm.py.

#include <cstring>

#include "precast/gemm/sm90/choose.cuh"

using namespace precast;

extern "C" int number_of_choices() { return kNumFp8Choices; }

// For each of `count` problems (tokens, columns, depth), the clocks of all choices; negative for
// one that is not legal. `costs` are those of Fp8GemmCosts in the same order.
extern "C" void clocks_of_choices(const double* costs, int sms, const int* problems, int count,
                                  double* clocks) {
  Fp8GemmCosts given;
  std::memcpy(&given, costs, sizeof(given));
  for (int i = 0; i < count; ++i, problems += 3) {
    const Fp8GemmProblem problem = {TokenGroups::equal, 1,           problems[0],
                                    problems[1],        problems[2], sms};
    for (int number = 0; number < kNumFp8Choices; ++number) {
      const Fp8GemmChoice choice = Fp8GemmChoice::of(number);
      *clocks++ = is_legal(choice, problem.kind) ? sm90_gemm_clocks(choice, problem, given) : -1.0;
    }
  }
}
