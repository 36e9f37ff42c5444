// SPDX-License-Identifier: Apache-2.0
// What the entry points that work on rows of the vocabulary check alike.
#pragma once

#include <limits>

#include "core/memory_checks.h"
#include "core/tvm_ffi_utils.h"
#include "precast/sampling/inverse_cdf.cuh"
#include "precast/sampling/row.cuh"

namespace precast {

// `arg` is 2-D, [rows, vocab], with contiguous elements.
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

// The rows of `arg`, each an output.
PRECAST_ONE_COPY RowSource source_of(const Arg& arg) {
  RowSource source = {};
  source.data = data_of(arg.tensor);
  source.stride = arg.tensor.stride(0);
  source.num_outputs = source.num_rows = static_cast<uint32_t>(arg.tensor.size(0));
  source.vocab_size = static_cast<int>(arg.tensor.size(1));
  source.aligned = rows_are_vectors(arg.tensor);
  return source;
}

// A contiguous vector of `size` elements on the device of `other`.
PRECAST_ONE_COPY void check_vector_beside(const Arg& arg, const Arg& other, int64_t size) {
  check_same_device(arg, other);
  check_vector(arg, size);
}

PRECAST_ONE_COPY bool is_integer(const Arg& arg, uint8_t bits, bool or_unsigned = false) {
  const DLDataType type = arg.tensor.dtype();
  return same_dtype(type, {kDLInt, bits, 1}) ||
         (or_unsigned && same_dtype(type, {kDLUInt, bits, 1}));
}

// Indices or tokens: int32, or int64, for which it returns true.
PRECAST_ONE_COPY bool check_index_dtype(const Arg& arg) {
  const bool wide = is_integer(arg, 64);
  PRECAST_CHECK(wide || is_integer(arg, 32), ValueError)
      << arg.what() << " must be int32 or int64, got " << to_string(arg.tensor.dtype());
  return wide;
}

PRECAST_ONE_COPY void check_int32(const Arg& arg) {
  PRECAST_CHECK(is_integer(arg, 32), ValueError)
      << arg.what() << " must be int32, got " << to_string(arg.tensor.dtype());
}

// A parameter that differs from row to row of `rows`.
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

// One fp32 a row of `rows`, or one number for all.
PRECAST_ONE_COPY PerRowScalar number_of(const char* op, const char* name,
                                        const OptionalTensor& values, double value,
                                        const Arg& rows) {
  PerRowScalar number = {nullptr, static_cast<float>(value)};
  if (!values.has_value()) return number;
  const TensorView tensor = values.value();
  const Arg arg = {op, name, tensor};
  check_parameter(arg, rows);
  check_dtype(arg, DType::f32);
  number.values = static_cast<const float*>(data_of(tensor));
  return number;
}

PRECAST_ONE_COPY const int32_t* top_k_of(const char* op, const OptionalTensor& values,
                                         const Arg& rows) {
  if (!values.has_value()) return nullptr;
  const TensorView tensor = values.value();
  const Arg arg = {op, "top_k", tensor};
  check_parameter(arg, rows);
  check_int32(arg);
  return static_cast<const int32_t*>(data_of(tensor));
}

// k as a kernel takes it: more than 32 bits is no limit.
inline int32_t clamp_top_k(int64_t k) {
  return static_cast<int32_t>(k < 0 ? 0 : k > 0x7fffffff ? 0x7fffffff : k);
}

// Seeds or offsets: one, or one an output.
PRECAST_ONE_COPY const uint64_t* random_words_of(const char* op, const char* name,
                                                 const OptionalTensor& values, const Arg& rows,
                                                 int64_t outputs, bool& per_row) {
  per_row = false;
  if (!values.has_value()) return nullptr;
  const TensorView tensor = values.value();
  const Arg arg = {op, name, tensor};
  check_same_device(arg, rows);
  PRECAST_CHECK(is_integer(arg, 64, true), ValueError)
      << arg.what() << " must be int64/uint64, got " << to_string(tensor.dtype());
  PRECAST_CHECK(tensor.ndim() == 1, ValueError)
      << arg.what() << " must be 1D, got shape " << to_string(tensor.shape());
  PRECAST_CHECK(tensor.size(0) == 1 || tensor.size(0) == outputs, ValueError)
      << arg.what() << " length must be 1 or " << outputs << ", got " << tensor.size(0);
  check_contiguous(arg);
  per_row = tensor.size(0) > 1;
  return static_cast<const uint64_t*>(data_of(tensor));
}

PRECAST_ONE_COPY RandomSource random_of(const char* op, const OptionalTensor& seeds, int64_t seed,
                                        const OptionalTensor& offsets, int64_t offset,
                                        const Arg& rows, int64_t outputs) {
  RandomSource random = {};
  random.seeds = random_words_of(op, "seed tensor", seeds, rows, outputs, random.seed_per_row);
  random.offsets =
      random_words_of(op, "offset tensor", offsets, rows, outputs, random.offset_per_row);
  random.seed = static_cast<uint64_t>(seed);
  random.offset = static_cast<uint64_t>(offset);
  return random;
}

}  // namespace precast
