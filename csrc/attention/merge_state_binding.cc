// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of merge_state, merge_state_in_place and merge_states.
#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "precast/attention/merge_state.cuh"

namespace precast {

// csrc/attention/merge_state.cu
extern const DType merge_state_dtype;
cudaError_t merge_state(const MergeStateParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t merge_states(const MergeStatesParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

// Outputs of attention and their logarithms, which have every dimension of theirs but the last.
struct State {
  Arg v, s;
};

int64_t stride_of(const TensorView& tensor, int dim) {
  return tensor.size(dim) > 1 ? tensor.stride(dim) : 0;
}

RowStrides strides_of(const TensorView& tensor, int heads) {
  return RowStrides{stride_of(tensor, 0), stride_of(tensor, heads)};
}

void check_state(const State& state, const Arg& first, int rank) {
  TensorMatch(state.v).same_device(first).dtype(merge_state_dtype).rank(rank, rank).unit_stride();
  TensorMatch(state.s).same_device(first).dtype(DType::f32);
  const TensorView &v = state.v.tensor, &s = state.s.tensor;
  bool fits = s.ndim() == rank - 1;
  for (int i = 0; fits && i < rank - 1; ++i) fits = s.size(i) == v.size(i);
  PRECAST_CHECK(fits, ValueError) << state.s.what() << " must have the shape of " << state.v.name
                                  << " less its last dimension, got " << to_string(s.shape())
                                  << " for " << to_string(v.shape());
}

Rows rows_of(const Arg& v, int64_t heads) {
  constexpr int64_t kMaxRows = 0x7fffffff;
  const int64_t tokens = v.tensor.size(0);
  PRECAST_CHECK(heads == 0 || tokens <= kMaxRows / heads, ValueError)
      << v.what() << " must have at most " << kMaxRows << " heads of tokens, got shape "
      << to_string(v.tensor.shape());
  Rows rows;
  rows.count = static_cast<uint32_t>(tokens * heads);
  rows.inner = FastDivmod(static_cast<uint32_t>(heads > 0 ? heads : 1));
  return rows;
}

StateRows rows_in(const State& state, int heads) {
  return {data_of(state.v.tensor), static_cast<const float*>(data_of(state.s.tensor)),
          strides_of(state.v.tensor, heads), strides_of(state.s.tensor, heads)};
}

MergedRows rows_out(const State& state) {
  return {data_of(state.v.tensor), static_cast<float*>(data_of(state.s.tensor)),
          strides_of(state.v.tensor, 1), strides_of(state.s.tensor, 1)};
}

// Both outputs hold each element once, and share no memory with each other.
void check_outputs(const State& out) {
  const TensorMemory v(out.v), s(out.s);
  check_elements_apart(v);
  check_elements_apart(s);
  check_memory_apart(v, s);
}

// The outputs may be the state itself.
void check_beside(const State& out, const State& in) {
  const TensorMemory v(out.v), s(out.s), v_in(in.v), s_in(in.s);
  check_same_or_apart(v, v_in);
  check_same_or_apart(s, s_in);
  check_memory_apart(v, s_in);
  check_memory_apart(s, v_in);
}

void merge(const State& a, const State& b, const State& out, const OptionalTensor& mask,
           bool enable_pdl) {
  check_cuda(a.v);
  check_state(a, a.v, 3);
  check_state(b, a.v, 3);
  check_same_shape(b.v, a.v);
  check_state(out, a.v, 3);
  check_same_shape(out.v, a.v);
  MergeStateParams p = {};
  if (mask.has_value()) {
    const TensorView view = mask.value();
    const Arg arg = {a.v.op, "mask", view};
    const DLDataType dtype = view.dtype();
    check_same_device(arg, a.v);
    PRECAST_CHECK(dtype.bits == 8 && (dtype.code == kDLBool || dtype.code == kDLUInt), ValueError)
        << arg.what() << " must be bool or uint8, got " << to_string(dtype);
    const TensorMatch match(arg);
    p.mask = match.shape({a.v.tensor.size(0)}).contiguous().data<const uint8_t>();
  }
  check_outputs(out);
  check_beside(out, a);
  check_beside(out, b);
  check_written({out.v, out.s}, {{a.v.op, "mask", mask}});
  check_written({out.s}, {b.s});
  p.a = rows_in(a, 1);
  p.b = rows_in(b, 1);
  p.out = rows_out(out);
  p.rows = rows_of(a.v, a.v.tensor.size(1));
  p.columns = a.v.tensor.size(2);
  launch_on(a.v, [&](cudaStream_t stream) { return merge_state(p, enable_pdl, stream); });
}

void merge_state_entry(TensorView v_a, TensorView s_a, TensorView v_b, TensorView s_b, TensorView v,
                       TensorView s, bool enable_pdl) {
  const char* op = "merge_state";
  merge({PRECAST_ARG(op, v_a), PRECAST_ARG(op, s_a)}, {PRECAST_ARG(op, v_b), PRECAST_ARG(op, s_b)},
        {PRECAST_ARG(op, v), PRECAST_ARG(op, s)}, {}, enable_pdl);
}

void merge_state_in_place_entry(TensorView v, TensorView s, TensorView v_other, TensorView s_other,
                                OptionalTensor mask, bool enable_pdl) {
  const char* op = "merge_state_in_place";
  const State state = {PRECAST_ARG(op, v), PRECAST_ARG(op, s)};
  merge(state, {PRECAST_ARG(op, v_other), PRECAST_ARG(op, s_other)}, state, mask, enable_pdl);
}

void merge_states_entry(TensorView v, TensorView s, TensorView v_merged, TensorView s_merged,
                        bool enable_pdl) {
  const char* op = "merge_states";
  const State in = {PRECAST_ARG(op, v), PRECAST_ARG(op, s)};
  const State out = {PRECAST_ARG(op, v_merged), PRECAST_ARG(op, s_merged)};
  check_cuda(in.v);
  check_state(in, in.v, 4);
  check_state(out, in.v, 3);
  PRECAST_CHECK(v_merged.size(0) == v.size(0) && v_merged.size(1) == v.size(2) &&
                    v_merged.size(2) == v.size(3),
                ValueError)
      << out.v.what() << " must have the shape of v less its states, got "
      << to_string(v_merged.shape()) << " for " << to_string(v.shape());
  constexpr int64_t kMost = 0x7fffffff;
  PRECAST_CHECK(v.size(1) <= kMost, ValueError)
      << in.v.what() << " must have at most " << kMost << " states, got " << v.size(1);
  check_outputs(out);
  for (const Arg& input : {in.v, in.s}) {
    check_memory_apart(TensorMemory(out.v), TensorMemory(input));
    check_memory_apart(TensorMemory(out.s), TensorMemory(input));
  }
  MergeStatesParams p = {};
  p.in = rows_in(in, 2);
  p.out = rows_out(out);
  p.v_state_stride = stride_of(v, 1);
  p.s_state_stride = stride_of(s, 1);
  p.states = static_cast<int32_t>(v.size(1));
  p.rows = rows_of(in.v, v.size(2));
  p.columns = v.size(3);
  launch_on(in.v, [&](cudaStream_t stream) { return merge_states(p, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(merge_state, merge_state_entry)
PRECAST_EXPORT(merge_state_in_place, merge_state_in_place_entry)
PRECAST_EXPORT(merge_states, merge_states_entry)

}  // namespace precast
