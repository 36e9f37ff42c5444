// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the interleaving of block scales.
#include "core/ffi_export.h"
#include "precast/quantize/block_scale.cuh"

#include "quantize/block_scale_checks.h"

namespace precast {

// csrc/quantize/block_scale.cu
extern const int block_scale_item_size;
cudaError_t block_scale_interleave(const BlockScaleParams& params, bool enable_pdl,
                                   cudaStream_t stream);

namespace {

void block_scale_interleave_export(TensorView unswizzled_sf, TensorView out, bool enable_pdl) {
  const char* op = "block_scale_interleave";
  const Arg in = PRECAST_ARG(op, unswizzled_sf);
  const Arg to = PRECAST_ARG(op, out);
  const DLDataType dtype = block_scale_item_size == 1 ? kUint8 : to_dl(DType::bf16);
  TensorMatch(in).cuda().dtype(dtype).rank(2, 3).contiguous();
  const int64_t experts = unswizzled_sf.ndim() == 3 ? unswizzled_sf.size(0) : 1;
  const int64_t rows = unswizzled_sf.size(-2), columns = unswizzled_sf.size(-1);
  const int64_t count = experts * scale_bytes(SfLayout::tiles_128x4, rows, columns);
  TensorMatch(to).same_device(in).dtype(dtype).shape({count}).contiguous();
  if (count == 0) return;
  TensorMatch(to).aligned().apart(in);
  constexpr int64_t kMaxTiles = 0x7fffffff;
  const int64_t row_tiles = (rows + 127) / 128, chunks = (columns + 31) / 32;
  PRECAST_CHECK(
      rows <= kMaxTiles && columns <= kMaxTiles && experts <= kMaxTiles / row_tiles / chunks,
      ValueError)
      << in.what() << " must have fewer than 2^31 parts of 128 rows and 32 columns, got shape "
      << to_string(unswizzled_sf.shape()) << "; call on parts of it";

  BlockScaleParams params = {};
  params.input = data_of(unswizzled_sf);
  params.out = data_of(out);
  params.experts = static_cast<uint32_t>(experts);
  params.rows = static_cast<uint32_t>(rows);
  params.columns = static_cast<uint32_t>(columns);
  launch_on(
      in, [&](cudaStream_t stream) { return block_scale_interleave(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(block_scale_interleave, block_scale_interleave_export)

}  // namespace precast
