// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points that append to a paged KV cache without conversion.
#include "core/ffi_export.h"
#include "paged/paged_checks.h"
#include "precast/paged/batch_indices_positions.cuh"
#include "precast/paged/page.cuh"

namespace precast {

// csrc/paged/page.cu
cudaError_t append_paged(const AppendPagedParams& params, bool from_slots, bool enable_pdl,
                         cudaStream_t stream);
cudaError_t batch_indices_positions(const BatchIndicesPositionsParams& params, bool enable_pdl,
                                    cudaStream_t stream);

namespace {

int64_t item_bytes(const TensorView& tensor) { return (tensor.dtype().bits + 7) / 8; }

// Checks the two tensors that are appended.
void check_rows(const Arg& first, const Arg& second, int rank) {
  check_cuda(first);
  check_append_shape(first, rank);
  const DLDataType dtype = first.tensor.dtype();
  PRECAST_CHECK(dtype.lanes == 1 && (dtype.bits == 8 || dtype.bits == 16 || dtype.bits == 32),
                ValueError)
      << first.what() << " must have elements of 1, 2 or 4 bytes, got " << to_string(dtype);
  check_append_pair(second, first);
}

// A cache must have the dtype of the rows; uint8 matches any type of one byte.
void check_cache_dtype(const Arg& cache, const Arg& rows) {
  const DLDataType c = cache.tensor.dtype(), r = rows.tensor.dtype();
  const bool untyped = c.bits == 8 && r.bits == 8 && c.lanes == 1 &&
                       (same_dtype(c, kUint8) || same_dtype(r, kUint8));
  PRECAST_CHECK(untyped || same_dtype(c, r), ValueError)
      << cache.what() << " must be " << to_string(r) << " as " << rows.name << ", got "
      << to_string(c);
}

// Checks everything except the slots. Returns false if there is nothing to do.
bool check_copy(const AppendArgs& args, int64_t tokens, AppendPagedParams& p,
                std::initializer_list<TensorMemory> places) {
  check_cache_dtype(args.first_cache, args.first);
  check_cache_dtype(args.second_cache, args.second);
  if (!check_append(args, tokens, item_bytes(args.first.tensor), p, places)) return false;
  check_append_items(args.first, p, append_access_bytes(p), "bytes");
  return true;
}

void append_by_table(const AppendArgs& args, const PageTableArgs& table, bool enable_pdl) {
  const Arg& with = args.first;
  AppendPagedParams p;
  table.check(with, p);
  if (!check_copy(args, with.tensor.size(0), p,
                  {table.batch_indices, table.positions, table.kv_indices, table.kv_indptr,
                   table.kv_last_page_len})) {
    return;
  }
  launch_on(with, [&](cudaStream_t stream) { return append_paged(p, false, enable_pdl, stream); });
}

void append_by_slots(const AppendArgs& args, const TensorView& slot_mapping, bool enable_pdl) {
  const Arg slots{args.first.op, "slot_mapping", slot_mapping};
  AppendPagedParams p;
  const int64_t tokens = check_slots(slots, args.first, p);
  if (!check_copy(args, tokens, p, {slots})) return;
  launch_on(args.first,
            [&](cudaStream_t stream) { return append_paged(p, true, enable_pdl, stream); });
}

// Calls `run` with the arguments of an op on keys and values.
template <typename Run>
void with_keys_and_values(const char* op, const TensorView& append_key,
                          const TensorView& append_value, const TensorView& k_cache,
                          const OptionalTensor& v_cache, bool hnd, const Run& run) {
  const Arg key = PRECAST_ARG(op, append_key);
  const Arg value = PRECAST_ARG(op, append_value);
  check_rows(key, value, 3);
  const CacheArgs caches(op, k_cache, v_cache);
  run(AppendArgs{key, value, caches.first(), caches.second(), hnd, false});
}

// Does the same for the two parts of an MLA entry.
template <typename Run>
void with_mla(const char* op, const TensorView& append_ckv, const TensorView& append_kpe,
              const TensorView& ckv_cache, const TensorView& kpe_cache, const Run& run) {
  const Arg ckv = PRECAST_ARG(op, append_ckv);
  const Arg kpe = PRECAST_ARG(op, append_kpe);
  check_rows(ckv, kpe, 2);
  const Arg first = PRECAST_ARG(op, ckv_cache);
  const Arg second = PRECAST_ARG(op, kpe_cache);
  run(AppendArgs{ckv, kpe, first, second, false, true});
}

void append_paged_kv_cache(TensorView append_key, TensorView append_value, TensorView batch_indices,
                           TensorView positions, TensorView k_cache, OptionalTensor v_cache,
                           TensorView kv_indices, TensorView kv_indptr, TensorView kv_last_page_len,
                           bool hnd, bool enable_pdl) {
  const char* op = "append_paged_kv_cache";
  const PageTableArgs table(op, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len);
  with_keys_and_values(op, append_key, append_value, k_cache, v_cache, hnd,
                       [&](const AppendArgs& a) { append_by_table(a, table, enable_pdl); });
}

void append_paged_mla_kv_cache(TensorView append_ckv, TensorView append_kpe,
                               TensorView batch_indices, TensorView positions, TensorView ckv_cache,
                               TensorView kpe_cache, TensorView kv_indices, TensorView kv_indptr,
                               TensorView kv_last_page_len, bool enable_pdl) {
  const char* op = "append_paged_mla_kv_cache";
  const PageTableArgs table(op, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len);
  with_mla(op, append_ckv, append_kpe, ckv_cache, kpe_cache,
           [&](const AppendArgs& a) { append_by_table(a, table, enable_pdl); });
}

void append_with_slots(TensorView append_key, TensorView append_value, TensorView slot_mapping,
                       TensorView k_cache, OptionalTensor v_cache, bool hnd, bool enable_pdl) {
  with_keys_and_values("append_paged_kv_cache_with_slot_mapping", append_key, append_value, k_cache,
                       v_cache, hnd,
                       [&](const AppendArgs& a) { append_by_slots(a, slot_mapping, enable_pdl); });
}

void append_mla_with_slots(TensorView append_ckv, TensorView append_kpe, TensorView slot_mapping,
                           TensorView ckv_cache, TensorView kpe_cache, bool enable_pdl) {
  with_mla("append_paged_mla_kv_cache_with_slot_mapping", append_ckv, append_kpe, ckv_cache,
           kpe_cache, [&](const AppendArgs& a) { append_by_slots(a, slot_mapping, enable_pdl); });
}

int32_t* check_rows_out(const Arg& out, const Arg& with, int64_t nnz) {
  const TensorMatch match(out);
  return match.same_device(with).dtype(kInt32).shape({nnz}).contiguous().data<int32_t>();
}

void get_batch_indices_positions(TensorView append_indptr, TensorView seq_lens, int64_t nnz,
                                 TensorView batch_indices, TensorView positions, bool enable_pdl) {
  const char* op = "get_batch_indices_positions";
  const Arg indptr = PRECAST_ARG(op, append_indptr);
  const Arg lens = PRECAST_ARG(op, seq_lens);
  const Arg batches = PRECAST_ARG(op, batch_indices);
  const Arg places = PRECAST_ARG(op, positions);
  check_cuda(indptr);
  const int64_t batch = check_indptr_shape(indptr, "batch_size + 1");
  constexpr int64_t kMost = 0x7fffffff;
  PRECAST_CHECK(nnz >= 0 && nnz <= kMost, ValueError)
      << op << ": nnz must be from 0 to " << kMost << ", got " << nnz;
  PRECAST_CHECK(batch < kMost, ValueError)
      << indptr.what() << " must have at most " << kMost << " requests, got " << batch;
  BatchIndicesPositionsParams p = {};
  p.indptr = check_index(indptr, indptr, batch + 1);
  p.seq_lens = check_index(lens, indptr, batch);
  p.batch_indices = check_rows_out(batches, indptr, nnz);
  p.positions = check_rows_out(places, indptr, nnz);
  if (nnz == 0) return;
  TensorMatch(batches).apart(indptr).apart(lens);
  TensorMatch(places).apart(indptr).apart(lens).apart(batches);
  p.batch = static_cast<uint32_t>(batch);
  p.rows = static_cast<uint32_t>(nnz);
  launch_on(indptr, [&](cudaStream_t stream) {
    return precast::batch_indices_positions(p, enable_pdl, stream);
  });
}

}  // namespace

PRECAST_EXPORT(append_paged_kv_cache, append_paged_kv_cache)
PRECAST_EXPORT(append_paged_mla_kv_cache, append_paged_mla_kv_cache)
PRECAST_EXPORT(append_paged_kv_cache_with_slot_mapping, append_with_slots)
PRECAST_EXPORT(append_paged_mla_kv_cache_with_slot_mapping, append_mla_with_slots)
PRECAST_EXPORT(get_batch_indices_positions, get_batch_indices_positions)

}  // namespace precast
