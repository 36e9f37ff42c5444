// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the all-reduce and of what is fused with it.
#include "core/ffi_export.h"
#include "core/number_checks.h"
#include "core/tensor_matcher.h"
#include "precast/comm/allreduce_launch.cuh"

namespace precast {

// csrc/comm/allreduce_fusion.cu
extern const DType allreduce_fusion_dtype;
extern const int allreduce_fusion_world;
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

const WorkspaceBlock& block_of(const TensorView& block) {
  const Arg arg = PRECAST_ARG(kOp, block);
  constexpr int64_t kWords = sizeof(WorkspaceBlock) / sizeof(int64_t);
  TensorMatch(arg).dtype(kInt64).shape({kWords}).contiguous();
  PRECAST_CHECK(block.device().device_type == kDLCPU, ValueError)
      << arg.what() << " must be a CPU tensor, got " << device_name(block.device());
  const auto& b = *static_cast<const WorkspaceBlock*>(data_of(block));
  PRECAST_CHECK(b.world == allreduce_fusion_world, ValueError)
      << arg.what() << " must be of a workspace of " << allreduce_fusion_world << " ranks, got "
      << b.world;
  return b;
}

int vec_size() { return kVecBytes / (allreduce_fusion_dtype == DType::f32 ? 4 : 2); }

// What the tensors of a call share: its shape, and whether all of them are aligned.
class Tensors {
 public:
  explicit Tensors(const Arg& input) : input_(input), memory_(input) { align(input, kVecBytes); }

  // An optional output of the input's shape, which may be `same` and no other tensor.
  void* output(const char* name, const OptionalTensor& tensor, DType dtype,
               const TensorMemory* same) {
    if (!tensor.has_value()) return nullptr;
    const TensorView view = tensor.value();
    const Arg arg = {kOp, name, view};
    TensorMatch(arg).same_device(input_).dtype(dtype).shape_of(input_).contiguous();
    if (same != nullptr) {
      check_same_or_apart(arg, *same);
    }
    align(arg, dtype == DType::e4m3 ? 8 : kVecBytes);
    return data_of(view);
  }

  const void* operand(const Arg& arg, std::initializer_list<Extent> shape) {
    TensorMatch(arg).same_device(input_).dtype(allreduce_fusion_dtype).shape(shape).contiguous();
    align(arg, kVecBytes);
    return data_of(arg.tensor);
  }

  bool aligned() const { return aligned_; }
  const TensorMemory& memory() const { return memory_; }

 private:
  void align(const Arg& arg, int64_t bytes) {
    aligned_ = aligned_ && reinterpret_cast<uint64_t>(data_of(arg.tensor)) % bytes == 0;
  }

  const Arg& input_;
  TensorMemory memory_;
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

void allreduce_export(TensorView block, TensorView input, OptionalTensor output, int64_t strategy,
                      bool triggers_early, bool enable_pdl) {
  const WorkspaceBlock& b = block_of(block);
  const Arg in = PRECAST_ARG(kOp, input);
  TensorMatch(in).cuda().dtype(allreduce_fusion_dtype).contiguous();
  Tensors tensors(in);
  required("output", output);
  AllReduceParams params = {};
  params.output = tensors.output("output", output, allreduce_fusion_dtype, &tensors.memory());
  params.input = data_of(input);
  params.count = input.numel();
  params.aligned = tensors.aligned() && params.count % vec_size() == 0;
  if (params.count == 0) return;
  set_round(params, b, triggers_early);
  const AllReduceOptions options = options_of(b, strategy, enable_pdl);
  launch_on(in, [&](cudaStream_t stream) { return allreduce_plain(params, options, stream); });
}

void allreduce_norm_export(TensorView block, TensorView input, OptionalTensor output,
                           TensorView residual_in, TensorView rms_gamma,
                           OptionalTensor residual_out, OptionalTensor norm_out,
                           OptionalTensor quant_out, OptionalTensor scale_out,
                           OptionalTensor scale_factor, int64_t mode, int64_t group_size,
                           double rms_eps, double weight_bias, int64_t strategy,
                           bool triggers_early, bool enable_pdl) {
  const WorkspaceBlock& b = block_of(block);
  const DType dtype = allreduce_fusion_dtype;
  const Arg in = PRECAST_ARG(kOp, input);
  const Arg added = PRECAST_ARG(kOp, residual_in);
  const Arg by = PRECAST_ARG(kOp, rms_gamma);
  TensorMatch(in).cuda().dtype(dtype).rank(2, 2).contiguous();
  check_at_least(kOp, "rms_eps", rms_eps, 0.0);
  check_not_nan(kOp, "weight_bias", weight_bias);
  const int64_t rows = input.size(0), hidden = input.size(1);
  Tensors tensors(in);
  AllReduceNormParams params = {};
  params.residual = tensors.operand(added, {rows, hidden});
  params.weight = tensors.operand(by, {hidden});
  const TensorMemory residual_memory(added), weight_memory(by);
  params.output = tensors.output("output", output, dtype, &tensors.memory());
  params.residual_out = tensors.output("residual_out", residual_out, dtype, &residual_memory);
  params.norm_out = tensors.output("norm_out", norm_out, dtype, &tensors.memory());
  params.mode = static_cast<QuantMode>(mode);
  if (params.mode != QuantMode::none) {
    PRECAST_CHECK(dtype != DType::f32, ValueError)
        << kOp
        << ": input must be float16 or bfloat16 for a pattern with quantisation, got float32";
    required("quant_out", quant_out);
    params.quant_out = tensors.output("quant_out", quant_out, DType::e4m3, nullptr);
  }
  if (params.mode == QuantMode::tensor) {
    const TensorView scale = required("scale_factor", scale_factor);
    check_one_number(Arg{kOp, "scale_factor", scale}, in);
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
  PRECAST_CHECK((hidden + vec_size() - 1) / vec_size() <= kMaxRowVecs, ValueError)
      << in.what() << "'s last dimension must be at most " << kMaxRowVecs * vec_size() << ", got "
      << hidden;
  {
    // Each output is apart from all tensors but the one that it may be.
    const OptionalTensor* outputs[] = {&output, &norm_out, &residual_out, &quant_out, &scale_out};
    const char* names[] = {"output", "norm_out", "residual_out", "quant_out", "scale_out"};
    for (int i = 0; i < 5; ++i) {
      if (!outputs[i]->has_value()) continue;
      const TensorView view = outputs[i]->value();
      const TensorMemory memory(kOp, names[i], view);
      check_memory_apart(memory, weight_memory);
      if (i != 2) check_memory_apart(memory, residual_memory);
      if (i > 1) check_memory_apart(memory, tensors.memory());
      for (int k = 0; k < i; ++k) {
        if (!outputs[k]->has_value()) continue;
        const TensorView other = outputs[k]->value();
        check_memory_apart(memory, TensorMemory(kOp, names[k], other));
      }
    }
  }

  params.input = data_of(input);
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
