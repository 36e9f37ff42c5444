// SPDX-License-Identifier: Apache-2.0
// Quantisation in blocks of a row that share a scale: NVFP4, MXFP4 and MXFP8.
//
//   amax = max |x| of the block, without NaN
//   mx      s = 2^e, the smallest with amax <= s * 6 (e2m1) or s * 448 (e4m3);  q = round(x * 2^-e)
//   nvfp4   s = e4m3(g * (amax * (1 / 6)));  q = round(x * min(1 / (s * (1 / g)), largest)),
//           and 0 if s is 0
//
// All in fp32, each operation rounded once; round() and e4m3() to nearest even, saturated.
//
// Layout   input   [rows, columns]              T (16-bit), any two row strides, unit column stride
//          global  [1] or [rows]                fp32, g above or its reciprocal (nvfp4)
//          out     [rows, padded_columns / 2]   e2m1, the first of two in the lower 4 bits; or
//                  [rows, padded_columns]       e4m3; zero behind `columns`
//          out_sf  quantize/scale_layout.cuh    e4m3 or ue8m0, one byte for 16 or 32 elements
// Threads  one thread takes 16 elements, a block or half of one, because the work for each block
//          costs as much as the rest. For a large dense input it takes two or four times 16, which
//          saves the work for each thread. In any layout the threads are numbered in the order of
//          the scales in memory and write the padding, too. TiledBlockQuantizeKernel has its own
//          mapping.
// Traffic  reads input once, writes out and out_sf once
// Source   OCP Microscaling Formats (MX) Specification 1.0; NVIDIA, NVFP4 (arXiv:2509.25149). The
//          scales of mx are rounded up, as in FlashInfer and cuBLAS. The specification proposes
//          floor(log2(amax)) minus the format's largest exponent, which saturates.
// Measured 2026-11-21 on an H200, bf16, [16384, 7168], with shares of the elementwise ceiling:
//          nvfp4   128x4  71.4 us  0.961    linear  69.2 us  0.991
//          mxfp4   128x4  69.8 us  0.971    linear  68.4 us  0.991
//          mxfp8   128x4  83.0 us  0.977    linear  82.3 us  0.987
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"
#include "precast/quantize/block_values.cuh"
#include "precast/quantize/scale_layout.cuh"

