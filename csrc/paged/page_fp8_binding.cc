// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points that quantise to fp8 while appending to a paged KV cache.
#include "core/ffi_export.h"
#include "paged/paged_checks.h"
#include "precast/paged/page_fp8.cuh"

namespace precast {

// csrc/paged/page_fp8.cu
extern const DType page_fp8_dtype;
extern const DType page_fp8_dtype_kv;
cudaError_t quantize_append_paged(const QuantizeAppendPagedParams& params, bool enable_pdl,
                                  cudaStream_t stream);

namespace {

// The smallest items of the kernel, csrc/paged/page_fp8.cu: 16 bytes of the rows.
constexpr int kItemSize = kVecBytes / 2;

struct Scale {
  const char* name;
  const OptionalTensor& tensor;
  double value;
};

const float* check_scale(const Scale& scale, const Arg& with) {
  if (!scale.tensor.has_value()) return nullptr;
  const TensorView tensor = *scale.tensor;
  const Arg arg{with.op, scale.name, tensor};
  check_one_number(arg, with);
  return static_cast<const float*>(data_of(tensor));
}

void check_rows(const Arg& first, const Arg& second, int rank) {
  check_cuda(first);
  check_dtype(first, page_fp8_dtype);
  check_append_shape(first, rank);
  check_append_pair(second, first);
}

void append(const AppendArgs& args, const TensorView& slot_mapping, const Scale& first,
            const Scale& second, bool enable_pdl) {
  const Arg slots{args.first.op, "slot_mapping", slot_mapping};
  QuantizeAppendPagedParams q = {};
  const int64_t tokens = check_slots(slots, args.first, q.append);
  check_dtype(args.first_cache, page_fp8_dtype_kv);
  check_dtype(args.second_cache, page_fp8_dtype_kv);
  q.scale_data[0] = check_scale(first, args.first);
  q.scale_data[1] = check_scale(second, args.first);
  q.scales[0] = static_cast<float>(first.value);
  q.scales[1] = static_cast<float>(second.value);
  if (!check_append(
          args, tokens, 1, q.append,
          {slots, {slots.op, first.name, first.tensor}, {slots.op, second.name, second.tensor}})) {
    return;
  }
  check_append_items(args.first, q.append, kItemSize, "elements");
  launch_on(args.first,
            [&](cudaStream_t stream) { return quantize_append_paged(q, enable_pdl, stream); });
}

void append_keys_and_values(TensorView append_key, TensorView append_value, TensorView slot_mapping,
                            TensorView k_cache, OptionalTensor v_cache, OptionalTensor k_scale,
                            OptionalTensor v_scale, double k_scale_value, double v_scale_value,
                            bool hnd, bool enable_pdl) {
  const char* op = "fp8_quantize_append_paged_kv_cache_with_slot_mapping";
  const Arg key = PRECAST_ARG(op, append_key);
  const Arg value = PRECAST_ARG(op, append_value);
  check_rows(key, value, 3);
  const CacheArgs caches(op, k_cache, v_cache);
  append(AppendArgs{key, value, caches.first(), caches.second(), hnd, false}, slot_mapping,
         {"k_scale", k_scale, k_scale_value}, {"v_scale", v_scale, v_scale_value}, enable_pdl);
}

void append_mla(TensorView append_ckv, TensorView append_kpe, TensorView slot_mapping,
                TensorView ckv_cache, TensorView kpe_cache, OptionalTensor scale,
                double scale_value, bool enable_pdl) {
  const char* op = "fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping";
  const Arg ckv = PRECAST_ARG(op, append_ckv);
  const Arg kpe = PRECAST_ARG(op, append_kpe);
  check_rows(ckv, kpe, 2);
  const Arg first = PRECAST_ARG(op, ckv_cache);
  const Arg second = PRECAST_ARG(op, kpe_cache);
  const Scale both{"scale", scale, scale_value};
  append(AppendArgs{ckv, kpe, first, second, false, true}, slot_mapping, both, both, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(fp8_quantize_append_paged_kv_cache_with_slot_mapping, append_keys_and_values)
PRECAST_EXPORT(fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping, append_mla)

}  // namespace precast
