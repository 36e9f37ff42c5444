// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the hyper-connections.
#include <cmath>
#include <vector>

#include "core/ffi_export.h"
#include "core/number_checks.h"
#include "core/tensor_matcher.h"
#include "precast/mhc/mhc_pre.cuh"

namespace precast {

// csrc/mhc/mhc.cu
extern const DType mhc_dtype;
cudaError_t mhc_post(const MhcPostParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t mhc_pre(const MhcPreParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

// The dimensions of a tensor but for the last `last`, with others behind them.
std::vector<int64_t> shape_with(const TensorView& t, int last, std::initializer_list<int64_t> end) {
  std::vector<int64_t> shape;
  for (int i = 0; i + last < t.ndim(); ++i) shape.push_back(t.size(i));
  shape.insert(shape.end(), end);
  return shape;
}

bool has_sizes(const TensorView& t, const std::vector<int64_t>& shape) {
  bool fits = static_cast<size_t>(t.ndim()) == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = t.size(i) == shape[i];
  return fits;
}

// Checks dtype, device and shape of a contiguous tensor.
void check_tensor(const Arg& arg, DType dtype, const Arg& first,
                  const std::vector<int64_t>& shape) {
  TensorMatch(arg).same_device(first).dtype(dtype);
  PRECAST_CHECK(has_sizes(arg.tensor, shape), ValueError)
      << arg.what() << " must have shape "
      << to_string(tvm::ffi::ShapeView(shape.data(), shape.size())) << ", got "
      << to_string(arg.tensor.shape());
  check_contiguous(arg);
}

float positive(const char* op, const char* name, double value) {
  const float rounded = static_cast<float>(value);
  PRECAST_CHECK(std::isnormal(rounded) && rounded > 0, ValueError)
      << op << ": " << name << " must be positive and finite, got " << value;
  return rounded;
}

uint32_t tokens_of(const Arg& residual) {
  int64_t tokens = 1;
  for (int i = 0; i + 2 < residual.tensor.ndim(); ++i) tokens *= residual.tensor.size(i);
  PRECAST_CHECK(tokens <= 0x1fffffff, ValueError)
      << residual.what() << " must have at most 2^29 - 1 tokens, got shape "
      << to_string(residual.tensor.shape());
  return static_cast<uint32_t>(tokens);
}

void mhc_post_entry(TensorView x, TensorView residual, TensorView post_layer_mix,
                    TensorView comb_res_mix, TensorView out, bool enable_pdl) {
  const char* op = "mhc_post";
  const Arg in = PRECAST_ARG(op, x);
  const Arg from = PRECAST_ARG(op, residual);
  const Arg post = PRECAST_ARG(op, post_layer_mix);
  const Arg comb = PRECAST_ARG(op, comb_res_mix);
  const Arg to = PRECAST_ARG(op, out);
  TensorMatch(in).cuda().dtype(mhc_dtype);
  PRECAST_CHECK(x.ndim() >= 2, ValueError)
      << in.what() << " must have at least 2 dimensions, got shape " << to_string(x.shape());
  check_contiguous(in);
  const int64_t hidden = x.size(-1);
  check_tensor(from, mhc_dtype, in, shape_with(x, 1, {kStreams, hidden}));
  check_tensor(comb, DType::f32, in, shape_with(x, 1, {kStreams, kStreams}));
  TensorMatch(to).same_device(in).dtype(mhc_dtype).shape_of(from).contiguous();
  TensorMatch(post).same_device(in).dtype(DType::f32);
  PRECAST_CHECK(has_sizes(post_layer_mix, shape_with(x, 1, {kStreams})) ||
                    has_sizes(post_layer_mix, shape_with(x, 1, {kStreams, 1})),
                ValueError)
      << post.what() << " must have shape [..., 4] or [..., 4, 1] with the leading dimensions of "
      << "x, got " << to_string(post_layer_mix.shape());
  check_contiguous(post);
  const TensorMemory memory(to);
  check_same_or_apart(memory, from);
  check_written({memory}, {in, post, comb});
  MhcPostParams params = {};
  params.tokens = tokens_of(from);
  params.hidden = hidden;
  if (params.tokens == 0 || hidden == 0) return;
  TensorMatch(post).aligned();
  TensorMatch(comb).aligned();
  PRECAST_CHECK(plan_items(params.tokens, hidden, kVecBytes / 2).fits, ValueError)
      << in.what() << " must have at most " << kMaxItems << " items of " << kVecBytes
      << " bytes, got shape " << to_string(x.shape()) << "; call on parts of it";
  params.x = data_of(x);
  params.residual = data_of(residual);
  params.post = static_cast<const float*>(data_of(post_layer_mix));
  params.comb = static_cast<const float*>(data_of(comb_res_mix));
  params.out = data_of(out);
  launch_on(in, [&](cudaStream_t stream) { return mhc_post(params, enable_pdl, stream); });
}

struct PreTensors {
  TensorView dot_mix;
  OptionalTensor sqrsum;
  TensorView residual, mhc_scale, mhc_base, post_mix, comb_mix, layer_input;
};

// `params` has the numbers.
void run_pre(const char* op, const PreTensors& t, MhcPreParams params, bool enable_pdl) {
  const Arg from{op, "residual", t.residual};
  const Arg dot{op, "dot_mix", t.dot_mix};
  const Arg scale{op, "mhc_scale", t.mhc_scale};
  const Arg base{op, "mhc_base", t.mhc_base};
  const Arg post{op, "post_mix", t.post_mix};
  const Arg comb{op, "comb_mix", t.comb_mix};
  const Arg to{op, "layer_input", t.layer_input};
  TensorMatch(from).dtype(mhc_dtype);
  const int rank = t.residual.ndim();
  PRECAST_CHECK(rank >= 3 && t.residual.size(-2) == kStreams, ValueError)
      << from.what() << " must have shape [..., 4, hidden] with 3 or more dimensions, got "
      << to_string(t.residual.shape());
  check_contiguous(from);
  const int64_t hidden = t.residual.size(-1);
  check_tensor(scale, DType::f32, from, {3});
  check_tensor(base, DType::f32, from, {kMixes});
  check_tensor(post, DType::f32, from, shape_with(t.residual, 2, {kStreams, 1}));
  check_tensor(comb, DType::f32, from, shape_with(t.residual, 2, {kStreams, kStreams}));
  check_tensor(to, mhc_dtype, from, shape_with(t.residual, 2, {hidden}));

  std::vector<int64_t> dots = shape_with(t.residual, 2, {kMixes});
  std::vector<int64_t> sums = shape_with(t.residual, 2, {});
  std::vector<int64_t> one_split = dots;
  one_split.insert(one_split.begin(), 1);
  if (params.splits > 1) {
    dots.insert(dots.begin(), params.splits);
    sums.insert(sums.begin(), params.splits);
  }
  const bool leads = !t.sqrsum.has_value() && has_sizes(t.dot_mix, one_split);
  check_tensor(dot, DType::f32, from, leads ? one_split : dots);
  if (t.sqrsum.has_value()) {
    const TensorView sqrsum = t.sqrsum.value();
    check_tensor({op, "sqrsum", sqrsum}, DType::f32, from, sums);
    params.squares = static_cast<const float*>(data_of(sqrsum));
  }
  check_written({post, comb, to}, {dot, {op, "sqrsum", t.sqrsum}, from, scale, base});
  params.tokens = tokens_of(from);
  if (params.tokens == 0) return;
  params.dot = static_cast<const float*>(data_of(t.dot_mix));
  params.residual = data_of(t.residual);
  params.scale = static_cast<const float*>(data_of(t.mhc_scale));
  params.base = static_cast<const float*>(data_of(t.mhc_base));
  params.post = static_cast<float*>(data_of(t.post_mix));
  params.comb = static_cast<float*>(data_of(t.comb_mix));
  params.layer_input = data_of(t.layer_input);
  params.hidden = hidden;
  launch_on(from, [&](cudaStream_t stream) { return mhc_pre(params, enable_pdl, stream); });
}

// The numbers that both functions take.
MhcPreParams numbers(const char* op, double rms_eps, double mhc_pre_eps, double mhc_sinkhorn_eps,
                     double mhc_post_mult_value, int64_t sinkhorn_repeat) {
  MhcPreParams params = {};
  params.rms_eps = positive(op, "rms_eps", rms_eps);
  params.pre_eps = positive(op, "mhc_pre_eps", mhc_pre_eps);
  params.sinkhorn_eps = positive(op, "mhc_sinkhorn_eps", mhc_sinkhorn_eps);
  check_not_nan(op, "mhc_post_mult_value", mhc_post_mult_value);
  params.post_factor = static_cast<float>(mhc_post_mult_value);
  PRECAST_CHECK(sinkhorn_repeat >= 1 && sinkhorn_repeat <= 10000, ValueError)
      << op << ": sinkhorn_repeat must be from 1 to 10000, got " << sinkhorn_repeat;
  params.repeat = static_cast<int>(sinkhorn_repeat);
  return params;
}

void mhc_pre_big_fuse_entry(TensorView dot_mix, TensorView sqrsum, TensorView residual,
                            TensorView mhc_scale, TensorView mhc_base, int64_t k, double rms_eps,
                            double mhc_pre_eps, double mhc_sinkhorn_eps, double mhc_post_mult_value,
                            int64_t sinkhorn_repeat, int64_t num_splits, TensorView post_mix,
                            TensorView comb_mix, TensorView layer_input, bool enable_pdl) {
  const char* op = "mhc_pre_big_fuse";
  check_cuda(PRECAST_ARG(op, dot_mix));
  PRECAST_CHECK(k >= 1, ValueError) << op << ": k must be at least 1, got " << k;
  MhcPreParams params =
      numbers(op, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat);
  PRECAST_CHECK(num_splits >= 1 && num_splits <= 1024, ValueError)
      << op << ": num_splits must be from 1 to 1024, got " << num_splits;
  params.splits = static_cast<int>(num_splits);
  params.k = static_cast<float>(k);
  const PreTensors tensors = {dot_mix,  sqrsum,   residual, mhc_scale,
                              mhc_base, post_mix, comb_mix, layer_input};
  run_pre(op, tensors, params, enable_pdl);
}

void mhc_pre_big_fuse_with_prenorm_entry(TensorView dot_mix, TensorView residual,
                                         TensorView mhc_scale, TensorView mhc_base, double rms_eps,
                                         double mhc_pre_eps, double mhc_sinkhorn_eps,
                                         double mhc_post_mult_value, int64_t sinkhorn_repeat,
                                         TensorView post_mix, TensorView comb_mix,
                                         TensorView layer_input, bool enable_pdl) {
  const char* op = "mhc_pre_big_fuse_with_prenorm";
  check_cuda(PRECAST_ARG(op, dot_mix));
  MhcPreParams params =
      numbers(op, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat);
  params.splits = 1;
  params.k = residual.ndim() > 0 ? static_cast<float>(kStreams * residual.size(-1)) : 0.0f;
  const PreTensors tensors = {dot_mix,  OptionalTensor(), residual, mhc_scale,
                              mhc_base, post_mix,         comb_mix, layer_input};
  run_pre(op, tensors, params, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(mhc_post, mhc_post_entry)
PRECAST_EXPORT(mhc_pre_big_fuse, mhc_pre_big_fuse_entry)
PRECAST_EXPORT(mhc_pre_big_fuse_with_prenorm, mhc_pre_big_fuse_with_prenorm_entry)

}  // namespace precast
