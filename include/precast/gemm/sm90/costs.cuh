// SPDX-License-Identifier: Apache-2.0
// Generated from python/precast/_plan/gemm_costs.toml by `make generate`; do not edit.
// The costs by which the GEMMs for sm_90a choose their tiles.
#pragma once

namespace precast {

// Clocks, bytes per clock; the source explains each.
// clang-format off
// Of the block-scaled GEMM.
struct Fp8GemmCosts {
  double shared_bytes = 128.0;
  double fill_bytes = 187.0;
  double l2_bytes = 66.6;
  double dram_bytes = 1870.0;
  double start = 4080.0;
  double split_byte = 0.0595;
  double share = 0.12;
  double used_by_4 = 0.928;
  double used_by_8 = 0.903;
  double split[3] = {711.0, 1370.0, 2880.0};
  double consumer[13] = {919.0, 808.0, 730.0, 550.0, 496.0, 482.0, 496.0, 406.0, 722.0, 451.0, 315.0, 275.0, 1350.0};
  double tile[13] = {2550.0, 2600.0, 784.0, 1550.0, 298.0, 996.0, 705.0, 503.0, 3100.0, 455.0, 113.0, 81.1, 1730.0};
};

// Of the GEMM of 16-bit operands.
struct Gemm16Costs {
  double shared_bytes = 128.0;
  double fill_bytes = 63.0;
  double l2_bytes = 139.0;
  double dram_bytes = 2020.0;
  double start = 2220.0;
  double split_byte = 0.0707;
  double share = 0.0646;
  double used_by_4 = 0.809;
  double used_by_8 = 0.764;
  double split[3] = {28.9, 461.0, 344.0};
  double consumer[10] = {929.0, 419.0, 223.0, 231.0, 85.6, 35.0, 43.1, 219.0, 241.0, 383.0};
  double tile[10] = {2260.0, 2400.0, 762.0, 1650.0, 11300.0, 2000.0, 38.2, 8.82, 24.8, 6400.0};
};
// clang-format on

}  // namespace precast
