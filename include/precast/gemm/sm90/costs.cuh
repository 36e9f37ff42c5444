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
  double fill_bytes = 1480.0;
  double l2_bytes = 52.3;
  double dram_bytes = 1870.0;
  double start = 4500.0;
  double split_byte = 0.0539;
  double share = 0.276;
  double pair = 300.0;
  double used_by_4 = 0.478;
  double used_by_8 = 0.482;
  double missing = 0.000621;
  double split[3] = {316.0, 658.0, 1010.0};
  double consumer[14] = {303.0, 182.0, 91.6, 107.0, 101.0, 127.0, 22.8, 204.0, 26.8, 204.0, 11.3, 133.0, 67.4, 295.0};
  double tile[14] = {1040.0, 1610.0, 1350.0, 1300.0, 231.0, 1020.0, 338.0, 23.7, 867.0, 255.0, 1230.0, 43.6, 1.21, 972.0};
};

// Of the GEMM of 16-bit operands.
struct Gemm16Costs {
  double shared_bytes = 128.0;
  double fill_bytes = 63.3;
  double l2_bytes = 3800.0;
  double dram_bytes = 2140.0;
  double start = 5160.0;
  double split_byte = 0.0609;
  double share = 0.000301;
  double pair = 216.0;
  double used_by_4 = 0.924;
  double used_by_8 = 0.673;
  double missing = 0.00555;
  double split[3] = {5.6, 443.0, 819.0};
  double consumer[16] = {739.0, 638.0, 44.1, 184.0, 17.5, 1.06, 55.5, 60.5, 283.0, 167.0, 42.9, 27.0, 112.0, 226.0, 44.9, 108.0};
  double tile[16] = {673.0, 1980.0, 437.0, 316.0, 159.0, 255.0, 13.5, 4.3, 48.7, 23.7, 4020.0, 32.5, 751.0, 190.0, 1610.0, 4330.0};
};

// Of the GEMM of few tokens and 16-bit operands.
struct Gemm16FewCosts {
  double shared_bytes = 128.0;
  double fill_bytes = 75.4;
  double l2_bytes = 1220.0;
  double dram_bytes = 2180.0;
  double start = 5370.0;
  double split_byte = 0.0177;
  double share = 0.00115;
  double pair = 39.3;
  double used_by_4 = 0.459;
  double used_by_8 = 0.433;
  double missing = 0.00324;
  double split[3] = {1.26, 162.0, 538.0};
  double consumer[16] = {442.0, 460.0, 17.9, 47.4, 4.03, 0.184, 95.4, 31.9, 266.0, 62.0, 7.15, 30.2, 20.6, 158.0, 7.89, 65.9};
  double tile[16] = {1580.0, 5170.0, 507.0, 197.0, 856.0, 193.0, 24.0, 9.88, 183.0, 66.0, 3300.0, 17.1, 176.0, 47.3, 401.0, 2060.0};
};

// Of the GEMM of e4m3 operands with scales of rows.
struct ScaledGemmCosts {
  double shared_bytes = 128.0;
  double fill_bytes = 9410.0;
  double l2_bytes = 50.6;
  double dram_bytes = 1920.0;
  double start = 4500.0;
  double split_byte = 0.0296;
  double share = 0.00166;
  double pair = 1030.0;
  double used_by_4 = 0.919;
  double used_by_8 = 1.0;
  double missing = 0.00201;
  double split[3] = {137.0, 869.0, 1550.0};
  double consumer[16] = {550.0, 98.8, 291.0, 288.0, 906.0, 286.0, 145.0, 9.69, 216.0, 12.1, 80.1, 248.0, 151.0, 30.8, 113.0, 66.2};
  double tile[16] = {6240.0, 4320.0, 2770.0, 2980.0, 6100.0, 2200.0, 1120.0, 1550.0, 1860.0, 1660.0, 2730.0, 3950.0, 2770.0, 2460.0, 5860.0, 8310.0};
};

// Of the GEMM of few tokens and e4m3 operands with scales of rows.
struct ScaledGemmFewCosts {
  double shared_bytes = 128.0;
  double fill_bytes = 5210.0;
  double l2_bytes = 52.6;
  double dram_bytes = 1940.0;
  double start = 5410.0;
  double split_byte = 0.0407;
  double share = 0.0561;
  double pair = 675.0;
  double used_by_4 = 0.461;
  double used_by_8 = 1.25;
  double missing = 0.00317;
  double split[3] = {125.0, 493.0, 4080.0};
  double consumer[16] = {29.0, 61.0, 107.0, 200.0, 1510.0, 281.0, 24.2, 34.4, 276.0, 19.4, 225.0, 153.0, 41.9, 38.1, 219.0, 73.9};
  double tile[16] = {2180.0, 922.0, 1600.0, 510.0, 935.0, 235.0, 160.0, 1130.0, 279.0, 193.0, 709.0, 3530.0, 327.0, 1790.0, 1090.0, 10600.0};
};
// clang-format on

}  // namespace precast
