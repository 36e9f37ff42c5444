// SPDX-License-Identifier: Apache-2.0
// The checks that the bindings of sampling share.
#pragma once

#include <limits>

#include "core/number_checks.h"
#include "core/tensor_matcher.h"
#include "precast/sampling/inverse_cdf.cuh"
#include "precast/sampling/row.cuh"

namespace precast {

// Checks that `arg` has shape [rows, vocab] and contiguous rows.
PRECAST_ONE_COPY void check_vocab_rows(const Arg& arg, bool is_output) {
  check_rank(arg, 2, 2);
  check_columns(arg, is_output);
  const int64_t vocab = arg.tensor.size(1);
  PRECAST_CHECK(arg.tensor.size(0) == 0 || (vocab >= 1 && vocab <= kMaxVocabSize), ValueError)
      << arg.what() << " must have 1 to " << kMaxVocabSize << " columns, got shape "
      << to_string(arg.tensor.shape());
  PRECAST_CHECK(arg.tensor.size(0) <= 0x0fffffff, ValueError)
      << arg.what() << " must have at most 2^28 - 1 rows, got shape "
      << to_string(arg.tensor.shape());
}

inline bool rows_are_vectors(const TensorView& rows) {
  const int64_t item = rows.dtype().bits / 8;
  return reinterpret_cast<uint64_t>(data_of(rows)) % kVecBytes == 0 &&
         rows.size(1) * item % kVecBytes == 0 &&
         (rows.size(0) <= 1 || rows.stride(0) * item % kVecBytes == 0);
}

// Returns the rows of `arg`, one for each output.
PRECAST_ONE_COPY RowSource source_of(const Arg& arg) {
  RowSource source = {};
  source.data = data_of(arg.tensor);
  source.stride = arg.tensor.stride(0);
  source.num_outputs = source.num_rows = static_cast<uint32_t>(arg.tensor.size(0));
  source.vocab_size = static_cast<int>(arg.tensor.size(1));
  source.aligned = rows_are_vectors(arg.tensor);
  return source;
}

// Checks a parameter with one value for each row of `rows`.
PRECAST_ONE_COPY void check_parameter(const Arg& arg, const Arg& rows) {
  check_same_device(arg, rows);
  const int64_t count = rows.tensor.size(0);
  const int rank = arg.tensor.ndim();
  PRECAST_CHECK(rank > 0, ValueError)
      << arg.what() << ": Expected a 1D tensor of shape (batch_size,) or scalar, got a "
      << "0-dimensional tensor";
  PRECAST_CHECK(rank == 1, ValueError)
      << arg.what() << ": Expected a 1D tensor or scalar, got a " << rank << "D tensor";
  PRECAST_CHECK(arg.tensor.size(0) == count, ValueError)
      << arg.op << ": Sampling parameter tensor batch size mismatch: " << arg.name
      << " must have shape [" << count << "], got " << to_string(arg.tensor.shape());
  check_contiguous(arg);
}

// Returns one fp32 number for each row of `rows`, or one for all rows.
PRECAST_ONE_COPY PerRowScalar per_row_scalar(const char* op, const char* name,
                                             const OptionalTensor& values, double value,
                                             const Arg& rows) {
  check_not_nan(op, name, value);
  const auto* data =
      TensorMatcher(op).optional<const float>(values, name, [&](const TensorMatch& match) {
        check_parameter(match, rows);
        match.dtype(DType::f32);
      });
  return {data, static_cast<float>(value)};
}

PRECAST_ONE_COPY const int32_t* top_k_of(const char* op, const OptionalTensor& values,
                                         const Arg& rows) {
  return TensorMatcher(op).optional<const int32_t>(values, "top_k", [&](const TensorMatch& match) {
    check_parameter(match, rows);
    match.dtype(kInt32);
  });
}

// Clamps k to the 32 bits of the kernels; more than 32 bits is no limit.
inline int32_t clamp_top_k(int64_t k) {
  return static_cast<int32_t>(k < 0 ? 0 : k > 0x7fffffff ? 0x7fffffff : k);
}

// Returns the seeds or offsets: one number, or one for each output.
PRECAST_ONE_COPY const uint64_t* seeds_of(const char* op, const char* name,
                                          const OptionalTensor& values, const Arg& rows,
                                          int64_t outputs, bool& per_row) {
  per_row = values.has_value() && values.value().ndim() > 0 && values.value().size(0) > 1;
  return TensorMatcher(op).optional<const uint64_t>(values, name, [&](const TensorMatch& match) {
    const Arg& arg = match.same_device(rows);
    const TensorView& tensor = arg.tensor;
    PRECAST_CHECK(same_dtype(tensor.dtype(), kInt64) || same_dtype(tensor.dtype(), kUint64),
                  ValueError)
        << arg.what() << " must be int64/uint64, got " << to_string(tensor.dtype());
    PRECAST_CHECK(tensor.ndim() == 1, ValueError)
        << arg.what() << " must be 1D, got shape " << to_string(tensor.shape());
    PRECAST_CHECK(tensor.size(0) == 1 || tensor.size(0) == outputs, ValueError)
        << arg.what() << " length must be 1 or " << outputs << ", got " << tensor.size(0);
    match.contiguous();
  });
}

PRECAST_ONE_COPY RandomSource random_source_of(const char* op, const OptionalTensor& seeds,
                                               int64_t seed, const OptionalTensor& offsets,
                                               int64_t offset, const Arg& rows, int64_t outputs) {
  RandomSource random = {};
  random.seeds = seeds_of(op, "seed tensor", seeds, rows, outputs, random.seed_per_row);
  random.offsets = seeds_of(op, "offset tensor", offsets, rows, outputs, random.offset_per_row);
  random.seed = static_cast<uint64_t>(seed);
  random.offset = static_cast<uint64_t>(offset);
  return random;
}

}  // namespace precast
