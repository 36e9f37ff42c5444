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
  double fill_bytes = 61.7;
  double l2_bytes = 434.0;
  double dram_bytes = 1980.0;
  double start = 5410.0;
  double split_byte = 0.0504;
  double share = 0.0385;
  double used_by_4 = 0.877;
  double used_by_8 = 0.778;
  double split[3] = {170.0, 498.0, 1020.0};
  double consumer[10] = {839.0, 721.0, 49.5, 47.8, 394.0, 20.4, 199.0, 50.1, 286.0, 66.8};
  double tile[10] = {1240.0, 1710.0, 1660.0, 321.0, 2260.0, 1090.0, 72.0, 29.7, 51.0, 1920.0};
};

// Of the GEMM of e4m3 operands with scales of rows.
struct ScaledGemmCosts {
  double shared_bytes = 128.0;
  double fill_bytes = 120.0;
  double l2_bytes = 120.0;
  double dram_bytes = 1950.0;
  double start = 5000.0;
  double split_byte = 0.055;
  double share = 0.06;
  double used_by_4 = 0.9;
  double used_by_8 = 0.85;
  double split[3] = {400.0, 900.0, 1800.0};
  double consumer[10] = {830.0, 580.0, 400.0, 400.0, 500.0, 300.0, 200.0, 150.0, 200.0, 300.0};
  double tile[10] = {1700.0, 1500.0, 900.0, 900.0, 2000.0, 800.0, 150.0, 80.0, 80.0, 900.0};
};
// clang-format on

}  // namespace precast
