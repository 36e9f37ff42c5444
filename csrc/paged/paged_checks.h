// SPDX-License-Identifier: Apache-2.0
// The arguments of ops that append to a paged KV cache: their checks, and the kernels' parameters.
#pragma once

#include "core/tensor_matcher.h"
#include "precast/paged/slot_mapping.cuh"

namespace precast {

// Checks a 1-D tensor of `count` int32 or int64 numbers on the device of `with`.
PRECAST_ONE_COPY IndexTensor check_index(const Arg& arg, const Arg& with, int64_t count) {
  IndexTensor index;
  TensorMatch(arg).same_device(with).index_dtype(index.is_int64).shape({count}).contiguous();
  index.data = data_of(arg.tensor);
  return index;
}

// Checks the shape [count + 1] of an indptr and returns the count. `shape` is its name in errors.
PRECAST_ONE_COPY int64_t check_indptr_shape(const Arg& indptr, const char* shape) {
  Dim size(shape, 1);
  check_shape(indptr, {size});
  return size - 1;
}

// Rows to append, [tokens, heads, size], or [tokens, size] for MLA.
struct AppendArg {
  const Arg& arg;
  int64_t more = 0;  // columns of another tensor that follow in the cache's rows

  bool has_heads() const { return arg.tensor.ndim() == 3; }
  int64_t tokens() const { return arg.tensor.size(0); }
  int64_t heads() const { return has_heads() ? arg.tensor.size(1) : 1; }
  int64_t size() const { return arg.tensor.size(-1) + more; }
};

PRECAST_ONE_COPY void check_append_shape(const Arg& arg, int rank) {
  PRECAST_CHECK(arg.tensor.ndim() == rank, ValueError)
      << arg.what() << " must have shape "
      << (rank == 3 ? "[tokens, heads, head_dim]" : "[tokens, head_dim]") << ", got "
      << to_string(arg.tensor.shape());
  check_columns(arg, false);
}

// Checks the second of two tensors to append: the tokens, heads and dtype of the first.
PRECAST_ONE_COPY void check_append_pair(const Arg& second, const Arg& first) {
  TensorMatch(second).same_device(first).dtype(first.tensor.dtype());
  check_append_shape(second, first.tensor.ndim());
  const AppendArg a{first}, b{second};
  PRECAST_CHECK(a.tokens() == b.tokens() && a.heads() == b.heads(), ValueError)
      << second.what() << " must have the tokens and heads of " << first.name << ", got "
      << to_string(second.tensor.shape()) << " for " << to_string(first.tensor.shape());
}

// The layout of a cache tensor: keys or values, or both in dimension 1.
struct CacheKind {
  bool hnd;     // the heads precede the entries of a page
  int half;     // the half of a tensor with both; -1 for a tensor of its own
  bool is_mla;  // no heads
};

// One cache. Strides are in elements; a stride that is never used is 0.
struct CacheView {
  void* data;
  int64_t pages, page_size;
  int64_t page_stride, entry_stride, head_stride;
};

// Views `cache` for the rows of `rows`, whose device it must be on. A shape with heads may omit
// page size 1. `row_bytes` is the size of a row of packed numbers, or -1.
PRECAST_ONE_COPY CacheView view_cache(const Arg& cache, const CacheKind& kind,
                                      const AppendArg& rows, int64_t row_bytes = -1) {
  const TensorView& t = cache.tensor;
  const int both = kind.half >= 0;
  check_same_device(cache, rows.arg);
  if (kind.is_mla) {
    check_rank(cache, 3, 3);
  } else {
    check_rank(cache, 3 + both, 4 + both);
  }
  PRECAST_CHECK(!both || t.size(1) == 2, ValueError)
      << cache.what() << " must hold keys and values in dimension 1 of size 2, got shape "
      << to_string(t.shape());
  check_columns(cache, false);

  const bool has_entries = kind.is_mla || t.ndim() == 4 + both;
  const int entries = has_entries ? 1 + both + (kind.hnd && !kind.is_mla) : -1;
  const int heads = kind.is_mla ? -1 : 1 + both + (has_entries && !kind.hnd);
  const int64_t size = row_bytes < 0 ? rows.size() : row_bytes;
  const bool fits = (kind.is_mla || t.size(heads) == rows.heads()) && t.size(-1) == size;
  PRECAST_CHECK(fits, ValueError) << cache.what() << " must hold rows of " << rows.heads() << " x "
                                  << size << (row_bytes < 0 ? " as " : " bytes for ")
                                  << rows.arg.name << ", got shape " << to_string(t.shape())
                                  << (kind.is_mla ? ""
                                      : kind.hnd  ? " in layout HND"
                                                  : " in layout NHD");
  const auto stride = [&](int dim) {
    return dim < 0 || t.size(dim) <= 1 ? int64_t(0) : t.stride(dim);
  };
  CacheView view;
  view.pages = t.size(0);
  view.page_size = entries < 0 ? 1 : t.size(entries);
  view.page_stride = stride(0);
  view.entry_stride = stride(entries);
  view.head_stride = stride(heads);
  const int64_t offset = kind.half == 1 ? t.stride(1) * ((t.dtype().bits + 7) / 8) : 0;
  view.data = static_cast<char*>(data_of(t)) + offset;
  constexpr int64_t kMaxSlots = 0x7fffffff;
  PRECAST_CHECK(view.page_size == 0 || view.pages <= kMaxSlots / view.page_size, ValueError)
      << cache.what() << " must have at most " << kMaxSlots << " entries, got shape "
      << to_string(t.shape());
  return view;
}

PRECAST_ONE_COPY void check_same_pages(const Arg& second, const CacheView& b, const Arg& first,
                                       const CacheView& a) {
  PRECAST_CHECK(a.pages == b.pages && a.page_size == b.page_size, ValueError)
      << second.what() << " must have " << a.pages << " pages of " << a.page_size << " as "
      << first.name << ", got " << b.pages << " of " << b.page_size;
}

// `scale` is the size of an element for sizes and strides in bytes, else 1.
inline PagedRows paged_rows(const AppendArg& rows, const CacheView& cache, int64_t scale) {
  const TensorView& t = rows.arg.tensor;
  PagedRows part;
  part.rows = data_of(t);
  part.cache = cache.data;
  part.size = rows.size() * scale;
  part.token_stride = t.size(0) > 1 ? t.stride(0) * scale : 0;
  part.head_stride = rows.has_heads() && t.size(1) > 1 ? t.stride(1) * scale : 0;
  part.page_stride = cache.page_stride * scale;
  part.entry_stride = cache.entry_stride * scale;
  part.cache_head_stride = cache.head_stride * scale;
  return part;
}

// What errors call one tensor with keys and values, or two.
struct CacheNames {
  const char* one = "paged_kv_cache";
  const char* first = "paged_kv_cache[0]";
  const char* second = "paged_kv_cache[1]";
};

// The caches of an op on keys and values: a pair, or one tensor that holds both.
class CacheArgs {
 public:
  CacheArgs(const char* op, const TensorView& k_cache, const OptionalTensor& v_cache,
            const CacheNames& names = {})
      : is_pair_(v_cache.has_value()),
        second_tensor_(is_pair_ ? *v_cache : k_cache),
        first_{op, is_pair_ ? names.first : names.one, k_cache},
        second_{op, names.second, second_tensor_} {}
  CacheArgs(const CacheArgs&) = delete;

