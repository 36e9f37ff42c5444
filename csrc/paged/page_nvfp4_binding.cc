// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points that quantise to NVFP4 while appending to a paged KV cache.
#include <cmath>

#include "core/ffi_export.h"
#include "paged/paged_checks.h"
#include "precast/paged/page_nvfp4.cuh"

namespace precast {

// csrc/paged/page_nvfp4.cu
extern const DType page_nvfp4_dtype;
cudaError_t quantize_append_nvfp4(const QuantizeAppendNvfp4Params& params, bool from_slots,
                                  bool enable_pdl, cudaStream_t stream);

namespace {

constexpr int kBlock = 16;  // elements that share a scale
constexpr CacheNames kFactorNames{"kv_cache_sf", "kv_cache_sf[0]", "kv_cache_sf[1]"};

// The arguments of both ops, except the places of the tokens.
struct Call {
  AppendArgs args;
  const Arg& first_factors;
  const Arg& second_factors;  // the same as the first one if that holds both
  const OptionalTensor& k_scale;
  const OptionalTensor& v_scale;
  double scale_values[2];
  bool enable_pdl;
};

// Fills in the scale of a tensor: the number in `tensor`, which the kernel reads, or else `value`.
void set_scale(const Arg& scale, bool is_tensor, double value, const Arg& with, const float*& data,
               float& number) {
  number = static_cast<float>(value);
  if (is_tensor) {
    check_one_number(scale, with);
    data = static_cast<const float*>(data_of(scale.tensor));
    return;
  }
  PRECAST_CHECK(std::isfinite(number) && number > 0.0f, ValueError)
      << scale.what() << " must be positive and finite as float32, got " << value;
}

void check_rows(const Arg& first, const Arg& second) {
  check_cuda(first);
  check_dtype(first, page_nvfp4_dtype);
  check_append_shape(first, 3);
  check_append_pair(second, first);
  for (const Arg* rows : {&first, &second}) {
    PRECAST_CHECK(rows->tensor.size(2) % kBlock == 0, ValueError)
        << rows->what() << "'s last dimension must be a multiple of " << kBlock << ", got "
        << rows->tensor.size(2);
  }
}

void check_factor_dtype(const Arg& factors) {
  PRECAST_CHECK(same_dtype(factors.tensor.dtype(), kUint8) || has_dtype(factors, DType::e4m3),
                ValueError)
      << factors.what() << " must be float8_e4m3fn or uint8, got "
      << to_string(factors.tensor.dtype());
}

// Checks everything except the places of the tokens, which `q` has already, and launches. `places`
// are the tensors that say them.
void quantize_and_append(const Call& call, int64_t tokens, bool from_slots,
                         QuantizeAppendNvfp4Params& q, std::initializer_list<TensorMemory> places) {
  const AppendArgs& args = call.args;
  const Arg& with = args.first;
  check_dtype(args.first_cache, kUint8);
  check_dtype(args.second_cache, kUint8);
  const Arg* factors[2] = {&call.first_factors, &call.second_factors};
  const bool one = factors[0] == factors[1];
  for (const Arg* arg : factors) check_factor_dtype(*arg);
  const TensorView& k_scale = call.k_scale.has_value() ? *call.k_scale : with.tensor;
  const TensorView& v_scale = call.v_scale.has_value() ? *call.v_scale : with.tensor;
  const Arg scales[2] = {{with.op, "k_scale", k_scale}, {with.op, "v_scale", v_scale}};
  set_scale(scales[0], call.k_scale.has_value(), call.scale_values[0], with, q.scale_data[0],
            q.scales[0]);
  set_scale(scales[1], call.v_scale.has_value(), call.scale_values[1], with, q.scale_data[1],
            q.scales[1]);
  // Without a tensor of its own, the memory of a scale is that of the rows.
  const bool any =
      check_append(args, tokens, 1, q.append, {scales[0], scales[1], *factors[0], *factors[1]});
  if (args.one_cache()) {
    check_written({args.first_cache}, places);
  } else {
    check_written({args.first_cache, args.second_cache}, places);
  }

  const AppendArg rows[2] = {{args.first}, {args.second}};
  for (int i = 0; i < 2; ++i) {
    const CacheView view =
        view_cache(*factors[i], {args.hnd, one ? i : -1, false}, rows[i], rows[i].size() / kBlock);
    // A cache without entries has one in AppendPagedParams.
    const CacheView cache =
        view_cache(args.first_cache, {args.hnd, args.one_cache() ? 0 : -1, false}, rows[0],
                   rows[0].size() / 2);
    check_same_pages(*factors[i], view, args.first_cache, cache);
    q.factors[i] = paged_rows(rows[i], view, 1);
  }
  const TensorMemory first(*factors[0]), second(*factors[1]);
  check_elements_apart(first);
  const auto check_apart = [&](std::initializer_list<TensorMemory> read) {
    if (one) return check_written({first}, read);
    check_written({first, second}, read);
  };
  if (!one) check_elements_apart(second);
  check_apart({args.first, args.second, scales[0], scales[1]});
  check_apart(places);
  if (!any) return;
  check_append_items(with, q.append, kBlock, "elements");
  launch_on(with, [&](cudaStream_t stream) {
    return quantize_append_nvfp4(q, from_slots, call.enable_pdl, stream);
  });
}

void append_by_table(TensorView append_key, TensorView append_value, TensorView batch_indices,
                     TensorView positions, TensorView k_cache, OptionalTensor v_cache,
                     TensorView k_sf, OptionalTensor v_sf, TensorView kv_indices,
                     TensorView kv_indptr, TensorView kv_last_page_len, OptionalTensor k_scale,
                     OptionalTensor v_scale, double k_scale_value, double v_scale_value, bool hnd,
                     bool enable_pdl) {
  const char* op = "nvfp4_quantize_append_paged_kv_cache";
  const Arg key = PRECAST_ARG(op, append_key);
  const Arg value = PRECAST_ARG(op, append_value);
  check_rows(key, value);
  const CacheArgs caches(op, k_cache, v_cache), factors(op, k_sf, v_sf, kFactorNames);
  const PageTableArgs table(op, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len);
  QuantizeAppendNvfp4Params q = {};
  table.check(key, q.append);
  quantize_and_append({{key, value, caches.first(), caches.second(), hnd, false, 2},
                       factors.first(),
                       factors.second(),
                       k_scale,
                       v_scale,
                       {k_scale_value, v_scale_value},
                       enable_pdl},
                      append_key.size(0), false, q,
                      {table.batch_indices, table.positions, table.kv_indices, table.kv_indptr,
                       table.kv_last_page_len});
}

void append_with_slots(TensorView append_key, TensorView append_value, TensorView slot_mapping,
                       TensorView k_cache, OptionalTensor v_cache, TensorView k_sf,
                       OptionalTensor v_sf, OptionalTensor k_scale, OptionalTensor v_scale,
                       double k_scale_value, double v_scale_value, bool hnd, bool enable_pdl) {
  const char* op = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping";
  const Arg key = PRECAST_ARG(op, append_key);
  const Arg value = PRECAST_ARG(op, append_value);
  check_rows(key, value);
  const CacheArgs caches(op, k_cache, v_cache), factors(op, k_sf, v_sf, kFactorNames);
  const Arg slots = PRECAST_ARG(op, slot_mapping);
  QuantizeAppendNvfp4Params q = {};
  const int64_t tokens = check_slots(slots, key, q.append);
  quantize_and_append({{key, value, caches.first(), caches.second(), hnd, false, 2},
                       factors.first(),
                       factors.second(),
                       k_scale,
                       v_scale,
                       {k_scale_value, v_scale_value},
                       enable_pdl},
                      tokens, true, q, {slots});
}

}  // namespace

PRECAST_EXPORT(nvfp4_quantize_append_paged_kv_cache, append_by_table)
PRECAST_EXPORT(nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, append_with_slots)

}  // namespace precast
