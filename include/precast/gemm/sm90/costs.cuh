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
  double fill_bytes = 968.0;
  double l2_bytes = 51.3;
  double dram_bytes = 1980.0;
  double start = 5480.0;
  double split_byte = 0.0598;
  double share = 0.196;
  double used_by_4 = 0.933;
  double used_by_8 = 0.89;
  double missing = 0.000216;
  double split[3] = {484.0, 1380.0, 2000.0};
  double consumer[14] = {670.0, 135.0, 507.0, 384.0, 444.0, 350.0, 300.0, 260.0, 200.0, 272.0, 362.0, 279.0, 191.0, 1020.0};
  double tile[14] = {1310.0, 2700.0, 891.0, 966.0, 298.0, 900.0, 600.0, 400.0, 300.0, 332.0, 1330.0, 272.0, 31.5, 1830.0};
};

// Of the GEMM of 16-bit operands.
struct Gemm16Costs {
  double shared_bytes = 128.0;
  double fill_bytes = 54.5;
  double l2_bytes = 1900.0;
  double dram_bytes = 2050.0;
  double start = 5520.0;
  double split_byte = 0.0574;
  double share = 0.014;
  double used_by_4 = 0.863;
  double used_by_8 = 0.882;
  double missing = 0.0436;
  double split[3] = {53.4, 386.0, 2890.0};
  double consumer[12] = {886.0, 647.0, 13.0, 164.0, 350.0, 5.1, 181.0, 26.0, 88.1, 260.0, 450.0, 300.0};
  double tile[12] = {1410.0, 2780.0, 1590.0, 142.0, 900.0, 726.0, 15.5, 5.38, 82.7, 400.0, 900.0, 900.0};
};

// Of the GEMM of e4m3 operands with scales of rows.
struct ScaledGemmCosts {
  double shared_bytes = 128.0;
  double fill_bytes = 372.0;
  double l2_bytes = 59.0;
  double dram_bytes = 1930.0;
  double start = 6310.0;
  double split_byte = 0.0394;
  double share = 0.235;
  double used_by_4 = 0.751;
  double used_by_8 = 0.578;
  double missing = 0.0145;
  double split[3] = {1440.0, 1970.0, 2360.0};
  double consumer[12] = {787.0, 425.0, 50.1, 171.0, 1070.0, 107.0, 229.0, 94.4, 102.0, 260.0, 300.0, 350.0};
  double tile[12] = {2040.0, 1080.0, 2010.0, 847.0, 2200.0, 2380.0, 25.3, 39.0, 90.6, 400.0, 600.0, 900.0};
};
// clang-format on

}  // namespace precast