  const Arg& first() const { return first_; }
  const Arg& second() const { return is_pair_ ? second_ : first_; }

 private:
  bool is_pair_;
  TensorView second_tensor_;
  Arg first_;
  Arg second_;
};

// Checks the slots of the first rows of `rows`, and returns their number. Why fewer are legal:
// engines pad the rows to the sizes of their CUDA graphs.
PRECAST_ONE_COPY int64_t check_slots(const Arg& slots, const Arg& rows, AppendPagedParams& p) {
  const int64_t most = rows.tensor.size(0);
  const bool fits = slots.tensor.ndim() == 1 && slots.tensor.size(0) <= most;
  PRECAST_CHECK(fits, ValueError) << slots.what() << " must have shape [tokens] with at most the "
                                  << most << " tokens of " << rows.name << ", got "
                                  << to_string(slots.tensor.shape());
  p.slots.tokens = check_index(slots, rows, slots.tensor.size(0));
  return slots.tensor.size(0);
}

// The tensors that say the places of tokens by a page table.
class PageTableArgs {
 public:
  PageTableArgs(const char* op, const TensorView& batch_indices, const TensorView& positions,
                const TensorView& kv_indices, const TensorView& kv_indptr,
                const TensorView& kv_last_page_len)
      : batch_indices{op, "batch_indices", batch_indices},
        positions{op, "positions", positions},
        kv_indices{op, "kv_indices", kv_indices},
        kv_indptr{op, "kv_indptr", kv_indptr},
        kv_last_page_len{op, "kv_last_page_len", kv_last_page_len} {}
  PageTableArgs(const PageTableArgs&) = delete;

