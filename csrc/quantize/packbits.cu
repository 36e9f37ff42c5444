// SPDX-License-Identifier: Apache-2.0
// The kernels of the packbits module. It has no axes, because truth values are bytes.
#include "precast/quantize/packbits.cuh"
#include "precast/quantize/packbits_segments.cuh"

namespace precast {

cudaError_t packbits(const PackBitsParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_packbits(params, enable_pdl, stream);
}

cudaError_t segment_indptr(bool is_int64, const SegmentParams& params, bool enable_pdl,
                           cudaStream_t stream) {
  return is_int64 ? launch_segment_indptr<int64_t>(params, enable_pdl, stream)
                  : launch_segment_indptr<int32_t>(params, enable_pdl, stream);
}

cudaError_t segment_packbits(bool is_int64, const SegmentParams& params, bool enable_pdl,
                             cudaStream_t stream) {
  return is_int64 ? launch_segment_packbits<int64_t>(params, enable_pdl, stream)
                  : launch_segment_packbits<int32_t>(params, enable_pdl, stream);
}

}  // namespace precast
