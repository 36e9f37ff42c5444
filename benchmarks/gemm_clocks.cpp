// SPDX-License-Identifier: Apache-2.0
// The models by which the GEMMs for Hopper choose, as a library for fit_gemm.py.

#include <cstring>

#include "precast/gemm/sm90/gemm16_choose.cuh"
#include "precast/gemm/sm90/scaled_choose.cuh"

using namespace precast;

// For each of `count` problems (tokens, columns, depth), the clocks of all choices; negative for
// one that is not legal. `costs` are those of the family in the same order.
template <typename Choice, typename Costs>
static void write_clocks(const double* costs, int sms, const int* problems, int count,
                         double* clocks) {
  Costs given;
  std::memcpy(&given, costs, sizeof(given));
  for (int i = 0; i < count; ++i, problems += 3) {
    const Fp8GemmProblem problem = {TokenGroups::equal, 1,           problems[0],
                                    problems[1],        problems[2], sms};
    for (int number = 0; number < Choice::kChoices; ++number) {
      const Choice choice = Choice::of(number);
      *clocks++ = is_legal(choice, problem.kind) ? sm90_gemm_clocks(choice, problem, given) : -1.0;
    }
  }
}

// The names are those of the ops, with "_few" for the costs of few tokens.
#define COSTS(op, Choice, Which)                                                            \
  extern "C" int op##_choices() { return Choice::kChoices; }                                \
  extern "C" void op##_clocks(const double* costs, int sms, const int* problems, int count, \
                              double* clocks) {                                             \
    write_clocks<Choice, Choice::Family::Which>(costs, sms, problems, count, clocks);       \
  }

COSTS(fp8_gemm_sm90, Fp8GemmChoice, Costs)
COSTS(gemm_sm90, Gemm16Choice, Costs)
COSTS(gemm_sm90_few, Gemm16Choice, FewCosts)
COSTS(scaled_gemm_sm90, ScaledGemmChoice, Costs)
COSTS(scaled_gemm_sm90_few, ScaledGemmChoice, FewCosts)