  // Checks them for all tokens of `rows`, and sets the slots of `p`.
  void check(const Arg& rows, AppendPagedParams& p) const {
    const int64_t tokens = rows.tensor.size(0);
    p.slots.tokens = check_index(batch_indices, rows, tokens);
    p.slots.positions = check_index(positions, rows, tokens);
    const int64_t batch = check_indptr_shape(kv_indptr, "batch_size + 1");
    p.slots.kv_indptr = check_index(kv_indptr, rows, batch + 1);
    p.slots.kv_indices = check_index(
        kv_indices, rows, kv_indices.tensor.ndim() == 1 ? kv_indices.tensor.size(0) : -1);
    // No kernel reads it, because the positions determine where rows go.
    check_index(kv_last_page_len, rows, batch);
    p.slots.batch = static_cast<uint32_t>(batch < 0x7fffffff ? batch : 0x7fffffff);
    p.slots.kv_indices_count = kv_indices.tensor.size(0);
  }

  const Arg batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len;
};

// The tensors to append, and the cache or caches that they are appended to.
struct AppendArgs {
  const Arg& first;
  const Arg& second;
  const Arg& first_cache;
  const Arg& second_cache;  // the same as the first one if that holds both
  bool hnd;
  bool is_mla;
  int64_t numbers_per_byte = 0;  // of a packed cache, else 0

  bool one_cache() const { return &first_cache == &second_cache; }
};

// Sets both parts and the cache of `p`, except the slots' indices, for `tokens` tokens. The caller
// checks the dtypes. `places` are all other tensors of the call. Returns false if there is nothing
// to do.
PRECAST_ONE_COPY bool check_append(const AppendArgs& args, int64_t tokens, int64_t scale,
                                   AppendPagedParams& p,
                                   std::initializer_list<TensorMemory> places) {
  const AppendArg rows[2] = {{args.first}, {args.second}};
  const bool one = args.one_cache();
  const int64_t packed = args.numbers_per_byte;
  const auto view = [&](const Arg& cache, int i) {
    return view_cache(cache, {args.hnd, one ? i : -1, args.is_mla}, rows[i],
                      packed > 0 ? rows[i].size() / packed : -1);
  };
  const CacheView caches[2] = {view(args.first_cache, 0), view(args.second_cache, 1)};
  check_same_pages(args.second_cache, caches[1], args.first_cache, caches[0]);
  for (int i = 0; i < 2; ++i) p.parts[i] = paged_rows(rows[i], caches[i], scale);
  p.heads = static_cast<uint32_t>(rows[0].heads());
  p.slots.pages = caches[0].pages;
  p.slots.page_size =
      FastDivmod(static_cast<uint32_t>(caches[0].page_size ? caches[0].page_size : 1));
  const bool empty = tokens == 0 || rows[0].heads() == 0 ||
                     (rows[0].size() == 0 && rows[1].size() == 0) || caches[0].page_size == 0 ||
                     caches[0].pages == 0;

  const TensorMemory first_cache(args.first_cache);
  const TensorMemory second_cache = one ? first_cache : TensorMemory(args.second_cache);
  const auto check_apart = [&](std::initializer_list<TensorMemory> read) {
    if (one) return check_written({first_cache}, read);
    check_written({first_cache, second_cache}, read);
  };
  check_elements_apart(first_cache);
  if (!one) check_elements_apart(second_cache);
  check_apart({args.first, args.second});
  check_apart(places);
  p.tokens = static_cast<uint32_t>(tokens);
  const uint64_t most = kMaxItems;
  PRECAST_CHECK(
      static_cast<uint64_t>(tokens) <= most && static_cast<uint64_t>(rows[0].heads()) <= most,
      ValueError)
      << args.first.what() << " must have at most " << most << " tokens and heads, got shape "
      << to_string(args.first.tensor.shape());
  return !empty;
}

// Throws ValueError if there are more items, each of `item_size` `unit`, than a kernel can number.
PRECAST_ONE_COPY void check_append_items(const Arg& arg, const AppendPagedParams& p, int item_size,
                                         const char* unit) {
  PRECAST_CHECK(append_items(p, item_size) <= kMaxItems, ValueError)
      << arg.what() << " must have at most " << kMaxItems << " items of " << item_size << " "
      << unit << ", got shape " << to_string(arg.tensor.shape()) << "; call on parts of it";
}

}  // namespace precast
