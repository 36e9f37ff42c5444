// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of plans of attention: the params block, the launch, and what they take.
#include <cmath>
#include <limits>

#include "attention/attention_checks.h"
#include "attention/plan_block.h"
#include "core/ffi_export.h"
#include "precast/attention/plan_host.cuh"
#include "precast/attention/self_plan.cuh"
#include "precast/attention/sm90/tile.cuh"
#include "precast/mla/params.cuh"

namespace precast {

// csrc/attention/attention_plan.cu
int attention_plan_ctas_per_sm(int block_m, int head_dim_qk, int head_dim_vo, int kv_bytes);
int mla_plan_ctas_per_sm(int block_m, int head_dim_ckv, int head_dim_kpe, int kv_bytes);
cudaError_t attention_plan(const PlanParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

struct LengthTensors {
  const OptionalTensor& qo_indptr;
  const TensorView& kv_indptr;
  const OptionalTensor& kv_last_page_len;
  const OptionalTensor& kv_len;
};

// The tensors that change scores.
struct ScoreTensors {
  const OptionalTensor& packed_mask;
  const OptionalTensor& mask_indptr;
  const OptionalTensor& alibi_slopes;
  const OptionalTensor& prefix_len;
  const OptionalTensor& token_pos;
};

// Everything behind this computes in 32 bits.
void check_ranges(const char* op, const PlanShape& s) {
  constexpr int64_t kMostRequests = (1 << 24) - 1, kMostHeads = 1 << 16;
  const struct {
    const char* name;
    int64_t value, least, most;
  } fields[] = {
      {"batch_size", s.batch_size, 0, kMostRequests},
      {"rows", s.rows, -1, kMostInt32},
      {"q_len_per_req", s.q_len_per_req, 0, kMostInt32},
      {"page_size", s.page_size, 0, kMostInt32},
      {"num_qo_heads", s.num_qo_heads, 1, kMostHeads},
      {"num_kv_heads", s.num_kv_heads, 1, kMostHeads},
      {"head_dim_qk", s.head_dim_qk, 1, kMostInt32},
      {"head_dim_vo", s.head_dim_vo, 1, kMostInt32},
      {"kv_bytes", s.kv_bytes, 1, 2},
      {"block_m", s.block_m, 1, kMostInt32},
  };
  for (const auto& field : fields) {
    PRECAST_CHECK(field.value >= field.least && field.value <= field.most, ValueError)
        << op << ": " << field.name << " must be " << field.least << " to " << field.most
        << ", got " << field.value;
  }
}

// CTAs of the kernel that runs a plan which an SM holds; 0 if there is no such kernel.
int ctas_per_sm(const PlanShape& s) {
  const int block_m = static_cast<int>(s.block_m), kv_bytes = static_cast<int>(s.kv_bytes);
  const int dim_qk = static_cast<int>(s.head_dim_qk), dim_vo = static_cast<int>(s.head_dim_vo);
  if (s.mla != 0) {
    if (s.num_kv_heads != 1) return 0;
    return s.sm90 != 0 ? block_m == kMlaSm90BlockM
                       : mla_plan_ctas_per_sm(block_m, dim_vo, dim_qk - dim_vo, kv_bytes);
  }
  if (s.sm90 == 0) return attention_plan_ctas_per_sm(block_m, dim_qk, dim_vo, kv_bytes);
  const int group = static_cast<int>(s.num_qo_heads / s.num_kv_heads);
  return group > 0 && block_m == sm90_block_m(dim_vo, kv_bytes, group);
}

// Params without a plan's memory, for a device of `sms` multiprocessors.
PlanParams params_of(const char* op, const LengthTensors& lengths, const PlanShape& s, int sms) {
  check_ranges(op, s);
  const int64_t batch = s.batch_size;
  const TensorMatch indptr = TensorMatcher(op)(lengths.kv_indptr, "kv_indptr");
  indptr.dtype(kInt32).shape({batch + 1}).contiguous();
  const auto optional = [&](const char* name, const OptionalTensor& tensor, int64_t count) {
    return vector_or_null<int32_t>(indptr, name, tensor, kInt32, count);
  };
  BatchLengths tables = {};
  tables.qo_indptr = optional("qo_indptr", lengths.qo_indptr, batch + 1);
  tables.kv_indptr = indptr.data<const int32_t>();
  tables.last_page_len = optional("kv_last_page_len", lengths.kv_last_page_len, batch);
  tables.kv_len = optional("kv_len", lengths.kv_len, batch);
  tables.q_len_per_req = static_cast<int32_t>(s.q_len_per_req);
  tables.page_size = static_cast<int32_t>(s.page_size);
  PRECAST_CHECK(
      s.page_size == 0 || lengths.kv_last_page_len.has_value() || lengths.kv_len.has_value(),
      ValueError)
      << op << ": pages need kv_last_page_len or kv_len, got neither";
  PRECAST_CHECK(s.q_len_per_req * (batch + 1) <= kMostInt32, ValueError)
      << op << ": q_len_per_req must be 0 to " << kMostInt32 / (batch + 1) << ", got "
      << s.q_len_per_req;
  const int per_sm = ctas_per_sm(s);
  PRECAST_CHECK(per_sm > 0, ValueError)
      << op << ": there is no kernel of tiles of " << s.block_m << " rows for head_dim_qk "
      << s.head_dim_qk << " and head_dim_vo " << s.head_dim_vo;
  PlanParams p = {};
  p.shape = schedule_shape(op, s, sms * per_sm);
  p.lengths = tables;
  p.disable_split = s.disable_split_kv != 0;
  p.always_stream_k = s.mla != 0;  // A tile of a decode has one request's tokens, which are many.
  p.has_neighbours = s.mla != 0 && s.sm90 != 0;
  if (s.fixed_split_size > 0) {
    const int64_t page = s.page_size > 0 ? s.page_size : 1;
    const int64_t most = (int64_t(1) << 30) / page;
    const int64_t pages = s.fixed_split_size < most ? s.fixed_split_size : most;
    p.split_size =
        static_cast<int32_t>((pages * page + kKvBlockSize - 1) / kKvBlockSize * kKvBlockSize);
  }
  return p;
}

// Of the normal floats: the inverse of such a number is one, too.
bool is_positive(double value) {
  return value >= std::numeric_limits<float>::min() && value <= std::numeric_limits<float>::max();
}

// Masks, positions and scales of all runs; `with` is a tensor on the plan's device.
void pack_scores(AttentionParams& p, const PlanBlock& block, const ScoreTensors& t,
                 const Arg& with) {
  const char* op = with.op;
  const TensorMatcher match(op);
  const ScoreOptions& o = block.scores;
  const int64_t batch = block.shape.batch_size, planned = block.shape.window_left;
  PRECAST_CHECK(o.mask_mode >= 0 && o.mask_mode <= 3, ValueError)
      << op << ": mask_mode must be 0 to 3, got " << o.mask_mode;
  PRECAST_CHECK(o.pos_encoding >= 0 && o.pos_encoding <= 2, ValueError)
      << op << ": pos_encoding must be 0 to 2, got " << o.pos_encoding;
  PRECAST_CHECK(!block.shape.causal || o.mask_mode % 2 == 1, ValueError)
      << op << ": mask_mode must be causal (1) or multi-item (3) as plan() had it, got "
      << o.mask_mode << "; plan again with causal=False";
  PRECAST_CHECK(planned < 0 || (o.window_left >= 0 && o.window_left <= planned), ValueError)
      << op << ": window_left must be 0 to " << planned << " as plan() had it, got "
      << o.window_left << "; plan again with the wider window";
  p.mask = static_cast<AttentionMask>(o.mask_mode);
  p.positions = static_cast<PositionEncoding>(o.pos_encoding);
  if (p.mask == AttentionMask::custom) {
    const TensorView bits = required(op, "packed_mask", t.packed_mask, "a custom mask");
    const TensorMatch mask = match(bits, "packed_mask");
    mask.same_device(with).dtype(kUint8);
    if (bits.ndim() == 2) {  // of drafts
      Dim row_bytes("bytes", 1);
      mask.shape({block.shape.rows, row_bytes});
      PRECAST_CHECK(row_bytes <= kMostInt32, ValueError)
          << op << ": packed_mask must have rows of at most " << kMostInt32 << " bytes, got shape "
          << to_string(bits.shape());
      p.mask_row_bytes = static_cast<int32_t>(row_bytes);
    } else {
      Dim bytes("bytes");
      mask.shape({bytes});
      const TensorView bounds = required(op, "mask_indptr", t.mask_indptr, "a custom mask");
      p.mask_indptr = match(bounds, "mask_indptr")
                          .same_device(with)
                          .dtype(kInt32)
                          .shape({batch + 1})
                          .contiguous()
                          .data<const int32_t>();
    }
    p.packed_mask = mask.contiguous().data<const uint8_t>();
    p.mask_bytes = bits.numel();
  }
  if (p.mask == AttentionMask::multi_item) {
    const TensorView prefixes = required(op, "prefix_len", t.prefix_len, "multi-item scoring");
    const TensorView places = required(op, "token_pos", t.token_pos, "multi-item scoring");
    PRECAST_CHECK(o.token_pos_len >= 0 && o.token_pos_len <= kMostInt32, ValueError)
        << op << ": token_pos_len must not be negative, got " << o.token_pos_len;
    const TensorMatch prefix_len = match(prefixes, "prefix_len").same_device(with);
    const TensorMatch token_pos = match(places, "token_pos").same_device(with);
    check_integers(prefix_len, 32, batch);
    check_integers(token_pos, 16, batch * o.token_pos_len);
    p.prefix_len = prefix_len.data<const uint32_t>();
    p.token_pos = token_pos.data<const uint16_t>();
    p.token_pos_len = static_cast<int32_t>(o.token_pos_len);
  }
  if (p.positions == PositionEncoding::rope) {
    PRECAST_CHECK(is_positive(o.rope_scale) && is_positive(o.rope_theta), ValueError)
        << op << ": rope_scale and rope_theta must be positive and finite, got " << o.rope_scale
        << " and " << o.rope_theta;
    p.rope_inverse_scale = static_cast<float>(1.0 / o.rope_scale);
    p.rope_log2_theta = static_cast<float>(std::log2(o.rope_theta));
  }
  if (p.positions == PositionEncoding::alibi) {
    const TensorView slopes = required(op, "alibi_slopes", t.alibi_slopes, "ALiBi");
    p.alibi_slopes = match(slopes, "alibi_slopes")
                         .same_device(with)
                         .dtype(DType::f32)
                         .shape({block.shape.num_qo_heads})
                         .contiguous()
                         .data<const float>();
  }
  p.window_left = clamped_window(o.window_left);
  finite_float(op, "sm_scale", o.sm_scale);  // run() multiplies it with its own factor.
  const float soft_cap = finite_float(op, "logits_soft_cap", o.logits_soft_cap);
  p.soft_cap = soft_cap > 0 ? soft_cap : 0.0f;
}

// Checks a buffer of bytes and returns how many there are.
int64_t check_workspace(const Arg& arg, const Arg& with) {
  const DLDataType dtype = arg.tensor.dtype();
  check_same_device(arg, with);
  PRECAST_CHECK(
      dtype.bits == 8 && dtype.lanes == 1 && (dtype.code == kDLUInt || dtype.code == kDLInt),
      ValueError)
      << arg.what() << " must be uint8 or int8, got " << to_string(dtype);
  TensorMatch(arg).contiguous().aligned();
  return arg.tensor.numel();
}

// Bytes of a partial result.
int64_t partial_bytes(const PlanShape& s) {
  const int dim = static_cast<int>(s.head_dim_vo);
  if (s.mla != 0) return 4 * attention_partial_floats(static_cast<int>(s.block_m), dim);
  const int rows = s.sm90 != 0 ? 64 * sm90_consumers(dim, static_cast<int>(s.kv_bytes))
                               : static_cast<int>(s.block_m);
  return 4 * attention_partial_floats(rows, dim / attention_v_splits(dim));
}

// Checks a plan's tensors and options and fills its block. Nothing is launched, and no memory but
// the block's is written.
void pack_plan(TensorView kv_indptr, OptionalTensor qo_indptr, OptionalTensor kv_last_page_len,
               OptionalTensor kv_len, OptionalTensor kv_indices, TensorView int_workspace,
               TensorView float_workspace, OptionalTensor packed_mask, OptionalTensor mask_indptr,
               OptionalTensor alibi_slopes, OptionalTensor prefix_len, OptionalTensor token_pos,
               TensorView block) {
  const char* op = "pack_plan";
  const Arg indptr = PRECAST_ARG(op, kv_indptr);
  const Arg ints = PRECAST_ARG(op, int_workspace);
  const Arg floats = PRECAST_ARG(op, float_workspace);
  check_cuda(indptr);
  PlanBlock& b = *block_of(PRECAST_ARG(op, block));
  b.magic = 0;
  const PlanShape& s = b.shape;
  const int device = kv_indptr.device().device_id;
  b.device_id = device;
  b.plan = params_of(op, {qo_indptr, kv_indptr, kv_last_page_len, kv_len}, s,
                     multiprocessors(op, device));
  b.int_bytes = check_workspace(ints, indptr);
  b.float_bytes = check_workspace(floats, indptr);
  b.plan.plan = static_cast<int32_t*>(data_of(int_workspace));
  b.plan.max_ints = b.int_bytes / 4 < kMostInt32 ? b.int_bytes / 4 : kMostInt32;
  b.plan.max_partials = b.float_bytes / partial_bytes(s);
  const bool plans_itself = s.plans_itself != 0;
  PRECAST_CHECK(!plans_itself || (can_plan_itself(b.plan) && s.sm90 == 0), ValueError)
      << op << ": plans_itself needs tiles of " << kDecodeBlockM
      << " rows, one a request, of q_len_per_req, at most " << kMostSelfPlannedRequests
      << " requests, splits of any size, and a float_workspace of at least "
      << 2 * b.plan.shape.ctas * partial_bytes(s) << " bytes, got " << b.float_bytes;
  const int64_t least_ints = plans_itself ? b.plan.shape.ctas : min_plan_ints(b.plan.shape, 0);
  PRECAST_CHECK(b.plan.max_ints >= least_ints, ValueError)
      << op << ": int_workspace must have at least " << 4 * least_ints << " bytes for "
      << s.batch_size << " requests, got " << b.int_bytes;

  AttentionParams p;
  p.schedule.plan = b.plan.plan;
  p.schedule.shape = b.plan.shape;
  p.partials = static_cast<float*>(data_of(float_workspace));
  p.max_partials = b.plan.max_partials;
  p.plans_itself = plans_itself;
  p.lengths = b.plan.lengths;
  p.group_size = FastDivmod(static_cast<uint32_t>(b.plan.shape.group_size));
  p.kv_heads = static_cast<int32_t>(s.num_qo_heads / b.plan.shape.group_size);
  p.pair_shift = pairs_heads(s, b.plan.shape.ctas) ? 1 : 0;
  p.page_size = FastDivmod(static_cast<uint32_t>(s.page_size > 0 ? s.page_size : 1));
  if (s.page_size > 0) {
    const TensorView view = required(op, "kv_indices", kv_indices, "a paged cache");
    const Arg indices = {op, "kv_indices", view};
    Dim count("pages");
    TensorMatch(indices).same_device(indptr).dtype(kInt32).shape({count}).contiguous();
    PRECAST_CHECK(count <= kMostInt32, ValueError)
        << indices.what() << " must have at most " << kMostInt32 << " elements, got shape "
        << to_string(view.shape());
    p.kv_indices = static_cast<const int32_t*>(data_of(view));
    p.num_kv_indices = static_cast<uint32_t>(count);
  }
  pack_scores(p, b, {packed_mask, mask_indptr, alibi_slopes, prefix_len, token_pos}, indptr);
  PRECAST_CHECK(p.pair_shift == 0 || has_plain_scores(p), ValueError)
      << op << ": may_pair_heads needs scores that only the causal mask and the window change";
  // plan() and run() write to the workspaces.
  check_written({ints, floats}, {indptr,
                                 {op, "qo_indptr", qo_indptr},
                                 {op, "kv_last_page_len", kv_last_page_len},
                                 {op, "kv_len", kv_len},
                                 {op, "kv_indices", kv_indices},
                                 {op, "packed_mask", packed_mask},
                                 {op, "mask_indptr", mask_indptr},
                                 {op, "alibi_slopes", alibi_slopes},
                                 {op, "prefix_len", prefix_len},
                                 {op, "token_pos", token_pos}});
  b.params = p;
  b.magic = kPackedMagic;
}

// The copy of a table into the buffer of the plan. The planning kernel reads lengths of `count`
// from where they come from.
TableCopy copy_of(const Arg& with, const char* name, const OptionalTensor& table,
                  const int32_t* buffer, int64_t count, bool is_whole) {
  if (!table.has_value()) return {};
  const TensorView view = table.value();
  const Arg arg = {with.op, name, view};
  Dim size("elements");
  const TensorMatch match = TensorMatch(arg).same_device(with).dtype(kInt32);
  (is_whole ? match.shape({count}) : match.shape({size})).contiguous();
  PRECAST_CHECK(buffer != nullptr, ValueError)
      << arg.what() << " must be None: the plan has no buffer to copy it to";
  PRECAST_CHECK(view.numel() <= count, ValueError)
      << arg.what() << " must have at most the " << count << " elements of its buffer, got shape "
      << to_string(view.shape());
  return {static_cast<const int32_t*>(data_of(view)), const_cast<int32_t*>(buffer), view.numel()};
}

// No table shares memory with what the launch writes: the plan, and the buffers that tables are
// copied to. A table may be its own buffer.
void check_tables_apart(const Arg& ints, const TableCopy* copies) {
  const char* const names[] = {"qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices",
                               "kv_len"};
  const char* const buffers[] = {"qo_indptr_buf", "kv_indptr_buf", "kv_last_page_len_buf",
                                 "kv_indices_buf", "kv_len_buf"};
  for (int i = 0; i < kTableCopies; ++i) {
    const TensorMemory table(ints.op, names[i], copies[i].from, 4 * copies[i].count);
    check_written({ints}, {table});
    for (int j = 0; j < kTableCopies; ++j) {
      if (i == j && copies[i].from == copies[i].to) continue;
      check_memory_apart(table, {ints.op, buffers[j], copies[j].to, 4 * copies[j].count});
    }
  }
}

// Divides the work of a batch among the CTAs of the attention kernel, into the int workspace. Under
// CUDA graphs the same launch copies lengths and pages of the batch into the buffers that the block
// knows; one that is None is in its buffer already.
void plan(TensorView int_workspace, TensorView block, OptionalTensor qo_indptr,
          OptionalTensor kv_indptr, OptionalTensor kv_last_page_len, OptionalTensor kv_indices,
          OptionalTensor kv_len, bool enable_pdl) {
  const Arg ints = PRECAST_ARG("plan", int_workspace);
  check_cuda(ints);
  const PlanBlock& b = packed_block(PRECAST_ARG("plan", block));
  PlanParams p = b.plan;
  PRECAST_CHECK(data_of(int_workspace) == p.plan && int_workspace.device().device_id == b.device_id,
                ValueError)
      << ints.what() << " must be the one that pack_plan() was given";
  PRECAST_CHECK(!b.params.plans_itself, ValueError)
      << "plan: block must be of a batch whose kernels need a plan";
  const int64_t batch = b.shape.batch_size;
  const auto take = [&](int i, const char* name, const OptionalTensor& table, const int32_t*& from,
                        int64_t count) {
    p.copies[i] = copy_of(ints, name, table, from, count, true);
    if (table.has_value()) from = p.copies[i].from;
  };
  take(0, "qo_indptr", qo_indptr, p.lengths.qo_indptr, batch + 1);
  take(1, "kv_indptr", kv_indptr, p.lengths.kv_indptr, batch + 1);
  take(2, "kv_last_page_len", kv_last_page_len, p.lengths.last_page_len, batch);
  take(4, "kv_len", kv_len, p.lengths.kv_len, batch);
  p.copies[3] =
      copy_of(ints, "kv_indices", kv_indices, b.params.kv_indices, b.params.num_kv_indices, false);
  check_tables_apart(ints, p.copies);
  launch_on(ints, [&](cudaStream_t stream) { return attention_plan(p, enable_pdl, stream); });
}

// Bytes of the float workspace and of the int workspace for lengths on the host, and of the plan.
// Of the block only the shape is read.
void workspace_size(OptionalTensor qo_indptr, TensorView kv_indptr, OptionalTensor kv_last_page_len,
                    OptionalTensor kv_len, TensorView sizes, TensorView block, int64_t sm_count) {
  const char* op = "workspace_size";
  const Arg indptr = PRECAST_ARG(op, kv_indptr);
  const Arg bytes = PRECAST_ARG(op, sizes);
  check_on_host(indptr);
  TensorMatch(bytes).same_device(indptr).dtype(kInt64).shape({3}).contiguous();
  PRECAST_CHECK(sm_count > 0 && sm_count < 1 << 16, ValueError)
      << op << ": sm_count must be positive, got " << sm_count;
  const Arg numbers = PRECAST_ARG(op, block);
  const PlanShape& s = block_of(numbers)->shape;
  const PlanParams p = params_of(op, {qo_indptr, kv_indptr, kv_last_page_len, kv_len}, s,
                                 static_cast<int>(sm_count));
  check_written({bytes}, {indptr,
                          numbers,
                          {op, "qo_indptr", qo_indptr},
                          {op, "kv_last_page_len", kv_last_page_len},
                          {op, "kv_len", kv_len}});
  const HostPlan made = plan_on_host(p);
  const int64_t ints = static_cast<int64_t>(made.ints.size());
  // Whether a plan has room for parts is asked before it is known how many CTAs will have work.
  const bool stream = made.header.mode != ScheduleMode::static_persistent;
  const int64_t partials = stream ? 2 * int64_t(p.shape.ctas) : made.header.num_partials;
  // What run() asks for, which knows the queries alone.
  const int64_t tiles = made.num_queries * p.shape.group_size / p.shape.block_m + p.shape.batch;
  int64_t* written = static_cast<int64_t*>(data_of(sizes));
  written[0] = partials * partial_bytes(s);
  written[1] = 4 * std::max(ints + made.scratch_ints, min_plan_ints(p.shape, tiles));
  written[2] = 4 * ints;
}

}  // namespace

PRECAST_EXPORT(pack_plan, pack_plan)
PRECAST_EXPORT(plan, plan)
PRECAST_EXPORT(workspace_size, workspace_size)

}  // namespace precast
