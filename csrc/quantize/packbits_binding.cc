// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the packing of truth values.
#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "precast/quantize/packbits.cuh"
#include "precast/quantize/packbits_segments.cuh"

namespace precast {

// csrc/quantize/packbits.cu
cudaError_t packbits(const PackBitsParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t segment_indptr(bool is_int64, const SegmentParams& params, bool enable_pdl,
                           cudaStream_t stream);
cudaError_t segment_packbits(bool is_int64, const SegmentParams& params, bool enable_pdl,
                             cudaStream_t stream);

namespace {

void check_values(const Arg& x) {
  check_cuda(x);
  const DLDataType dtype = x.tensor.dtype();
  PRECAST_CHECK(same_dtype(dtype, kBool) || same_dtype(dtype, kUint8), ValueError)
      << x.what() << " must be bool or uint8, got " << to_string(dtype);
  TensorMatch(x).rank(1, 1).contiguous();
}

void check_bytes(const Arg& y, const Arg& x) {
  TensorMatch(y).same_device(x).dtype(kUint8).rank(1, 1).contiguous();
}

// Returns whether the indices are 64-bit.
bool check_indptr(const Arg& indptr) {
  bool is_int64;
  TensorMatch(indptr).index_dtype(is_int64).rank(1, 1).contiguous();
  PRECAST_CHECK(indptr.tensor.size(0) >= 1 && indptr.tensor.size(0) <= 0x40000000, ValueError)
      << indptr.what() << " must have 1 to 2^30 elements, got shape "
      << to_string(indptr.tensor.shape());
  return is_int64;
}

// new_indptr counts bytes in int32.
void check_bytes_fit(const Arg& x, const Arg& indptr) {
  const int64_t count = x.tensor.size(0), segments = indptr.tensor.size(0) - 1;
  PRECAST_CHECK((count + 7 * segments) / 8 <= 0x7fffffff, ValueError)
      << x.op << ": x and indptr must make at most 2^31 - 1 bytes, got " << count << " values in "
      << segments << " segments";
}

void check_new_indptr(const Arg& new_indptr, const Arg& indptr) {
  TensorMatch(new_indptr).same_device(indptr).dtype(kInt32).shape_of(indptr).contiguous();
}

void packbits_export(TensorView x, TensorView y, bool little, bool enable_pdl) {
  const char* op = "packbits";
  const Arg in = PRECAST_ARG(op, x);
  const Arg to = PRECAST_ARG(op, y);
  check_values(in);
  check_bytes(to, in);
  check_shape(to, {(x.size(0) + 7) / 8});
  if (x.size(0) == 0) return;
  check_memory_apart(to, in);
  PackBitsParams params = {};
  params.x = data_of(x);
  params.y = data_of(y);
  params.count = x.size(0);
  params.bytes = y.size(0);
  params.little = little;
  launch_on(in, [&](cudaStream_t stream) { return packbits(params, enable_pdl, stream); });
}

// `x` is checked here, before anything is computed for it.
void segment_packbits_indptr_export(TensorView x, TensorView indptr, TensorView new_indptr,
                                    bool enable_pdl) {
  const char* op = "segment_packbits";
  const Arg values = PRECAST_ARG(op, x);
  const Arg in = PRECAST_ARG(op, indptr);
  const Arg to = PRECAST_ARG(op, new_indptr);
  check_values(values);
  check_same_device(in, values);
  const bool is_int64 = check_indptr(in);
  check_bytes_fit(values, in);
  check_new_indptr(to, in);
  check_written({to}, {in, values});
  SegmentParams params = {};
  params.indptr = data_of(indptr);
  params.new_indptr = static_cast<int32_t*>(data_of(new_indptr));
  params.segments = static_cast<int32_t>(indptr.size(0) - 1);
  launch_on(in, [&](cudaStream_t stream) {
    return segment_indptr(is_int64, params, enable_pdl, stream);
  });
}

void segment_packbits_export(TensorView x, TensorView indptr, TensorView new_indptr, TensorView out,
                             bool little, bool enable_pdl) {
  const char* op = "segment_packbits";
  const Arg in = PRECAST_ARG(op, x);
  const Arg starts = PRECAST_ARG(op, indptr);
  const Arg new_starts = PRECAST_ARG(op, new_indptr);
  const Arg to = PRECAST_ARG(op, out);
  check_values(in);
  check_same_device(starts, in);
  const bool is_int64 = check_indptr(starts);
  check_bytes_fit(in, starts);
  check_new_indptr(new_starts, starts);
  check_bytes(to, in);
  check_written({new_starts, to}, {in, starts});
  SegmentParams params = {};
  params.bits.x = data_of(x);
  params.bits.y = data_of(out);
  params.bits.count = x.size(0);
  params.bits.bytes = out.size(0);
  params.bits.little = little;
  params.indptr = data_of(indptr);
  params.new_indptr = static_cast<int32_t*>(data_of(new_indptr));
  params.segments = static_cast<int32_t>(indptr.size(0) - 1);
  launch_on(in, [&](cudaStream_t stream) {
    return segment_packbits(is_int64, params, enable_pdl, stream);
  });
}

}  // namespace

PRECAST_EXPORT(packbits, packbits_export)
PRECAST_EXPORT(segment_packbits, segment_packbits_export)
PRECAST_EXPORT(segment_packbits_indptr, segment_packbits_indptr_export)

}  // namespace precast
