// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of plans of attention: on the device, on the host, and what they take.
#include "attention/attention_checks.h"
#include "core/ffi_export.h"
#include "core/memory_checks.h"
#include "precast/attention/plan_host.cuh"

namespace precast {

// csrc/attention/attention_plan.cu
int attention_plan_ctas_per_sm(int tile_rows, int head_dim_qk, int head_dim_vo, int kv_bytes);
cudaError_t attention_plan(const PlanParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

// What the entry points have in common besides tensors.
struct Request {
  int64_t batch_size, q_len_per_req, page_size;
  HeadsOfCall heads;
  int64_t head_dim_qk, kv_bytes, tile_rows;
  bool causal;
  int64_t window_left, fixed_split_size;
  bool disable_split_kv;
};

struct LengthTensors {
  const OptionalTensor& qo_indptr;
  const TensorView& kv_indptr;
  const OptionalTensor& kv_last_page_len;
  const OptionalTensor& kv_len;
};

// Params without a plan's memory, for a device of `sms` multiprocessors.
PlanParams params_of(const char* op, const LengthTensors& lengths, const Request& r, int sms) {
  const Arg indptr = {op, "kv_indptr", lengths.kv_indptr};
  check_numbers(indptr, kInt32, r.batch_size + 1);
  check_optional(op, "qo_indptr", lengths.qo_indptr, indptr, kInt32, r.batch_size + 1);
  check_optional(op, "kv_last_page_len", lengths.kv_last_page_len, indptr, kInt32, r.batch_size);
  check_optional(op, "kv_len", lengths.kv_len, indptr, kInt32, r.batch_size);
  constexpr int64_t kMost = 0x7fffffff;
  PRECAST_CHECK(r.page_size >= 0 && r.page_size <= kMost, ValueError)
      << op << ": page_size must be positive, got " << r.page_size;
  PRECAST_CHECK(
      r.page_size == 0 || lengths.kv_last_page_len.has_value() || lengths.kv_len.has_value(),
      ValueError)
      << op << ": pages need kv_last_page_len or kv_len, got neither";
  PRECAST_CHECK(r.q_len_per_req >= 0 && r.q_len_per_req * (r.batch_size + 1) <= kMost, ValueError)
      << op << ": q_len_per_req must be 0 to " << kMost / (r.batch_size + 1) << ", got "
      << r.q_len_per_req;
  PRECAST_CHECK(r.kv_bytes == 1 || r.kv_bytes == 2, ValueError)
      << op << ": keys and values must have elements of 1 or 2 bytes, got " << r.kv_bytes;
  const int per_sm = attention_plan_ctas_per_sm(
      static_cast<int>(r.tile_rows), static_cast<int>(r.head_dim_qk),
      static_cast<int>(r.heads.head_dim_vo), static_cast<int>(r.kv_bytes));
  PRECAST_CHECK(per_sm > 0, ValueError)
      << op << ": there is no kernel of tiles of " << r.tile_rows << " rows for head_dim_qk "
      << r.head_dim_qk << " and head_dim_vo " << r.heads.head_dim_vo;
  PlanParams p = {};
  p.shape = shape_of(op, r.heads, r.batch_size, r.tile_rows, sms * per_sm, r.causal, r.window_left);
  p.lengths.qo_indptr = data_or_null<const int32_t>(lengths.qo_indptr);
  p.lengths.kv_indptr = static_cast<const int32_t*>(data_of(lengths.kv_indptr));
  p.lengths.last_page_len = data_or_null<const int32_t>(lengths.kv_last_page_len);
  p.lengths.kv_len = data_or_null<const int32_t>(lengths.kv_len);
  p.lengths.q_len_per_req = static_cast<int32_t>(r.q_len_per_req);
  p.lengths.page_size = static_cast<int32_t>(r.page_size);
  p.disable_split = r.disable_split_kv;
  if (r.fixed_split_size > 0) {
    const int64_t page = r.page_size > 0 ? r.page_size : 1;
    const int64_t most = (int64_t(1) << 30) / page;
    const int64_t pages = r.fixed_split_size < most ? r.fixed_split_size : most;
    p.split_size =
        static_cast<int32_t>((pages * page + kKvBlockSize - 1) / kKvBlockSize * kKvBlockSize);
  }
  return p;
}

// The least int32 of a workspace for a plan of `batch` requests without any.
int64_t least_ints(const PlanParams& p) { return min_plan_ints(p.shape, 0); }

// Params of a plan that goes into workspaces.
PlanParams params_into(const char* op, const LengthTensors& lengths, const Request& r,
                       const TensorView& int_workspace, const TensorView& float_workspace) {
  const Arg indptr = {op, "kv_indptr", lengths.kv_indptr};
  const Arg ints = {op, "int_workspace", int_workspace};
  const Arg floats = {op, "float_workspace", float_workspace};
  check_cuda(indptr);
  PlanParams p =
      params_of(op, lengths, r, multiprocessors(op, lengths.kv_indptr.device().device_id));
  p.max_ints = check_workspace(ints, indptr) / 4;
  if (p.max_ints > 0x7fffffff) p.max_ints = 0x7fffffff;
  p.max_partials = check_workspace(floats, indptr) / slot_bytes(r.tile_rows, r.heads.head_dim_vo);
  check_memory_apart(TensorMemory(floats), TensorMemory(ints));
  PRECAST_CHECK(p.max_ints >= least_ints(p), ValueError)
      << op << ": int_workspace must have at least " << 4 * least_ints(p) << " bytes for "
      << r.batch_size << " requests, got " << 4 * p.max_ints;
  p.plan = static_cast<int32_t*>(data_of(int_workspace));
  return p;
}

void plan(OptionalTensor qo_indptr, TensorView kv_indptr, OptionalTensor kv_last_page_len,
          OptionalTensor kv_len, TensorView int_workspace, TensorView float_workspace,
          int64_t batch_size, int64_t q_len_per_req, int64_t page_size, int64_t num_qo_heads,
          int64_t num_kv_heads, int64_t head_dim_qk, int64_t head_dim_vo, int64_t kv_bytes,
          int64_t tile_rows, bool causal, int64_t window_left, int64_t fixed_split_size,
          bool disable_split_kv, bool enable_pdl) {
  const Request request = {
      batch_size,  q_len_per_req,    page_size,       {num_qo_heads, num_kv_heads, head_dim_vo},
      head_dim_qk, kv_bytes,         tile_rows,       causal,
      window_left, fixed_split_size, disable_split_kv};
  const PlanParams p = params_into("plan", {qo_indptr, kv_indptr, kv_last_page_len, kv_len},
                                   request, int_workspace, float_workspace);
  launch_on(PRECAST_ARG("plan", kv_indptr),
            [&](cudaStream_t stream) { return attention_plan(p, enable_pdl, stream); });
}

// The copy of a table into a buffer, if there are both.
TableCopy copy_of(const Arg& with, const char* name, const OptionalTensor& table,
                  const char* buffer_name, const OptionalTensor& buffer) {
  if (!table.has_value() || !buffer.has_value()) return {};
  const TensorView &from = table.value(), &to = buffer.value();
  for (const Arg& arg : {Arg{with.op, name, from}, Arg{with.op, buffer_name, to}}) {
    check_same_device(arg, with);
    check_numbers(arg, kInt32, arg.tensor.numel());
  }
  PRECAST_CHECK(to.numel() >= from.numel(), ValueError)
      << with.op << ": " << buffer_name << " must have at least the " << from.numel()
      << " elements of " << name << ", got shape " << to_string(to.shape());
  return {static_cast<const int32_t*>(data_of(from)), static_cast<int32_t*>(data_of(to)),
          from.numel()};
}

// plan(), and copies of what it reads and of the pages into the buffers of a CUDA graph; a buffer
// that is None is filled already.
void fill_and_plan(OptionalTensor qo_indptr, TensorView kv_indptr, OptionalTensor kv_last_page_len,
                   OptionalTensor kv_indices, OptionalTensor qo_indptr_buffer,
                   OptionalTensor kv_indptr_buffer, OptionalTensor kv_last_page_len_buffer,
                   OptionalTensor kv_indices_buffer, TensorView int_workspace,
                   TensorView float_workspace, int64_t batch_size, int64_t q_len_per_req,
                   int64_t page_size, int64_t num_qo_heads, int64_t num_kv_heads,
                   int64_t head_dim_qk, int64_t head_dim_vo, int64_t kv_bytes, int64_t tile_rows,
                   bool causal, int64_t window_left, int64_t fixed_split_size,
                   bool disable_split_kv, bool enable_pdl) {
  const Request request = {
      batch_size,  q_len_per_req,    page_size,       {num_qo_heads, num_kv_heads, head_dim_vo},
      head_dim_qk, kv_bytes,         tile_rows,       causal,
      window_left, fixed_split_size, disable_split_kv};
  const Arg indptr = PRECAST_ARG("fill_and_plan", kv_indptr);
  const OptionalTensor no_kv_len, kv_starts = kv_indptr;
  PlanParams p = params_into(indptr.op, {qo_indptr, kv_indptr, kv_last_page_len, no_kv_len},
                             request, int_workspace, float_workspace);
  p.copies[0] = copy_of(indptr, "qo_indptr", qo_indptr, "qo_indptr_buffer", qo_indptr_buffer);
  p.copies[1] = copy_of(indptr, "kv_indptr", kv_starts, "kv_indptr_buffer", kv_indptr_buffer);
  p.copies[2] = copy_of(indptr, "kv_last_page_len", kv_last_page_len, "kv_last_page_len_buffer",
                        kv_last_page_len_buffer);
  p.copies[3] = copy_of(indptr, "kv_indices", kv_indices, "kv_indices_buffer", kv_indices_buffer);
  launch_on(indptr, [&](cudaStream_t stream) { return attention_plan(p, enable_pdl, stream); });
}

// Bytes of the float workspace and of the int workspace for lengths on the host, and of the plan.
void workspace_size(OptionalTensor qo_indptr, TensorView kv_indptr, OptionalTensor kv_last_page_len,
                    OptionalTensor kv_len, TensorView sizes, int64_t batch_size,
                    int64_t q_len_per_req, int64_t page_size, int64_t num_qo_heads,
                    int64_t num_kv_heads, int64_t head_dim_qk, int64_t head_dim_vo,
                    int64_t kv_bytes, int64_t tile_rows, bool causal, int64_t window_left,
                    int64_t fixed_split_size, bool disable_split_kv, int64_t sm_count) {
  const Arg indptr = PRECAST_ARG("workspace_size", kv_indptr);
  const Arg bytes = PRECAST_ARG("workspace_size", sizes);
  PRECAST_CHECK(kv_indptr.device().device_type == kDLCPU, ValueError)
      << indptr.what() << " must be a CPU tensor, got " << device_name(kv_indptr.device());
  check_same_device(bytes, indptr);
  check_numbers(bytes, {kDLInt, 64, 1}, 3);
  PRECAST_CHECK(sm_count > 0 && sm_count < 1 << 16, ValueError)
      << "workspace_size: sm_count must be positive, got " << sm_count;
  const Request request = {
      batch_size,  q_len_per_req,    page_size,       {num_qo_heads, num_kv_heads, head_dim_vo},
      head_dim_qk, kv_bytes,         tile_rows,       causal,
      window_left, fixed_split_size, disable_split_kv};
  const PlanParams p = params_of("workspace_size", {qo_indptr, kv_indptr, kv_last_page_len, kv_len},
                                 request, static_cast<int>(sm_count));
  const HostPlan made = plan_on_host(p);
  const int64_t ints = static_cast<int64_t>(made.ints.size());
  // Whether a plan has room for parts is asked before it is known how many CTAs will have work.
  const bool stream = made.header.mode == ScheduleMode::stream_k;
  const int64_t slots = stream ? 2 * int64_t(p.shape.ctas) : made.header.num_partials;
  // What run() asks for, which knows the queries alone.
  const int64_t tiles = made.num_queries * p.shape.group_size / p.shape.block_m + p.shape.batch;
  int64_t* written = static_cast<int64_t*>(data_of(sizes));
  written[0] = slots * slot_bytes(tile_rows, head_dim_vo);
  written[1] = 4 * std::max(ints + made.scratch_ints, min_plan_ints(p.shape, tiles));
  written[2] = 4 * ints;
}

}  // namespace

PRECAST_EXPORT(plan, plan)
PRECAST_EXPORT(fill_and_plan, fill_and_plan)
PRECAST_EXPORT(workspace_size, workspace_size)

}  // namespace precast
