// SPDX-License-Identifier: Apache-2.0
// What the bindings of RoPE share: tensors viewed as tokens of heads, positions, caches of cosines
// and sines, and segments.
#pragma once

#include "core/number_checks.h"
#include "paged/paged_checks.h"
#include "precast/rope/rope_params.cuh"

namespace precast {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxTokens = 0x7fffffff;

// A tensor viewed as [tokens, heads, dim].
struct Heads {
  const Arg& arg;
  int64_t tokens, heads, dim;
  int64_t token_stride, head_stride;
};

// Views a tensor [tokens, heads, dim], or [tokens, heads * dim] with heads of `head_dim` elements.
PRECAST_ONE_COPY Heads heads_of(const Arg& arg, int64_t head_dim) {
  const TensorView& t = arg.tensor;
  check_rank(arg, 2, 3);
  check_columns(arg, false);
  const int64_t last = t.size(-1);
  Heads heads = {arg, t.size(0), 1, last, t.stride(0), 0};
  if (t.ndim() == 3) {
    heads.heads = t.size(1);
    heads.head_stride = t.stride(1);
  } else if (last != head_dim) {
    PRECAST_CHECK(head_dim > 0 && last % head_dim == 0, ValueError)
        << arg.what() << "'s last dimension must be a multiple of the head size " << head_dim
        << ", got shape " << to_string(t.shape());
    heads.heads = last / head_dim;
    heads.dim = heads.head_stride = head_dim;
  }
  // The stride of a dimension with one element has no meaning.
  if (heads.tokens <= 1) heads.token_stride = 0;
  if (heads.heads <= 1) heads.head_stride = 0;
  PRECAST_CHECK(heads.heads == 0 || heads.tokens <= kMaxTokens / heads.heads, ValueError)
      << arg.what() << " must have at most " << kMaxTokens << " heads in all, got shape "
      << to_string(t.shape()) << "; call on parts of it";
  return heads;
}

PRECAST_ONE_COPY void check_head_dim(const Heads& heads) {
  PRECAST_CHECK(heads.dim % kRopeVec == 0 && heads.dim <= kMaxHeadDim, ValueError)
      << heads.arg.what() << "'s head size must be a multiple of " << kRopeVec << " up to "
      << kMaxHeadDim << ", got " << heads.dim;
}

PRECAST_ONE_COPY void check_same_tokens(const Heads& heads, const Heads& other) {
  PRECAST_CHECK(heads.tokens == other.tokens, ValueError)
      << heads.arg.what() << " must have " << other.tokens << " tokens as " << other.arg.name
      << ", got " << heads.tokens;
}

PRECAST_ONE_COPY void check_out_rows(const Arg& out) {
  check_columns(out, true);
  check_elements_apart(out);
}

// Checks requests: token ranges and first positions, of one dtype each.
PRECAST_ONE_COPY RopePositions check_requests(const Arg& indptr, const Arg& offsets,
                                              const Arg& device_of) {
  const int64_t requests = check_indptr_shape(indptr, "requests + 1");
  PRECAST_CHECK(requests <= kMaxTokens, ValueError)
      << indptr.what() << " must have at most " << kMaxTokens << " requests, got " << requests;
  RopePositions positions = {};
  positions.indptr = check_index(indptr, device_of, requests + 1);
  positions.offsets = check_index(offsets, device_of, requests);
  positions.requests = static_cast<int>(requests);
  return positions;
}

PRECAST_ONE_COPY void check_rotary_dim(const char* op, int64_t rotary_dim, int64_t head_dim) {
  PRECAST_CHECK(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= head_dim, ValueError)
      << op << ": rotary_dim must be even, from 2 to the head size " << head_dim << ", got "
      << rotary_dim;
}

// Checks and sets the cache, whose rows hold the cosines of rotary_dim / 2 pairs, then the sines.
PRECAST_ONE_COPY void set_cache(RopeAngleSource& source, const Arg& cache, const Arg& device_of) {
  check_same_device(cache, device_of);
  PRECAST_CHECK(has_dtype(cache, DType::f32), ValueError)
      << cache.op << ": cos_sin_cache should be float32, got " << to_string(cache.tensor.dtype());
  TensorMatch(cache).rank(2, 2).unit_stride();
  const int64_t rows = cache.tensor.size(0);
  source.cache.rows = static_cast<const float*>(data_of(cache.tensor));
  source.cache.stride = rows > 1 ? cache.tensor.stride(0) : 0;
  source.cache.max_position = static_cast<uint32_t>(rows < kMaxTokens ? rows : kMaxTokens);
  source.rotary_dim = static_cast<int>(cache.tensor.size(1));
}

// Adds the columns from `column` to `column + dim` - 1 of all heads. `scale` is for fp8.
PRECAST_ONE_COPY RopeSegment& add_segment(RopeParams& params, const Heads& in, const Heads& out,
                                          int64_t column, int64_t dim, bool rotates, float scale) {
  const auto at = [column](const Heads& heads) {
    return static_cast<char*>(data_of(heads.arg.tensor)) +
           column * ((heads.arg.tensor.dtype().bits + 7) / 8);
  };
  RopeSegment& segment = params.segments[params.segment_count++];
  segment.input = at(in);
  segment.out = at(out);
  segment.input_token_stride = in.token_stride;
  segment.input_head_stride = in.head_stride;
  segment.out_token_stride = out.token_stride;
  segment.out_head_stride = out.head_stride;
  segment.heads = static_cast<int>(in.heads);
  segment.dim = static_cast<int>(dim);
  segment.rotates = rotates;
  segment.scale = scale;
  return segment;
}

// Throws ValueError if there are more vectors than a kernel can number.
PRECAST_ONE_COPY void check_rope_items(const Arg& arg, RopeParams params) {
  PRECAST_CHECK(params.tokens == 0 || plan_rope(params, 1), ValueError)
      << arg.what() << " must have at most " << kMaxItems << " vectors of 16 elements, got shape "
      << to_string(arg.tensor.shape()) << "; call on parts of it";
}

}  // namespace precast
