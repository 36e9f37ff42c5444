// SPDX-License-Identifier: Apache-2.0
// Generated from aot_configs/attention.toml by `make generate`; do not edit.
// The tiles that kernels of `attention` exist for.
#pragma once

namespace precast {

// The most CTAs of one kernel that an SM holds.
constexpr int kMaxCtasPerSm = 2;

// The most columns of V that a CTA computes; CTAs share a wider head.
constexpr int kMaxHeadDimV = 256;

struct AttentionTileTraits {
  int head_dim_qk;
  int head_dim_vo;
  int block_m;
  int min_shared_kib;  // a target whose CTAs may have less lacks the tile
};

// clang-format off
constexpr AttentionTileTraits kAttentionTiles[] = {
    {64, 64, 16, 0},
    {64, 64, 64, 0},
    {64, 64, 128, 0},
    {80, 80, 16, 0},
    {80, 80, 64, 0},
    {80, 80, 128, 0},
    {96, 96, 16, 0},
    {96, 96, 64, 0},
    {96, 96, 128, 0},
    {128, 128, 16, 0},
    {128, 128, 64, 0},
    {128, 128, 128, 0},
    {192, 128, 16, 0},
    {192, 128, 64, 0},
    {192, 128, 128, 0},
    {256, 256, 16, 0},
    {256, 256, 64, 0},
    {256, 256, 128, 128},
    {512, 512, 16, 0},
    {512, 512, 64, 0},
};
// clang-format on
constexpr int kNumAttentionTiles = 20;

}  // namespace precast