namespace precast {

struct BlockQuantizeParams {
  const void* input;    // [rows, columns]
  const float* global;  // [1] or [rows]
  void* out;            // [rows, padded_columns], or half of them
  void* out_sf;
  RowStrides input_strides;
  Rows rows;
  int64_t columns;
  int64_t padded_columns;
  int64_t global_stride;  // 0 or 1
  bool global_is_inverse;
  SfLayout layout;
  ScaleLayout scales;      // set by the launcher
  uint32_t scale_columns;  // without padding; set by the launcher
  uint32_t items;          // set by the launcher
  // log2 of the tiles that a warp processes side by side; set by the launcher
  uint32_t tiles_side_by_side_shift;
  bool aligned;  // set by the launcher
};

#if defined(__CUDACC__)

// Threads of a CTA of a large launch. On an H200, mxfp8 of [64, 7168] with linear scales took 1.2
// us, and 1.8 us with 256.
constexpr int kBlockThreads = 128;

// The kernel for any input and layout.
template <typename T, BlockRecipe kRecipe, SfLayout kLayout>
__global__ __launch_bounds__(kBlockThreads) void BlockQuantizeKernel(
    const __grid_constant__ BlockQuantizeParams p) {
  constexpr uint32_t kLanes = kBlockLanes<kRecipe>;
  const uint32_t item = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t scale = item / kLanes, part = item % kLanes;
  const ScalePosition s = ScalePosition::of<kLayout>(p.scales, scale);
  const int64_t column = int64_t(s.column * kLanes + part) * kBlockElements;
  const bool exists = item < p.items;  // the scale exists; it may be padding
  // the elements are written
  const bool in_row = exists && s.row < p.rows.count && column < p.padded_columns;
  const bool inside = in_row && column < p.columns;  // the elements are read
  const T* input = static_cast<const T*>(p.input);   // [kBlockElements] of [columns]
  if (inside) input = RowPosition(p.rows, s.row).in<T>(p.input, p.input_strides) + column;

  launch_dependent_grids();
  if (may_overlap_previous_grid() && inside) prefetch_to_l2(input);
  wait_on_dependent_grids();

  Vec<T> vecs[2] = {zero_vec<T>(), zero_vec<T>()};
  if (inside && p.aligned) {
    const L2Policy policy = read_policy(true);
    vecs[0] = load_vec(input, policy);
    vecs[1] = load_vec(input + 8, policy);
  } else if (inside) {
    vecs[0] = load_elements(input, 8);
    vecs[1] = load_elements(input + 8, 8);
  }
  float global = 1.0f;
  if constexpr (kRecipe == BlockRecipe::nvfp4) {
    global = load_scalar(p.global + (inside ? s.row * p.global_stride : 0));
    if (p.global_is_inverse) global = __frcp_rn(global);
  }
  const uint32_t bits =
      quantize_block<T, kRecipe>(vecs, global, p.out, s.row * p.padded_columns + column, in_row);
  if (exists && part == 0) store_scale_byte(p.out_sf, scale, inside ? bits : 0u);
}

// Prefetches what all threads read, by one thread. Why: on an H200 a prefetch by each thread took
// 1.6 us of a small launch.
__device__ __forceinline__ void prefetch_once(const void* source, uint32_t cta) {
  if (cta == 0 && threadIdx.x == 0) prefetch_to_l2(source);
}

// Whether this thread prefetches: one of the four threads whose elements lie in a line does. Why:
// several requests for a line cost a small launch up to 0.7 us on an H200, and so does a request
// from all threads without elements.
__device__ __forceinline__ bool is_first_in_line() { return threadIdx.x % 4 == 0; }

// -- dense input ----------------------------------------------------------------------------------
// The input is aligned and contiguous and has no padding, and one scale `global` is that of all
// rows, its reciprocal only with linear scales. So no index is divided, and a thread takes several
// times 16 elements.

// The kernel for linear scales.
template <typename T, BlockRecipe kRecipe, int kUnroll>
__global__ __launch_bounds__(kBlockThreads) void LinearBlockQuantizeKernel(
    const __grid_constant__ BlockQuantizeParams p) {
  const uint64_t first = uint64_t(blockIdx.x) * (blockDim.x * kUnroll) + threadIdx.x;
  const T* input = static_cast<const T*>(p.input);
  // Threads without elements load the first ones and do not use them.
  const auto start = [&](int i) {
    const uint64_t item = first + i * blockDim.x;
    return item < p.items ? item * kBlockElements : 0;
  };

  launch_dependent_grids();
  if (kRecipe == BlockRecipe::nvfp4) prefetch_once(p.global, blockIdx.x);
  if (may_overlap_previous_grid()) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (is_first_in_line() && first + i * blockDim.x < p.items) prefetch_to_l2(input + start(i));
    }
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  Vec<T> vecs[kUnroll][2];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    vecs[i][0] = load_vec(input + start(i), policy);
    vecs[i][1] = load_vec(input + start(i) + 8, policy);
  }
  float global = 1.0f;
  if constexpr (kRecipe == BlockRecipe::nvfp4) {
    global = load_scalar(p.global);
    if (p.global_is_inverse) global = __frcp_rn(global);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const uint64_t item = first + i * blockDim.x;
    const bool exists = item < p.items;
    const uint32_t bits =
        quantize_block<T, kRecipe>(vecs[i], global, p.out, item * kBlockElements, exists);
    constexpr uint32_t kLanes = kBlockLanes<kRecipe>;
    if (exists && item % kLanes == 0) store_scale_byte(p.out_sf, item / kLanes, bits);
  }
}

__device__ __forceinline__ void store_four_scales(void* scales, uint64_t index, uint32_t bits) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(static_cast<unsigned char*>(scales) + index),
               "r"(bits)
               : "memory");
}

