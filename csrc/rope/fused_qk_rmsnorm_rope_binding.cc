// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the norm and rotation of video models.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/ffi_export.h"
#include "core/number_checks.h"
#include "core/tensor_matcher.h"
#include "precast/rope/fused_qk_rmsnorm_rope.cuh"

namespace precast {

// csrc/rope/fused_qk_rmsnorm_rope.cu
cudaError_t fused_qk_rmsnorm_rope(const QkRmsNormRope3dParams& params, bool enable_pdl,
                                  cudaStream_t stream);

namespace {

constexpr const char* kOp = "fused_qk_rmsnorm_rope";

float finite(const char* name, double value) {
  const float rounded = static_cast<float>(value);
  PRECAST_CHECK(std::isfinite(rounded), ValueError)
      << kOp << ": " << name << " must be a finite number, got " << value;
  return rounded;
}

double positive(const char* name, double value) {
  const float rounded = static_cast<float>(value);
  PRECAST_CHECK(std::isnormal(rounded) && rounded > 0, ValueError)
      << kOp << ": " << name << " must be positive and finite, got " << value;
  return value;
}

struct Yarn {
  double factor, low, high;
};

// Appends the frequencies of one axis: base^(-2 i / channels), which YaRN blends with a factor-th
// of it. A running product in fp64 loses less than the rounding to fp32.
int append_frequencies(float* frequencies, int count, int64_t channels, double base,
                       const Yarn& yarn) {
  if (channels == 0) return count;
  const double step = std::pow(base, -2.0 / static_cast<double>(channels));
  const double high = std::abs(yarn.low - yarn.high) <= 1e-6 ? yarn.high + 1e-3 : yarn.high;
  double plain = 1.0;
  for (int64_t i = 0; i < channels / 2; ++i, plain *= step) {
    double frequency = plain;
    if (yarn.factor != 1.0) {
      const double linear = (static_cast<double>(i) - yarn.low) / (high - yarn.low);
      const double ramp = std::min(std::max(linear, 0.0), 1.0);
      frequency = plain / yarn.factor * ramp + plain * (1.0 - ramp);
    }
    frequencies[count++] = static_cast<float>(frequency);
  }
  return count;
}

void check_heads(const char* name, int64_t heads) {
  PRECAST_CHECK(heads >= 0 && heads <= kMaxVideoHeads, ValueError)
      << kOp << ": " << name << " must be from 0 to " << kMaxVideoHeads << ", got " << heads;
}

// A weight may have any shape.
const void* weight_of(const Arg& weight, const Arg& in, int64_t size) {
  TensorMatch(weight).same_device(in).dtype(DType::bf16);
  int64_t count = 1;
  for (int i = 0; i < weight.tensor.ndim(); ++i) count *= weight.tensor.size(i);
  PRECAST_CHECK(count == size, ValueError)
      << weight.what() << " must have " << size << " elements, got shape "
      << to_string(weight.tensor.shape());
  TensorMatch(weight).contiguous().aligned();
  return data_of(weight.tensor);
}

void* output_of(const Arg& out, const Arg& in, DType dtype, int64_t heads, int64_t head_dim) {
  TensorMatch(out).same_device(in).dtype(dtype);
  std::vector<int64_t> shape;
  for (int i = 0; i + 1 < in.tensor.ndim(); ++i) shape.push_back(in.tensor.size(i));
  shape.insert(shape.end(), {heads, head_dim});
  bool fits = static_cast<size_t>(out.tensor.ndim()) == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = out.tensor.size(i) == shape[i];
  PRECAST_CHECK(fits, ValueError) << out.what() << " must have shape "
                                  << to_string(tvm::ffi::ShapeView(shape.data(), shape.size()))
                                  << ", got " << to_string(out.tensor.shape());
  TensorMatch(out).contiguous().aligned();
  return data_of(out.tensor);
}

void fused_qk_rmsnorm_rope_entry(TensorView qkv, TensorView q_weight, TensorView k_weight,
                                 int64_t ppf, int64_t pph, int64_t ppw, int64_t num_frame_channels,
                                 int64_t num_height_channels, int64_t num_width_channels,
                                 int64_t num_heads_q, int64_t num_heads_k, int64_t num_heads_v,
                                 int64_t head_dim, double eps, double base, bool interleave,
                                 double factor, double low, double high, double attention_factor,
                                 bool is_qk_norm, bool output_fp8, double output_quant_scale,
                                 double v_quant_scale, TensorView q_out, TensorView k_out,
                                 TensorView v_out, bool enable_pdl) {
  const Arg in = PRECAST_ARG(kOp, qkv);
  TensorMatch(in).cuda();
  QkRmsNormRope3dParams params = {};
  check_at_least(kOp, "eps", eps, 0.0);
  params.eps = static_cast<float>(eps);
  positive("base", base);
  const Yarn yarn = {positive("factor", factor), finite("low", low), finite("high", high)};
  params.attention_factor = finite("attention_factor", attention_factor);
  params.qk_scale = finite("output_quant_scale", output_quant_scale);
  params.v_scale = finite("v_quant_scale", v_quant_scale);
  PRECAST_CHECK(factor != 1.0 || attention_factor == 1.0, ValueError)
      << kOp << ": attention_factor must be 1 where factor is 1, got " << attention_factor;

  TensorMatch(in).dtype(DType::bf16).rank(2, 3).contiguous();
  PRECAST_CHECK(head_dim == 64 || head_dim == 128 || head_dim == 256, ValueError)
      << kOp << ": head_dim must be 64, 128 or 256, got " << head_dim;
  check_heads("num_heads_q", num_heads_q);
  check_heads("num_heads_k", num_heads_k);
  check_heads("num_heads_v", num_heads_v);
  const int64_t channels[] = {num_frame_channels, num_height_channels, num_width_channels};
  int64_t sum = 0;
  bool even = true;
  for (const int64_t each : channels) {
    even = even && each >= 0 && each <= head_dim && each % 2 == 0;
    sum += even ? each : 0;
  }
  PRECAST_CHECK(even && sum == head_dim, ValueError)
      << kOp << ": num_frame_channels, num_height_channels and num_width_channels must be even and "
      << "add up to head_dim, " << head_dim << ", got " << channels[0] << ", " << channels[1]
      << " and " << channels[2];
  constexpr int64_t kMost = 0x7fffffff;
  PRECAST_CHECK(ppf > 0 && pph > 0 && ppw > 0 && ppf <= kMost && pph <= kMost && ppw <= kMost &&
                    pph * ppw <= kMost && ppf * (pph * ppw) <= kMost,
                ValueError)
      << kOp << ": ppf, pph and ppw must be positive with a product of at most 2^31 - 1, got "
      << ppf << ", " << pph << " and " << ppw;
  const int64_t sequence = ppf * pph * ppw;
  const int64_t heads = num_heads_q + num_heads_k + num_heads_v;
  PRECAST_CHECK(qkv.size(-1) == heads * head_dim, ValueError)
      << in.what() << " must have " << heads << " heads of " << head_dim << " in a row, got shape "
      << to_string(qkv.shape());
  const bool is_batch = qkv.ndim() == 3;
  PRECAST_CHECK(is_batch ? qkv.size(1) == sequence : qkv.size(0) % sequence == 0, ValueError)
      << in.what() << " must have " << (is_batch ? "" : "a multiple of ") << sequence
      << " tokens, ppf * pph * ppw, got shape " << to_string(qkv.shape());
  const int64_t tokens = is_batch ? qkv.size(0) * sequence : qkv.size(0);
  PRECAST_CHECK(tokens <= kMost, ValueError)
      << in.what() << " must have at most 2^31 - 1 tokens, got shape " << to_string(qkv.shape());
  TensorMatch(in).aligned();

  const DType dtype = output_fp8 ? DType::e4m3 : DType::bf16;
  const Arg q_by = PRECAST_ARG(kOp, q_weight), k_by = PRECAST_ARG(kOp, k_weight);
  const Arg q_to = PRECAST_ARG(kOp, q_out), k_to = PRECAST_ARG(kOp, k_out);
  const Arg v_to = PRECAST_ARG(kOp, v_out);
  params.qkv = data_of(qkv);
  params.q_weight = weight_of(q_by, in, num_heads_q * head_dim);
  params.k_weight = weight_of(k_by, in, num_heads_k * head_dim);
  params.q_out = output_of(q_to, in, dtype, num_heads_q, head_dim);
  params.k_out = output_of(k_to, in, dtype, num_heads_k, head_dim);
  params.v_out = output_of(v_to, in, dtype, num_heads_v, head_dim);
  check_written({q_to, k_to, v_to}, {in, q_by, k_by});
  if (tokens == 0 || heads == 0) return;

  params.tokens = static_cast<uint32_t>(tokens);
  params.q_heads = static_cast<int>(num_heads_q);
  params.k_heads = static_cast<int>(num_heads_k);
  params.v_heads = static_cast<int>(num_heads_v);
  params.head_dim_log2 = head_dim == 64 ? 6 : head_dim == 128 ? 7 : 8;
  params.sequence = FastDivmod(static_cast<uint32_t>(sequence));
  params.frame = FastDivmod(static_cast<uint32_t>(pph * ppw));
  params.line = FastDivmod(static_cast<uint32_t>(ppw));
  params.height_pairs_begin = static_cast<int>(num_frame_channels / 2);
  params.width_pairs_begin = static_cast<int>((num_frame_channels + num_height_channels) / 2);
  params.normalizes = is_qk_norm;
  params.interleave = interleave;
  params.out_is_fp8 = output_fp8;
  int count = 0;
  for (const int64_t each : channels) {
    count = append_frequencies(params.frequencies, count, each, base, yarn);
  }
  launch_on(in,
            [&](cudaStream_t stream) { return fused_qk_rmsnorm_rope(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(fused_qk_rmsnorm_rope, fused_qk_rmsnorm_rope_entry)

}  // namespace precast
