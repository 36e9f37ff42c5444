// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the all-reduce and of what is fused with it.
#include <utility>

#include "core/ffi_export.h"
#include "core/number_checks.h"
#include "core/tensor_matcher.h"
#include "precast/comm/allreduce_launch.cuh"

namespace precast {

// csrc/comm/allreduce_fusion.cu
extern const DType allreduce_fusion_dtype;
extern const int allreduce_fusion_world;
cudaError_t load_allreduce();
cudaError_t allreduce_plain(const AllReduceParams& params, const AllReduceOptions& options,
                            cudaStream_t stream);
cudaError_t allreduce_norm(const AllReduceNormParams& params, const AllReduceOptions& options,
                           cudaStream_t stream);

namespace {

constexpr const char* kOp = "allreduce_fusion";

// The block that Python makes of a workspace, as python/precast/_ops/comm/workspace.py packs it.
struct WorkspaceBlock {
  int64_t rank;
  int64_t world;
  int64_t region_bytes;
  int64_t timeout_nanoseconds;
  int64_t report;  // address of a WaitReport
  int64_t checks_signatures;
  int64_t one_shot_bytes;
  int64_t threads, vecs, cluster, ctas;
  int64_t buffers[kMaxWorld];
};

const WorkspaceBlock& block_of(const TensorView& block, int64_t world) {
  const Arg arg = PRECAST_ARG(kOp, block);
  constexpr int64_t kWords = sizeof(WorkspaceBlock) / sizeof(int64_t);
  TensorMatch(arg).dtype(kInt64).shape({kWords}).contiguous();
  PRECAST_CHECK(block.device().device_type == kDLCPU, ValueError)
      << arg.what() << " must be a CPU tensor, got " << device_name(block.device());
  const auto& b = *static_cast<const WorkspaceBlock*>(data_of(block));
  PRECAST_CHECK(b.world == world && world == allreduce_fusion_world, ValueError)
      << arg.what() << " must be of a workspace of " << allreduce_fusion_world << " ranks, got "
      << b.world;
  return b;
}

int vec_size() { return kVecBytes / (allreduce_fusion_dtype == DType::f32 ? 4 : 2); }

// The tensors of a call: they have the input's shape, and may all be aligned.
class Tensors {
 public:
  explicit Tensors(const Arg& input) : input_(input) { align(input, kVecBytes); }

  // An output of the input's shape.
  void* output(const Arg& arg, DType dtype) {
    TensorMatch(arg).same_device(input_).dtype(dtype).shape_of(input_).contiguous();
    align(arg, dtype == DType::e4m3 ? kVecBytes / 2 : kVecBytes);
    return data_of(arg.tensor);
  }

  void* output(const char* name, const OptionalTensor& tensor, DType dtype) {
    if (!tensor.has_value()) return nullptr;
    const TensorView view = tensor.value();
    return output(Arg{kOp, name, view}, dtype);
  }

  void align(const Arg& arg, int64_t bytes) {
    aligned_ = aligned_ && reinterpret_cast<uint64_t>(data_of(arg.tensor)) % bytes == 0;
  }

  bool aligned() const { return aligned_; }

