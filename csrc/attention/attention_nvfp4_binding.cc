// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of attention over a paged cache in NVFP4, by a plan.
#include "attention/attention_run.h"
#include "core/ffi_export.h"

namespace precast {

namespace {

constexpr int kBlock = 16;          // elements that share a scale
constexpr int64_t kStageBytes = 2;  // kernels hold keys and values as f16

// Keys or values, or their scales, in one tensor with both or a tensor each.
struct Half {
  Arg arg;
  bool has_both;
  int half;  // in dimension 1 of a tensor with both
};

Half half_of(const TensorView& first, const TensorView& second, bool has_both, int half,
             const char* one, const char* two) {
  const char* name = has_both ? one : two;
  return {{"run_paged_nvfp4", name, half == 0 ? first : second}, has_both, has_both ? half : 0};
}

AttentionScales scales_of(const Half& half, bool hnd) {
  const TensorView& t = half.arg.tensor;
  const int entry = 1 + half.has_both + hnd, head = 2 + half.has_both - hnd;
  AttentionScales scales;
  scales.data = static_cast<const unsigned char*>(data_of(t)) + half.half * t.stride(1);
  scales.page_stride = step_of(t, 0);
  scales.entry_stride = step_of(t, entry);
  scales.head_stride = step_of(t, head);
  return scales;
}

void run_paged_nvfp4(TensorView q, TensorView k_cache, OptionalTensor v_cache, TensorView k_sf,
                     OptionalTensor v_sf, TensorView out, OptionalTensor lse, OptionalTensor sinks,
                     TensorView block, double sm_factor, double out_scale, OptionalTensor qk_scale,
                     OptionalTensor v_scale, int64_t pdl) {
  const char* op = "run_paged_nvfp4";
  const Arg queries = PRECAST_ARG(op, q);
  check_cuda(queries);
  const PlanBlock& b = packed_block(PRECAST_ARG(op, block));
  check_queries(queries, b, kStageBytes, attention_head_dim_qk);
  const PlanShape& s = b.shape;
  const bool hnd = b.scores.hnd != 0, one_cache = !v_cache.has_value(), one_sf = !v_sf.has_value();
  const TensorView values = one_cache ? k_cache : *v_cache;
  const TensorView value_scales = one_sf ? k_sf : *v_sf;
  const Half codes[2] = {
      half_of(k_cache, values, one_cache, 0, "paged_kv_cache", "paged_kv_cache[0]"),
      half_of(k_cache, values, one_cache, 1, "paged_kv_cache", "paged_kv_cache[1]")};
  const Half scales[2] = {half_of(k_sf, value_scales, one_sf, 0, "kv_cache_sf", "kv_cache_sf[0]"),
                          half_of(k_sf, value_scales, one_sf, 1, "kv_cache_sf", "kv_cache_sf[1]")};
  Dim pages("pages");
  const int64_t head_dims[2] = {s.head_dim_qk, s.head_dim_vo};
  for (int i = 0; i < 2; ++i) {
    const Arg &cache = codes[i].arg, &factors = scales[i].arg;
    check_pages(TensorMatch(cache).same_device(queries).dtype(kUint8), s, one_cache, hnd, pages,
                head_dims[i] / 2);
    check_rows(cache);
    PRECAST_CHECK(same_dtype(factors.tensor.dtype(), kUint8) || has_dtype(factors, DType::e4m3),
                  ValueError)
        << factors.what() << " must be float8_e4m3fn or uint8, got "
        << to_string(factors.tensor.dtype());
    check_pages(TensorMatch(factors).same_device(queries), s, one_sf, hnd, pages,
                head_dims[i] / kBlock);
  }
  PRECAST_CHECK(s.page_size > 0 && pages <= kMostInt32 / s.page_size, ValueError)
      << codes[0].arg.what() << " must have pages of at least one entry and at most " << kMostInt32
      << " entries in all, got shape " << to_string(k_cache.shape());

  AttentionParams p = b.params;
  const Run run = {b,         queries,   {op, "out", out}, lse,    sinks,
                   sm_factor, out_scale, qk_scale,         v_scale};
  if (!fill(p, run)) return;
  check_memory(run, codes[0].arg, codes[1].arg);
  check_memory(run, scales[0].arg, scales[1].arg);
  const auto cache = [&](const Half& half) {
    return cache_of(half.arg, 0, 1 + half.has_both + hnd, 2 + half.has_both - hnd, half.half, 1);
  };
  p.k = cache(codes[0]);
  p.v = cache(codes[1]);
  p.k_scales = scales_of(scales[0], hnd);
  p.v_scales = scales_of(scales[1], hnd);
  p.num_pages = static_cast<uint32_t>(pages);
  if (p.num_pages == 0) {
    // As launch_run() does for caches: whatever a plan knows, only the queries are read.
    p.k_scales.data = p.v_scales.data = static_cast<const unsigned char*>(p.q);
    p.k_scales.page_stride = p.k_scales.entry_stride = p.k_scales.head_stride = 0;
    p.v_scales.page_stride = p.v_scales.entry_stride = p.v_scales.head_stride = 0;
  }
  launch_run(queries, p, pdl);
}

}  // namespace

PRECAST_EXPORT(run_paged_nvfp4, run_paged_nvfp4)

}  // namespace precast
