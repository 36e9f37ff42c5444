// SPDX-License-Identifier: Apache-2.0
// The params block of an attention plan: a CPU tensor of bytes. Python writes its two options
// structs, pack_plan() checks them with the plan's tensors and fills the rest, and the launches of
// plan() and run() read it. It holds addresses, so whoever has the block keeps the tensors alive.
#pragma once

#include <cstring>
#include <type_traits>

#include "core/tensor_matcher.h"
#include "precast/attention/params.cuh"
#include "precast/attention/plan.cuh"

namespace precast {

// What the division of work depends on. The same fields as PlanShape in
// python/precast/_ops/attention/plan.py; tests/unit/attention/test_plan_block.py compares them.
struct PlanShape {
  int64_t batch_size;
  int64_t rows;           // queries of the batch, -1 where the host does not know them
  int64_t q_len_per_req;  // 0: qo_indptr counts queries
  int64_t page_size;      // 0: keys and values are not in pages
  int64_t num_qo_heads;
  int64_t num_kv_heads;
  int64_t head_dim_qk;
  int64_t head_dim_vo;
  int64_t kv_bytes;
  int64_t block_m;
  int64_t causal;
  int64_t window_left;
  int64_t fixed_split_size;
  int64_t disable_split_kv;
  int64_t plans_itself;    // by attention/self_plan.cuh; the int workspace is split counters
  int64_t sm90;            // for the kernels of attention_sm90, or of mla_sm90
  int64_t mla;             // for the kernels of mla: one KV head, whose values are columns of keys
  int64_t may_pair_heads;  // nothing but causal mask and window changes scores, and keys have no
                           // scales of blocks, so that a tile may have the rows of two KV heads
};

// What the scores of a run depend on; ScoreOptions in plan.py.
struct ScoreOptions {
  int64_t hnd;  // layout of the pages
  int64_t mask_mode;
  int64_t window_left;
  int64_t pos_encoding;
  int64_t token_pos_len;
  double logits_soft_cap;
  double sm_scale;
  double rope_scale;
  double rope_theta;
};

struct PlanBlock {
  PlanShape shape;
  ScoreOptions scores;
  // pack_plan() writes the rest.
  uint64_t magic;
  int64_t device_id;
  int64_t int_bytes, float_bytes;  // of the workspaces
  PlanParams plan;                 // of the planning kernel
  AttentionParams params;          // of the attention kernels, without what a run brings
};

constexpr int64_t kBlockBytes = 1024;  // BLOCK_BYTES in plan.py
static_assert(sizeof(PlanBlock) <= kBlockBytes, "kBlockBytes");
static_assert(std::is_trivially_copyable_v<PlanBlock>, "a block is copied as bytes");

// Says that a block is packed, and by the layout of this build.
constexpr uint64_t kPackedMagic = 0x50524543'00020000 + sizeof(PlanBlock);

PRECAST_ONE_COPY void check_on_host(const Arg& arg) {
  const DLDevice device = arg.tensor.device();
  PRECAST_CHECK(device.device_type == kDLCPU, ValueError)
      << arg.what() << " must be a CPU tensor, got " << device_name(device);
}

PRECAST_ONE_COPY PlanBlock* block_of(const Arg& arg) {
  const TensorMatch block(arg);
  check_on_host(arg);
  block.dtype(kUint8).shape({kBlockBytes}).contiguous();
  PRECAST_CHECK(reinterpret_cast<uint64_t>(data_of(arg.tensor)) % alignof(PlanBlock) == 0,
                ValueError)
      << arg.what() << " must start at a multiple of " << alignof(PlanBlock) << " bytes";
  return block.data<PlanBlock>();
}

PRECAST_ONE_COPY const PlanBlock& packed_block(const Arg& arg) {
  const PlanBlock* block = block_of(arg);
  PRECAST_CHECK(block->magic == kPackedMagic, ValueError)
      << arg.what() << " must be filled by pack_plan() of this build. Fix: call plan()";
  return *block;
}

}  // namespace precast
