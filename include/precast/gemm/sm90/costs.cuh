// SPDX-License-Identifier: Apache-2.0
// Generated from python/precast/_plan/gemm_costs.toml by `make generate`; do not edit.
// The costs by which the block-scaled GEMM for sm_90a chooses its tile.
#pragma once

namespace precast {

// Clocks, bytes per clock; the source explains each. Arrays are indexed by the tile.
// clang-format off
struct Fp8GemmCosts {
  double shared_bytes = 128.0;
  double fill_bytes = 90.0;
  double l2_bytes = 64.0;
  double dram_bytes = 2500.0;
  double start = 2500.0;
  double split = 1500.0;
  double split_byte = 0.02;
  double share = 0.03;
  double used_by_4 = 0.91;
  double used_by_8 = 0.85;
  double consumer[13] = {900.0, 800.0, 700.0, 500.0, 400.0, 400.0, 300.0, 280.0, 500.0, 350.0, 300.0, 280.0, 1100.0};
  double tile[13] = {1200.0, 1000.0, 900.0, 800.0, 700.0, 700.0, 500.0, 450.0, 700.0, 600.0, 500.0, 450.0, 1500.0};
};
// clang-format on

}  // namespace precast