// The kernel for scales in tiles of 128x4. Four lanes (or eight, two for each block) hold the
// scales of a row in a tile, and the lanes of a warp those of up to four tiles side by side: whole
// lines of input and output. kRows is 1 or 4; the 4 rows are 32 apart, so that their scales are
// neighbours in a tile.
template <typename T, BlockRecipe kRecipe, int kRows>
__global__ __launch_bounds__(kBlockThreads) void TiledBlockQuantizeKernel(
    const __grid_constant__ BlockQuantizeParams p) {
  constexpr uint32_t kLanes = kBlockLanes<kRecipe>;
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;  // among those of 128 rows
  const uint32_t part = thread % kLanes, column_in_tile = thread / kLanes % 4;
  const uint32_t word = thread / (4 * kLanes);
  const uint32_t tile_in_chunk = word & ((1u << p.tiles_side_by_side_shift) - 1);
  const uint32_t row_and_chunk = word >> p.tiles_side_by_side_shift;
  constexpr uint32_t kRowsPerTile = 128 / kRows;  // rows of a tile that a thread may start with
  const uint32_t row_in_tile = row_and_chunk % kRowsPerTile;
  const uint32_t tile =
      (row_and_chunk / kRowsPerTile << p.tiles_side_by_side_shift) + tile_in_chunk;
  if (tile >= p.scales.per_row.value) return;  // Then no lane of the warp has a tile.
  const uint32_t column = tile * 4 + column_in_tile;
  const uint32_t first_row = blockIdx.y * 128 + row_in_tile;
  const int64_t offset = first_row * p.columns + int64_t(column * kLanes + part) * kBlockElements;
  const T* input = static_cast<const T*>(p.input);  // [rows, columns]
  const auto is_inside = [&](int i) {
    return first_row + 32 * i < p.rows.count && column < p.scale_columns;
  };
  // Threads without elements load the first ones and do not use them.
  const auto start = [&](int i) { return is_inside(i) ? offset + 32 * i * p.columns : 0; };

  launch_dependent_grids();
  const uint32_t cta = blockIdx.y * gridDim.x + blockIdx.x;
  if (kRecipe == BlockRecipe::nvfp4) prefetch_once(p.global, cta);
  if (may_overlap_previous_grid(cta)) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (is_first_in_line() && is_inside(i)) prefetch_to_l2(input + start(i));
    }
  }
  wait_on_dependent_grids();

  const uint64_t scales =
      (uint64_t(blockIdx.y) * p.scales.per_row.value + tile) * 512 + row_in_tile % 32 * 16;
  if (kRows == 1 && !__any_sync(0xffffffffu, is_inside(0))) {
    if (column_in_tile == 0 && part == 0) {
      store_four_scales(p.out_sf, scales + row_in_tile / 32 * 4, 0u);
    }
    return;
  }
  const L2Policy policy = read_policy(true);
  Vec<T> vecs[kRows][2];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    vecs[i][0] = load_vec(input + start(i), policy);
    vecs[i][1] = load_vec(input + start(i) + 8, policy);
  }
  const float global = kRecipe == BlockRecipe::nvfp4 ? load_scalar(p.global) : 1.0f;
  uint32_t bytes = 0u;  // the scales of the thread's rows
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool inside = is_inside(i);
    const uint32_t bits =
        quantize_block<T, kRecipe>(vecs[i], global, p.out, offset + 32 * i * p.columns, inside);
    if (inside) bytes |= bits << 8 * i;
  }
  if constexpr (kRows == 1) {
    bytes <<= 8 * column_in_tile;
    bytes |= __shfl_xor_sync(0xffffffffu, bytes, kLanes);
    bytes |= __shfl_xor_sync(0xffffffffu, bytes, 2 * kLanes);
    if (column_in_tile == 0 && part == 0) {
      store_four_scales(p.out_sf, scales + row_in_tile / 32 * 4, bytes);
    }
  } else {
    static_assert(kRows == 4, "four bytes a lane, transposed among the four lanes");
    const bool odd = column_in_tile & 1, upper = column_in_tile & 2;
    uint32_t other = __shfl_xor_sync(0xffffffffu, bytes, kLanes);
    bytes = __byte_perm(bytes, other, odd ? 0x3715 : 0x6240);
    other = __shfl_xor_sync(0xffffffffu, bytes, 2 * kLanes);
    bytes = __byte_perm(bytes, other, upper ? 0x3276 : 0x5410);
    if (part == 0) store_four_scales(p.out_sf, scales + column_in_tile * 4, bytes);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches with up to this many items of e2m1, which are bound by arithmetic, use smaller CTAs: on
// an H200, nvfp4 of [64, 7168] in tiles took 1.8 us, and 2.8 us with kBlockThreads. With mxfp8,
// starting twice as many CTAs, 1.2 ns each, costs 0.1 to 0.4 us.
constexpr uint32_t kSmallLaunchItems = 1u << 16;
constexpr int kSmallLaunchThreads = 64;
// From this many items on, about two for each thread of a large GPU, a thread takes several.
constexpr uint32_t kLargeLaunchItems = 1u << 19;
constexpr int kLinearUnroll = 2;
constexpr int kTiledRows = 4;

template <typename T, BlockRecipe kRecipe>
auto choose_block_quantize(SfLayout layout, bool dense, bool many) {
  constexpr bool kSeveral = kRecipe != BlockRecipe::mxfp8;
  if (layout == SfLayout::tiles_8x4) return BlockQuantizeKernel<T, kRecipe, SfLayout::tiles_8x4>;
  if (layout == SfLayout::linear) {
    return !dense ? BlockQuantizeKernel<T, kRecipe, SfLayout::linear>
                  : many ? LinearBlockQuantizeKernel < T,
           kRecipe, kSeveral ? kLinearUnroll : 1 > : LinearBlockQuantizeKernel<T, kRecipe, 1>;
  }
  return !dense ? BlockQuantizeKernel<T, kRecipe, SfLayout::tiles_128x4>
                : many ? TiledBlockQuantizeKernel < T,
         kRecipe, kSeveral ? kTiledRows : 1 > : TiledBlockQuantizeKernel<T, kRecipe, 1>;
}

// Launches the quantisation on `stream`, unless there are no rows or columns. Returns
// cudaErrorInvalidValue if there are more than 2^32 items of 16 elements, padding included.
template <typename T>
cudaError_t launch_block_quantize(BlockRecipe recipe, BlockQuantizeParams p, bool enable_pdl,
                                  cudaStream_t stream) {
  if (p.rows.count == 0 || p.padded_columns == 0) return cudaSuccess;
  const int64_t columns = p.padded_columns / block_size(recipe);
  const int64_t scales = scale_bytes(p.layout, p.rows.count, columns);
  const int lanes = block_size(recipe) / kBlockElements;
  if (static_cast<uint64_t>(scales) > kMaxItems / lanes) return cudaErrorInvalidValue;
  p.scales = make_scale_layout(p.layout, columns);
  p.scale_columns = static_cast<uint32_t>(columns);
  p.items = static_cast<uint32_t>(scales * lanes);
  p.aligned = rows_are_vector_aligned<T>(p.input, p.input_strides);
  const bool one_run = p.rows.count == 1 ||
                       (p.rows.inner.value == p.rows.count && p.input_strides.inner == p.columns);
  bool dense = p.layout != SfLayout::tiles_8x4 && p.aligned && one_run &&
               p.padded_columns == p.columns &&
               (p.layout == SfLayout::linear || !p.global_is_inverse) &&
               (p.global_stride == 0 || p.rows.count == 1);
  // mxfp8 computes so little that several items a thread are 2 to 3 % slower.
  const bool many = recipe != BlockRecipe::mxfp8 && p.items > kLargeLaunchItems;
  const bool few = recipe != BlockRecipe::mxfp8 && p.items <= kSmallLaunchItems;
  const uint32_t cta = few ? kSmallLaunchThreads : kBlockThreads;  // threads of a CTA
  dim3 ctas((p.items - 1) / cta + 1);
  if (dense && p.layout == SfLayout::linear && many) {
    ctas = dim3((p.items - 1) / (cta * kLinearUnroll) + 1);
  }
  if (dense && p.layout == SfLayout::tiles_128x4) {
    const uint32_t tile_rows = (p.rows.count - 1) / 128 + 1, tiles = p.scales.per_row.value;
    constexpr uint32_t kMaxTileRows = 65535;  // the limit of a grid's second dimension
    dense = tile_rows <= kMaxTileRows;
    while (p.tiles_side_by_side_shift < 2 && (tiles >> p.tiles_side_by_side_shift) % 2 == 0) {
      ++p.tiles_side_by_side_shift;
    }
    const uint32_t threads = p.items / tile_rows / (many ? kTiledRows : 1);
    if (dense) ctas = dim3((threads - 1) / cta + 1, tile_rows);
  }
  const auto kernel = recipe == BlockRecipe::nvfp4
                          ? choose_block_quantize<T, BlockRecipe::nvfp4>(p.layout, dense, many)
                      : recipe == BlockRecipe::mxfp4
                          ? choose_block_quantize<T, BlockRecipe::mxfp4>(p.layout, dense, many)
                          : choose_block_quantize<T, BlockRecipe::mxfp8>(p.layout, dense, many);
  return launch(kernel, ctas, dim3(cta), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
