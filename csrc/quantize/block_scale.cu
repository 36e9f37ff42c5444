// SPDX-License-Identifier: Apache-2.0
// The kernels of one block_scale module: PRECAST_DTYPE is u8 or bf16. They move bits, so only the
// size of the type matters.
#include "precast/quantize/block_scale.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/quantize/block_scale.cu: define the module's element type, -DPRECAST_DTYPE=u8"
#endif

namespace precast {

namespace bits_of {
using u8 = unsigned char;
using bf16 = unsigned short;
using Type = PRECAST_DTYPE;
}  // namespace bits_of

extern const int block_scale_item_size = sizeof(bits_of::Type);

cudaError_t block_scale_interleave(const BlockScaleParams& params, bool enable_pdl,
                                   cudaStream_t stream) {
  return launch_block_scale_interleave<bits_of::Type>(params, enable_pdl, stream);
}

}  // namespace precast