 private:
  const Arg& input_;
  bool aligned_ = true;
};

PRECAST_ONE_COPY TensorView required(const char* name, const OptionalTensor& tensor) {
  PRECAST_CHECK(tensor.has_value(), ValueError)
      << kOp << ": " << name << " must be a tensor for this pattern, got None";
  return tensor.value();
}

void set_round(AllReduceParams& params, const WorkspaceBlock& b, bool triggers_early) {
  for (int i = 0; i < allreduce_fusion_world; ++i) {
    params.buffers[i] = reinterpret_cast<char*>(b.buffers[i]);
  }
  params.region_bytes = b.region_bytes;
  params.rank = static_cast<int>(b.rank);
  params.limit.nanoseconds = static_cast<uint64_t>(b.timeout_nanoseconds);
  params.limit.report = reinterpret_cast<WaitReport*>(b.report);
  params.triggers_early = triggers_early;
}

AllReduceOptions options_of(const WorkspaceBlock& b, int64_t strategy, bool enable_pdl) {
  AllReduceOptions options = {};
  options.strategy = static_cast<AllReduceStrategy>(strategy);
  options.tuning = {static_cast<int>(b.threads), static_cast<int>(b.vecs),
                    static_cast<int>(b.cluster), static_cast<int>(b.ctas)};
  options.one_shot_bytes = b.one_shot_bytes;
  options.checks_signatures = b.checks_signatures != 0;
  options.enable_pdl = enable_pdl;
  return options;
}

// Scales of groups: words of four exponents, the words of a row `rows rounded up to 4` apart.
void check_group_scales(const Arg& scales, const Arg& in, int64_t group_size) {
  const int64_t rows = in.tensor.size(0), hidden = in.tensor.size(1);
  PRECAST_CHECK(group_size == 16 || group_size == 32 || group_size == 64 || group_size == 128,
                ValueError)
      << kOp << ": block_quant_group_size must be 16, 32, 64 or 128, got " << group_size;
  PRECAST_CHECK(hidden % group_size == 0, ValueError)
      << kOp << ": input's last dimension must be a multiple of block_quant_group_size "
      << group_size << ", got " << hidden;
  const int64_t words = (hidden / group_size + 3) / 4, stride = (rows + 3) / 4 * 4;
  TensorMatch(scales).same_device(in).dtype(kInt32).shape({rows, words});
  const TensorView& t = scales.tensor;
  PRECAST_CHECK((rows <= 1 || t.stride(0) == 1) && (words <= 1 || t.stride(1) == stride),
                ValueError)
      << scales.what() << " must have strides [1, " << stride
      << "] (column-major, rows rounded up to 4), got " << to_string(t.strides());
}

void allreduce_export(TensorView block, int64_t world, TensorView input, TensorView output,
                      int64_t strategy, bool triggers_early, bool enable_pdl) {
  const Arg in = PRECAST_ARG(kOp, input);
  const Arg out = PRECAST_ARG(kOp, output);
  TensorMatch(in).cuda().dtype(allreduce_fusion_dtype).contiguous();
  const WorkspaceBlock& b = block_of(block, world);
  Tensors tensors(in);
  AllReduceParams params = {};
  params.output = tensors.output(out, allreduce_fusion_dtype);
  check_same_or_apart(out, in);
  params.input = data_of(input);
  params.count = input.numel();
  params.aligned = tensors.aligned() && params.count % vec_size() == 0;
  if (params.count == 0) {  // why: a call without elements loads the kernels and waits for no rank
    launch_on(in, [](cudaStream_t) { return load_allreduce(); });
    return;
  }
  set_round(params, b, triggers_early);
  const AllReduceOptions options = options_of(b, strategy, enable_pdl);
  launch_on(in, [&](cudaStream_t stream) { return allreduce_plain(params, options, stream); });
}

// Outputs may be the input or the residual, where they have its dtype, and no other tensor.
void check_outputs(std::initializer_list<std::pair<const char*, const OptionalTensor*>> outputs,
                   const Arg& input, const Arg& residual, const Arg& weight) {
  for (auto out = outputs.begin(); out != outputs.end(); ++out) {
    if (!out->second->has_value()) continue;
    const TensorView view = out->second->value();
    const TensorMemory memory(kOp, out->first, view);
    if (same_dtype(view.dtype(), input.tensor.dtype())) {
      check_same_or_apart(memory, input);
      check_same_or_apart(memory, residual);
    } else {
      check_memory_apart(memory, input);
      check_memory_apart(memory, residual);
    }
    check_memory_apart(memory, weight);
    for (auto other = outputs.begin(); other != out; ++other) {
      if (!other->second->has_value()) continue;
      const TensorView other_view = other->second->value();
      check_memory_apart(memory, TensorMemory(kOp, other->first, other_view));
    }
  }
}

void allreduce_norm_export(TensorView block, int64_t world, TensorView input,
                           TensorView residual_in, TensorView rms_gamma,
                           OptionalTensor residual_out, OptionalTensor norm_out,
                           OptionalTensor quant_out, OptionalTensor scale_out,
                           OptionalTensor scale_factor, int64_t mode, int64_t group_size,
                           double rms_eps, double weight_bias, int64_t strategy,
                           bool triggers_early, bool enable_pdl) {
  const DType dtype = allreduce_fusion_dtype;
  const Arg in = PRECAST_ARG(kOp, input);
  const Arg added = PRECAST_ARG(kOp, residual_in);
  const Arg by = PRECAST_ARG(kOp, rms_gamma);
  TensorMatch(in).cuda().dtype(dtype).rank(2, 2).contiguous();
  const WorkspaceBlock& b = block_of(block, world);
  check_at_least(kOp, "rms_eps", rms_eps, 0.0);
  check_not_nan(kOp, "weight_bias", weight_bias);
  const int64_t rows = input.size(0), hidden = input.size(1);
  TensorMatch(added).same_device(in).dtype(dtype).shape_of(in).contiguous();
  TensorMatch(by).same_device(in).dtype(dtype).shape({hidden}).contiguous();
  Tensors tensors(in);
  tensors.align(added, kVecBytes);
  tensors.align(by, kVecBytes);
  AllReduceNormParams params = {};
  params.residual_out = tensors.output("residual_out", residual_out, dtype);
  params.norm_out = tensors.output("norm_out", norm_out, dtype);
  params.mode = static_cast<QuantMode>(mode);
  PRECAST_CHECK((hidden + vec_size() - 1) / vec_size() <= kMaxRowVecs, ValueError)
      << in.what() << "'s last dimension must be at most " << kMaxRowVecs * vec_size() << ", got "
      << hidden;
  if (params.mode != QuantMode::none) {
    PRECAST_CHECK(dtype != DType::f32, ValueError)
        << in.what() << " must be float16 or bfloat16 for a pattern with quantisation, got float32";
    required("quant_out", quant_out);
    params.quant_out = tensors.output("quant_out", quant_out, DType::e4m3);
  }
  if (params.mode == QuantMode::tensor) {
    const TensorView scale = required("scale_factor", scale_factor);
    const Arg number = {kOp, "scale_factor", scale};
    check_one_number(number, in);
    for (const TensorMemory& out :
         {TensorMemory(kOp, "norm_out", norm_out), TensorMemory(kOp, "residual_out", residual_out),
          TensorMemory(kOp, "quant_out", quant_out)}) {
      check_memory_apart(out, number);
    }
    params.scale = static_cast<const float*>(data_of(scale));
  } else if (params.mode != QuantMode::none) {
    const TensorView scales = required("scale_out", scale_out);
    const Arg arg = {kOp, "scale_out", scales};
    if (params.mode == QuantMode::group) {
      check_group_scales(arg, in, group_size);
      params.scale_stride = (rows + 3) / 4 * 4;
      params.group_size = static_cast<int>(group_size);
    } else {
      TensorMatch(arg).same_device(in).dtype(DType::f32).shape({rows, 1}).contiguous();
    }
    params.scales = data_of(scales);
  }
  if (rows == 0 || hidden == 0) return;
  check_outputs({{"norm_out", &norm_out},
                 {"residual_out", &residual_out},
                 {"quant_out", &quant_out},
                 {"scale_out", &scale_out}},
                in, added, by);

  params.input = data_of(input);
  params.residual = data_of(residual_in);
  params.weight = data_of(rms_gamma);
  params.rows = rows;
  params.columns = static_cast<int>(hidden);
  params.aligned = tensors.aligned() && hidden % vec_size() == 0;
  params.eps = static_cast<float>(rms_eps);
  params.weight_bias = static_cast<float>(weight_bias);
  set_round(params, b, triggers_early);
  const AllReduceOptions options = options_of(b, strategy, enable_pdl);
  launch_on(in, [&](cudaStream_t stream) { return allreduce_norm(params, options, stream); });
}

}  // namespace

PRECAST_EXPORT(allreduce, allreduce_export)
PRECAST_EXPORT(allreduce_norm, allreduce_norm_export)

}  // namespace precast
