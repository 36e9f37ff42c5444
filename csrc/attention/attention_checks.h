// SPDX-License-Identifier: Apache-2.0
// What the bindings of attention share: optional tensors, workspaces, lengths.
#pragma once

#include "attention/plan_block.h"
#include "core/tvm_ffi_utils.h"
#include "precast/attention/tile.cuh"

namespace precast {

// The memory of an optional tensor, or null.
template <typename T>
T* data_or_null(const OptionalTensor& tensor) {
  return tensor.has_value() ? static_cast<T*>(data_of(tensor.value())) : nullptr;
}

PRECAST_ONE_COPY void check_numbers(const Arg& arg, DLDataType dtype, int64_t count) {
  PRECAST_CHECK(same_dtype(arg.tensor.dtype(), dtype), ValueError)
      << arg.what() << " must be " << to_string(dtype) << ", got " << to_string(arg.tensor.dtype());
  check_vector(arg, count);
}

constexpr DLDataType kInt32 = {kDLInt, 32, 1};
constexpr DLDataType kFloat32 = {kDLFloat, 32, 1};
constexpr DLDataType kUint8 = {kDLUInt, 8, 1};

// `count` numbers on the device of `with`, if the tensor is there.
PRECAST_ONE_COPY void check_optional(const char* op, const char* name, const OptionalTensor& tensor,
                                     const Arg& with, DLDataType dtype, int64_t count) {
  if (!tensor.has_value()) return;
  const TensorView& view = tensor.value();
  const Arg arg = {op, name, view};
  check_same_device(arg, with);
  check_numbers(arg, dtype, count);
}

// Numbers that only some mode needs, which then must be there; `reason` names it.
PRECAST_ONE_COPY void check_given(const char* op, const char* name, const OptionalTensor& tensor,
                                  const char* reason) {
  PRECAST_CHECK(tensor.has_value(), ValueError)
      << op << ": " << reason << " needs " << name << ", got None";
}

PRECAST_ONE_COPY void check_wide_numbers(const char* op, const char* name,
                                         const OptionalTensor& tensor, const Arg& with, int bits,
                                         int64_t least) {
  if (!tensor.has_value()) return;
  const TensorView& view = tensor.value();
  const Arg arg = {op, name, view};
  const DLDataType dtype = view.dtype();
  check_same_device(arg, with);
  PRECAST_CHECK((dtype.code == kDLInt || dtype.code == kDLUInt) && dtype.bits == bits, ValueError)
      << arg.what() << " must be uint" << bits << " or int" << bits << ", got " << to_string(dtype);
  check_contiguous(arg);
  PRECAST_CHECK(view.numel() >= least, ValueError)
      << arg.what() << " must have at least " << least << " elements, got shape "
      << to_string(view.shape());
}

// Bytes of a contiguous buffer of bytes that starts at a multiple of 16.
PRECAST_ONE_COPY int64_t check_workspace(const Arg& arg, const Arg& with) {
  const TensorView& t = arg.tensor;
  const DLDataType dtype = t.dtype();
  check_same_device(arg, with);
  PRECAST_CHECK(
      dtype.bits == 8 && dtype.lanes == 1 && (dtype.code == kDLUInt || dtype.code == kDLInt),
      ValueError)
      << arg.what() << " must be uint8 or int8, got " << to_string(dtype);
  check_contiguous(arg);
  PRECAST_CHECK(reinterpret_cast<uint64_t>(data_of(t)) % 16 == 0, ValueError)
      << arg.what() << " must start at a multiple of 16 bytes";
  return t.numel();
}

// Multiprocessors of a device. Why: the runtime takes 0.2 us to say it.
PRECAST_ONE_COPY int multiprocessors(const char* op, int device) {
  constexpr int kDevices = 64;
  static int known[kDevices];  // races write the same number
  if (device < kDevices && known[device] != 0) return known[device];
  int count = 0;
  check_cuda_status(op, cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (device < kDevices) known[device] = count;
  return count;
}

// A window as kernels take it: -1 is none.
inline int32_t clamped_window(int64_t window_left) {
  constexpr int64_t kMost = 0x7fffffff;
  return static_cast<int32_t>(window_left < 0 ? -1 : window_left > kMost ? kMost : window_left);
}

// The shape of a schedule for a kernel of `ctas` CTAs.
PRECAST_ONE_COPY ScheduleShape schedule_shape(const char* op, const PlanShape& s, int32_t ctas) {
  const bool divides = s.num_kv_heads > 0 && s.num_qo_heads % s.num_kv_heads == 0;
  PRECAST_CHECK(divides && s.num_qo_heads > 0, ValueError)
      << op << ": query heads must be a multiple of KV heads, got " << s.num_qo_heads << " and "
      << s.num_kv_heads;
  PRECAST_CHECK(s.batch_size >= 0 && s.batch_size < 1 << 24, ValueError)
      << op << ": the batch must have 0 to " << (1 << 24) - 1 << " requests, got " << s.batch_size;
  ScheduleShape shape = {};
  shape.batch = static_cast<int32_t>(s.batch_size);
  shape.ctas = ctas;
  shape.heads =
      static_cast<int32_t>(s.num_kv_heads * attention_v_splits(static_cast<int>(s.head_dim_vo)));
  shape.group_size = static_cast<int32_t>(s.num_qo_heads / s.num_kv_heads);
  shape.block_m = static_cast<int32_t>(s.tile_rows);
  shape.window_left = clamped_window(s.window_left);
  shape.causal = s.causal != 0;
  return shape;
}

// Bytes of a slot of partial results.
PRECAST_ONE_COPY int64_t slot_bytes(int64_t tile_rows, int64_t head_dim_vo) {
  const int dim = static_cast<int>(head_dim_vo);
  return 4 * attention_partial_floats(static_cast<int>(tile_rows), dim / attention_v_splits(dim));
}

}  // namespace precast
