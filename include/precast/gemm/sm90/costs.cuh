// SPDX-License-Identifier: Apache-2.0
// Generated from python/precast/_plan/gemm_costs.toml by `make generate`; do not edit.
// The costs by which the block-scaled GEMM for sm_90a chooses its tile.
#pragma once

namespace precast {

// Clocks, bytes per clock; the source explains each.
struct Fp8GemmCosts {
  double shared_bytes = 128.0;
  double l2_bytes = 37.0;
  double dram_bytes = 2500.0;
  double start = 2500.0;
  double block = 300.0;
  double tile = 400.0;
  double tile_column = 4.0;
  double add = 80.0;
  double add_register = 1.1;
  double split = 1500.0;
  double split_byte = 0.02;
  double share = 0.03;
  double used_by_4 = 0.91;
  double used_by_8 = 0.85;
};

}  // namespace precast
