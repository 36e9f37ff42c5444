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
  double fill_bytes = 2920.0;
  double l2_bytes = 55.3;
  double dram_bytes = 2020.0;
  double start = 5310.0;
  double split_byte = 0.0769;
  double share = 0.295;
  double pair = 50.0;
  double used_by_4 = 0.482;
  double used_by_8 = 0.447;
  double missing = 0.000598;
  double split[3] = {213.0, 381.0, 1450.0};
  double consumer[14] = {496.0, 449.0, 410.0, 315.0, 321.0, 320.0, 73.6, 211.0, 134.0, 197.0, 64.7, 280.0, 171.0, 755.0};
  double tile[14] = {565.0, 1110.0, 360.0, 448.0, 207.0, 237.0, 171.0, 101.0, 944.0, 1530.0, 1380.0, 151.0, 6.39, 637.0};
};

// Of the GEMM of 16-bit operands.
struct Gemm16Costs {
  double shared_bytes = 128.0;
  double fill_bytes = 67.8;
  double l2_bytes = 1100.0;
  double dram_bytes = 2180.0;
  double start = 5120.0;
  double split_byte = 0.0754;
  double share = 0.001;
  double pair = 1200.0;
  double used_by_4 = 0.93;
  double used_by_8 = 0.91;
  double missing = 0.00102;
  double split[3] = {27.1, 790.0, 1980.0};
  double consumer[16] = {181.0, 310.0, 69.0, 63.3, 99.2, 2.32, 25.3, 229.0, 208.0, 28.7, 252.0, 99.4, 60.0, 40.0, 180.0, 250.0};
  double tile[16] = {1080.0, 1140.0, 446.0, 223.0, 260.0, 462.0, 4.68, 5.99, 46.9, 72.0, 1310.0, 89.7, 150.0, 100.0, 900.0, 1000.0};
};

// Of the GEMM of e4m3 operands with scales of rows.
struct ScaledGemmCosts {
  double shared_bytes = 128.0;
  double fill_bytes = 5900.0;
  double l2_bytes = 54.1;
  double dram_bytes = 1960.0;
  double start = 4960.0;
  double split_byte = 0.0474;
  double share = 0.001;
  double pair = 2980.0;
  double used_by_4 = 0.93;
  double used_by_8 = 0.91;
  double missing = 0.00855;
  double split[3] = {324.0, 1250.0, 2390.0};
  double consumer[16] = {123.0, 111.0, 298.0, 156.0, 769.0, 92.2, 130.0, 57.7, 38.3, 7.3, 184.0, 261.0, 100.0, 60.0, 120.0, 120.0};
  double tile[16] = {4030.0, 1680.0, 1210.0, 1950.0, 2440.0, 2210.0, 303.0, 953.0, 2780.0, 610.0, 1470.0, 3050.0, 1000.0, 800.0, 3000.0, 3500.0};
};
// clang-format on

}  // namespace precast
