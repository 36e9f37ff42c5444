// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the dequantisation of a paged KV cache.
#include "core/ffi_export.h"
#include "paged/paged_checks.h"
#include "precast/quantize/paged_dequantize.cuh"
#include "quantize/block_scale_checks.h"

namespace precast {

// csrc/quantize/paged_dequantize.cu
extern const DType paged_dequantize_dtype;
cudaError_t paged_dequantize(const PagedDequantizeParams& params, bool enable_pdl,
                             cudaStream_t stream);

namespace {

const char* const kOp = "nvfp4_kv_dequantize_paged";

// Keys and values of a cache: one tensor each, or one tensor with both in dimension 1.
struct Halves {
  const Arg& first;
  const Arg& second;  // `first` if that holds both

  bool are_one() const { return &first == &second; }
  const Arg& half(int i) const { return i == 0 ? first : second; }
};

struct View {
  PagedBytes bytes;
  int64_t pages, page_size;
};

// Views half `i` of a cache that holds `size` bytes for each head of `out`.
View view_half(const Halves& halves, int i, bool hnd, const Arg& out, int64_t size) {
  const Arg& cache = halves.half(i);
  const TensorView& t = cache.tensor;
  const int both = halves.are_one();
  check_same_device(cache, out);
  check_rank(cache, 3 + both, 4 + both);
  PRECAST_CHECK(!both || t.size(1) == 2, ValueError)
      << cache.what() << " must hold keys and values in dimension 1 of size 2, got shape "
      << to_string(t.shape());
  check_columns(cache, false);
  const bool has_entries = t.ndim() == 4 + both;
  const int entries = has_entries ? 1 + both + hnd : -1;
  const int heads = 1 + both + (has_entries && !hnd);
  const int64_t wanted = out.tensor.size(2);
  PRECAST_CHECK(t.size(heads) == wanted && t.size(-1) == size, ValueError)
      << cache.what() << " must hold rows of " << wanted << " x " << size << " bytes for "
      << out.name << ", got shape " << to_string(t.shape()) << " in layout "
      << (hnd ? "HND" : "NHD");
  const auto stride = [&](int dim) {
    return dim < 0 || t.size(dim) <= 1 ? int64_t(0) : t.stride(dim);
  };
  View view;
  view.bytes.data = static_cast<char*>(data_of(t)) + (both && i == 1 ? t.stride(1) : 0);
  view.bytes.page_stride = stride(0);
  view.bytes.entry_stride = stride(entries);
  view.bytes.head_stride = stride(heads);
  view.pages = t.size(0);
  view.page_size = entries < 0 ? 1 : t.size(entries);
  return view;
}

void check_same_entries(const Arg& cache, const View& view, const Arg& first, const View& its) {
  PRECAST_CHECK(view.pages == its.pages && view.page_size == its.page_size, ValueError)
      << cache.what() << " must have " << its.pages << " pages of " << its.page_size << " as "
      << first.name << ", got " << view.pages << " of " << view.page_size;
}

void check_scale_dtype(const Arg& scales) {
  PRECAST_CHECK(same_dtype(scales.tensor.dtype(), kUint8) || has_dtype(scales, DType::e4m3),
                ValueError)
      << scales.what() << " must be float8_e4m3fn or uint8, got "
      << to_string(scales.tensor.dtype());
}

void check_out(const Arg& out, const Arg& data) {
  TensorMatch(out).same_device(data).dtype(paged_dequantize_dtype).rank(4, 4);
  PRECAST_CHECK(out.tensor.size(3) % 16 == 0, ValueError)
      << out.what() << "'s last dimension must be a multiple of 16, got " << out.tensor.size(3);
  check_contiguous(out);
}

void entry(const Halves& data, const Halves& scales, const Arg& tables, const Arg& lens,
           const Arg& k_scale, const Arg& v_scale, const Arg& output_k, const Arg& output_v,
           bool hnd, bool enable_pdl) {
  check_cuda(data.first);
  check_dtype(data.first, kUint8);
  check_dtype(data.second, kUint8);
  check_scale_dtype(scales.first);
  check_scale_dtype(scales.second);
  check_out(output_k, data.first);
  check_out(output_v, data.first);
  const TensorView& k = output_k.tensor;
  const TensorView& v = output_v.tensor;
  PRECAST_CHECK(k.size(0) == v.size(0) && k.size(1) == v.size(1) && k.size(2) == v.size(2),
                ValueError)
      << output_v.what() << " must have the requests, tokens and heads of " << output_k.name
      << ", got " << to_string(v.shape()) << " for " << to_string(k.shape());

  PagedDequantizeParams p;
  const Arg* outs[2] = {&output_k, &output_v};
  const Arg* globals[2] = {&k_scale, &v_scale};
  View first = {};
  for (int i = 0; i < 2; ++i) {
    const int64_t head_dim = outs[i]->tensor.size(3);
    const View codes = view_half(data, i, hnd, *outs[i], head_dim / 2);
    if (i == 0) first = codes;
    check_same_entries(data.half(i), codes, data.first, first);
    const View its = view_half(scales, i, hnd, *outs[i], head_dim / 16);
    check_same_entries(scales.half(i), its, data.first, first);
    check_one_number(*globals[i], data.first);
    p.parts[i].data = codes.bytes;
    p.parts[i].scales = its.bytes;
    p.parts[i].global = static_cast<const float*>(data_of(globals[i]->tensor));
    p.parts[i].out = data_of(outs[i]->tensor);
    p.parts[i].head_dim = static_cast<uint32_t>(head_dim);
  }

  const TensorView& table = tables.tensor;
  Dim pages("pages of a request");
  TensorMatch(tables).same_device(data.first).index_dtype(p.block_tables.is_int64);
  TensorMatch(tables).shape({k.size(0), pages}).unit_stride();
  const bool enough = first.page_size > 0
                          ? pages >= (k.size(1) + first.page_size - 1) / first.page_size
                          : k.size(1) == 0;
  PRECAST_CHECK(enough, ValueError)
      << tables.what() << " must have pages of " << first.page_size << " entries for the "
      << k.size(1) << " tokens of " << output_k.name << ", got " << pages << " pages a request";
  TensorMatch(lens).same_device(data.first).dtype(kInt32).shape({k.size(0)}).contiguous();
  if (k.numel() == 0 && v.numel() == 0) return;

  constexpr int64_t kMost = 0x7fffffff;
  PRECAST_CHECK(k.size(0) <= kMost && k.size(1) <= kMost && k.size(2) <= kMost &&
                    k.size(3) <= kMost && v.size(3) <= kMost && first.page_size <= kMost,
                ValueError)
      << output_k.what() << " must have at most " << kMost << " in each dimension, got shape "
      << to_string(k.shape());
  p.block_tables.data = data_of(table);
  p.table_stride = table.size(0) > 1 ? table.stride(0) : 0;
  p.seq_lens = static_cast<const int32_t*>(data_of(lens.tensor));
  p.batch = static_cast<uint32_t>(k.size(0));
  p.length = static_cast<uint32_t>(k.size(1));
  p.heads = static_cast<uint32_t>(k.size(2));
  p.pages = first.pages;
  p.page_size = FastDivmod(static_cast<uint32_t>(first.page_size));
  PRECAST_CHECK(plan_paged_dequantize(p, 1), ValueError)
      << output_k.what() << " must have at most " << kMaxItems << " items of " << kVecBytes
      << " bytes, got shape " << to_string(k.shape()) << "; call on parts of it";
  for (const Arg* out : outs) {
    check_vector_aligned(*out);
    const TensorMemory written(*out);
    for (const Arg* read : {&data.first, &data.second, &scales.first, &scales.second, &tables,
                            &lens, &k_scale, &v_scale}) {
      check_memory_apart(written, *read);
    }
  }
  check_memory_apart(TensorMemory(output_v), output_k);
  launch_on(data.first,
            [&](cudaStream_t stream) { return paged_dequantize(p, enable_pdl, stream); });
}

void nvfp4_kv_dequantize_paged(TensorView k_cache, OptionalTensor v_cache, TensorView k_sf,
                               OptionalTensor v_sf, TensorView block_tables, TensorView seq_lens,
                               TensorView k_scale, TensorView v_scale, TensorView output_k,
                               TensorView output_v, bool hnd, bool enable_pdl) {
  const bool pair = v_cache.has_value(), sf_pair = v_sf.has_value();
  const TensorView second = pair ? *v_cache : k_cache;
  const TensorView second_sf = sf_pair ? *v_sf : k_sf;
  const Arg keys{kOp, pair ? "paged_kv_cache[0]" : "paged_kv_cache", k_cache};
  const Arg values{kOp, "paged_kv_cache[1]", second};
  const Arg key_scales{kOp, sf_pair ? "kv_cache_sf[0]" : "kv_cache_sf", k_sf};
  const Arg value_scales{kOp, "kv_cache_sf[1]", second_sf};
  entry({keys, pair ? values : keys}, {key_scales, sf_pair ? value_scales : key_scales},
        PRECAST_ARG(kOp, block_tables), PRECAST_ARG(kOp, seq_lens), PRECAST_ARG(kOp, k_scale),
        PRECAST_ARG(kOp, v_scale), PRECAST_ARG(kOp, output_k), PRECAST_ARG(kOp, output_v), hnd,
        enable_pdl);
}

}  // namespace

PRECAST_EXPORT(nvfp4_kv_dequantize_paged, nvfp4_kv_dequantize_paged)

}  // namespace precast
