// SPDX-License-Identifier: Apache-2.0
// Runs of MLA over pages by a plan: the same for the kernels of every GPU and those of sm_90a.
#pragma once

#include "attention/attention_run.h"
#include "precast/mla/params.cuh"

namespace precast {

// The .cu file of the module, which has what attention/attention_run.h names, too: the dtype of
// queries and outputs, head_dim_ckv + head_dim_kpe as attention_head_dim_qk, and head_dim_ckv as
// attention_head_dim_vo.
extern const DType mla_dtype_kv;
cudaError_t mla(const MlaParams& params, bool enable_pdl, cudaStream_t stream);

// The argument of ckv or kpe that only head_dim_kpe > 0 has.
inline const TensorView* kpe_or_null(const char* op, const char* name, const OptionalTensor& tensor,
                                     int64_t head_dim_kpe) {
  PRECAST_CHECK(tensor.has_value() == (head_dim_kpe > 0), ValueError)
      << op << ": " << name << " must be " << (head_dim_kpe > 0 ? "a tensor" : "None")
      << " for head_dim_kpe " << head_dim_kpe << " of plan()";
  return tensor.has_value() ? &*tensor : nullptr;
}

// Pages of ckv or of kpe.
inline void check_mla_cache(const Arg& cache, const Arg& q, const PlanShape& s, Dim& pages,
                            int64_t columns) {
  TensorMatch(cache)
      .same_device(q)
      .dtype(mla_dtype_kv)
      .shape({pages, s.page_size, columns})
      .unit_stride();
  check_rows(cache);
}

template <bool kSm90>
void run_mla(TensorView q_nope, OptionalTensor q_pe, TensorView ckv_cache, OptionalTensor kpe_cache,
             TensorView out, OptionalTensor lse, OptionalTensor sinks, TensorView block,
             double sm_factor, double out_scale, OptionalTensor qk_scale, OptionalTensor v_scale,
             double kpe_ratio, OptionalTensor kpe_scale, OptionalTensor ckv_scale_arr,
             bool lse_base_e, bool enable_pdl) {
  const char* op = kSm90 ? "run_mla_sm90" : "run_mla";
  const Arg q = PRECAST_ARG(op, q_nope), ckv = PRECAST_ARG(op, ckv_cache);
  const bool is_fp8 = mla_dtype_kv == DType::e4m3;
  check_cuda(q);
  const PlanBlock& b = packed_block(PRECAST_ARG(op, block));
  const PlanShape& s = b.shape;
  check_queries(q, b, is_fp8 ? 1 : 2, attention_head_dim_vo, true);
  PRECAST_CHECK((s.sm90 != 0) == kSm90, ValueError)
      << op << ": block must be of a plan for " << (kSm90 ? "mla_sm90" : "mla") << ", got one for "
      << (kSm90 ? "mla" : "mla_sm90") << ". Fix: call plan()";
  const int64_t dim_ckv = s.head_dim_vo, dim_kpe = s.head_dim_qk - dim_ckv;
  Dim pages("pages");
  check_mla_cache(ckv, q, s, pages, dim_ckv);
  PRECAST_CHECK(s.page_size > 0 && pages <= kMostInt32 / s.page_size, ValueError)
      << ckv.what() << " must have pages of at least one entry and at most " << kMostInt32
      << " entries in all, got shape " << to_string(ckv_cache.shape());
  const TensorView* const pe = kpe_or_null(op, "q_pe", q_pe, dim_kpe);
  const TensorView* const kpe = kpe_or_null(op, "kpe_cache", kpe_cache, dim_kpe);

  MlaParams p;
  static_cast<AttentionParams&>(p) = b.params;
  const Run run = {b, q, {op, "out", out}, lse, sinks, sm_factor, out_scale, qk_scale, v_scale};
  const bool has_work = fill(p, run);
  if (pe != nullptr) {
    const Arg arg = {op, "q_pe", *pe};
    TensorMatch(arg)
        .same_device(q)
        .dtype(attention_dtype_q)
        .shape({q_nope.size(0), s.num_qo_heads, dim_kpe})
        .unit_stride();
    check_rows(arg);
    check_span(arg);
    if (kSm90) check_steps(arg);
    p.q_pe = data_of(*pe);
    p.q_pe_stride = pe->size(0) > 1 ? pe->stride(0) : 0;
    p.q_pe_head_stride = pe->size(1) > 1 ? pe->stride(1) : 0;
    check_mla_cache({op, "kpe_cache", *kpe}, q, s, pages, dim_kpe);
  }
  p.kpe_ratio = finite_float(op, "kpe_ratio", kpe_ratio);
  p.kpe_scale = number_or_null(q, "kpe_scale", kpe_scale);
  p.ckv_scales = TensorMatcher(op).optional<const float>(
      ckv_scale_arr, "ckv_scale_arr", [&](const TensorMatch& match) {
        match.same_device(q)
            .dtype(DType::f32)
            .shape({pages, s.page_size, dim_ckv / kMlaScaleColumns})
            .contiguous();
      });
  PRECAST_CHECK(is_fp8 || (kpe_ratio == 1.0 && p.kpe_scale == nullptr && p.ckv_scales == nullptr),
                ValueError)
      << op << ": kpe_ratio, kpe_scale and ckv_scale_arr are for caches of float8_e4m3fn, got "
      << to_string(ckv_cache.dtype());
  PRECAST_CHECK(!kSm90 || p.scale > 0.0f, ValueError)
      << op << ": sm_scale * sm_factor must be positive, got " << p.scale
      << ". Fix: plan with backend='fa2'";
  if (!has_work) return;
  check_memory(run, ckv, ckv);
  const TensorMemory more[] = {{op, "q_pe", q_pe},
                               {op, "kpe_cache", kpe_cache},
                               {op, "kpe_scale", kpe_scale},
                               {op, "ckv_scale_arr", ckv_scale_arr}};
  const auto check_apart_from_more = [&](std::initializer_list<TensorMemory> written) {
    check_written(written, {more[0], more[1], more[2], more[3]});
  };
  check_apart_from_more({run.out, {op, "lse", lse}});
  check_apart_from_more({{op, "int_workspace", p.schedule.plan, b.int_bytes},
                         {op, "float_workspace", p.partials, b.float_bytes}});
  p.v = cache_of(ckv, 0, 1, -1, 0, 0);
  if (kpe != nullptr) p.k = cache_of({op, "kpe_cache", *kpe}, 0, 1, -1, 0, 0);
  p.lse_factor = lse_base_e ? 0.6931471805599453f : 1.0f;
  p.num_pages = static_cast<uint32_t>(pages);
  place_missing_pages(p);
  launch_on(q, [&](cudaStream_t stream) { return mla(p, enable_pdl, stream); });
}

}  // namespace precast
