// SPDX-License-Identifier: Apache-2.0
// What the bindings of attention share: optional vectors, workspaces, the shape of a schedule.
#pragma once

#include <cmath>
#include <limits>

#include "attention/plan_block.h"
#include "core/multiprocessors.h"
#include "core/tensor_matcher.h"
#include "precast/attention/tile.cuh"

namespace precast {

constexpr int64_t kMostInt32 = 0x7fffffff;

// The data of an optional vector of `count` numbers on the device of `with`, or null.
template <typename T>
const T* vector_or_null(const Arg& with, const char* name, const OptionalTensor& tensor,
                        DLDataType dtype, int64_t count) {
  return TensorMatcher(with.op).optional<const T>(tensor, name, [&](const TensorMatch& match) {
    match.same_device(with).dtype(dtype).shape({count}).contiguous();
  });
}

// The tensor that only some mode needs, which then must be there; `reason` names the mode.
PRECAST_ONE_COPY TensorView required(const char* op, const char* name, const OptionalTensor& tensor,
                                     const char* reason) {
  PRECAST_CHECK(tensor.has_value(), ValueError)
      << op << ": " << reason << " needs " << name << ", got None";
  return tensor.value();
}

// Unsigned or signed integers, at least `least` of them.
PRECAST_ONE_COPY void check_integers(const TensorMatch& match, int bits, int64_t least) {
  const Arg& arg = match;
  const DLDataType dtype = arg.tensor.dtype();
  PRECAST_CHECK((dtype.code == kDLInt || dtype.code == kDLUInt) && dtype.bits == bits, ValueError)
      << arg.what() << " must be uint" << bits << " or int" << bits << ", got " << to_string(dtype);
  match.contiguous();
  PRECAST_CHECK(arg.tensor.numel() >= least, ValueError)
      << arg.what() << " must have at least " << least << " elements, got shape "
      << to_string(arg.tensor.shape());
}

// A number that is finite as a float, too.
PRECAST_ONE_COPY float finite_float(const char* op, const char* name, double value) {
  PRECAST_CHECK(std::abs(value) <= std::numeric_limits<float>::max(), ValueError)
      << op << ": " << name << " must be a finite number, got " << value;
  return static_cast<float>(value);
}

// A window as kernels take it: -1 is none.
inline int32_t clamped_window(int64_t window_left) {
  return static_cast<int32_t>(window_left < 0            ? -1
                              : window_left > kMostInt32 ? kMostInt32
                                                         : window_left);
}

// Whether the rows of a tile are those of two neighbouring KV heads. Only where there are enough
// such tiles for all CTAs: otherwise each would be split more often, and short requests lost up to
// half of their speed.
inline bool pairs_heads(const PlanShape& s, int32_t ctas) {
  const int64_t rows = s.q_len_per_req * (s.num_qo_heads / s.num_kv_heads);
  const bool fits = s.block_m == kDecodeBlockM && rows > 0 && 2 * rows <= s.block_m &&
                    may_pair_heads(static_cast<int>(s.head_dim_qk), static_cast<int>(s.head_dim_vo),
                                   static_cast<int>(s.kv_bytes));
  // Results that do not depend on the batch would depend on its size.
  const bool may = s.may_pair_heads != 0 && s.mla == 0 && s.sm90 == 0 && s.disable_split_kv == 0 &&
                   s.fixed_split_size <= 0;
  const int64_t pairs = s.num_kv_heads / 2;
  return fits && may && s.num_kv_heads % 2 == 0 && s.batch_size * pairs * 8 >= int64_t(ctas) * 7;
}

// The shape of a schedule for a kernel of `ctas` CTAs.
PRECAST_ONE_COPY ScheduleShape schedule_shape(const char* op, const PlanShape& s, int32_t ctas) {
  PRECAST_CHECK(s.num_qo_heads % s.num_kv_heads == 0, ValueError)
      << op << ": query heads must be a multiple of KV heads, got " << s.num_qo_heads << " and "
      << s.num_kv_heads;
  ScheduleShape shape = {};
  shape.batch = static_cast<int32_t>(s.batch_size);
  shape.ctas = ctas;
  // A CTA of MLA has all columns of values.
  const int v_splits = s.mla != 0 ? 1 : attention_v_splits(static_cast<int>(s.head_dim_vo));
  // Heads of MLA that fill whole tiles are planned as several KV heads, whose keys are the same.
  // Tiles stand in the order of heads, so CTAs read the same tokens of a request at the same time.
  const bool fills_tiles = s.mla != 0 && s.sm90 != 0 && s.num_qo_heads % s.block_m == 0;
  const int64_t kv_heads = fills_tiles            ? s.num_qo_heads / s.block_m
                           : pairs_heads(s, ctas) ? s.num_kv_heads / 2
                                                  : s.num_kv_heads;
  shape.heads = static_cast<int32_t>(kv_heads * v_splits);
  shape.group_size = static_cast<int32_t>(s.num_qo_heads / kv_heads);
  shape.block_m = static_cast<int32_t>(s.block_m);
  shape.window_left = clamped_window(s.window_left);
  shape.causal = s.causal != 0;
  return shape;
}

}  // namespace precast
