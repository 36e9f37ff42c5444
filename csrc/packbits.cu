// SPDX-License-Identifier: Apache-2.0
// The kernels of the packbits module: PRECAST_DTYPE is u8, the one type of truth values.
#include "precast/packbits.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/packbits.cu: define the module's element type, -DPRECAST_DTYPE=u8"
#endif

namespace precast {

namespace words {
using u8 = Byte;
using Type = PRECAST_DTYPE;  // Why: another type than u8 must not compile.
}  // namespace words

cudaError_t packbits(const PackBitsParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_packbits(params, enable_pdl, stream);
}

cudaError_t segment_indptr(bool wide, const SegmentParams& params, bool enable_pdl,
                           cudaStream_t stream) {
  return wide ? launch_segment_indptr<int64_t>(params, enable_pdl, stream)
              : launch_segment_indptr<int32_t>(params, enable_pdl, stream);
}

cudaError_t segment_packbits(bool wide, const SegmentParams& params, bool enable_pdl,
                             cudaStream_t stream) {
  return wide ? launch_segment_packbits<int64_t>(params, enable_pdl, stream)
              : launch_segment_packbits<int32_t>(params, enable_pdl, stream);
}

}  // namespace precast
