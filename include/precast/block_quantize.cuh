// SPDX-License-Identifier: Apache-2.0
// Quantisation in blocks of a row that share a scale: NVFP4, MXFP4 and MXFP8.
//
//   amax = max |x| of the block, NaN left out
//   mx      s = 2^e, the least with amax <= s * 6 (e2m1) or s * 448 (e4m3);  q = round(x * 2^-e)
//   nvfp4   s = e4m3(g * (amax * (1 / 6)));  q = round(x * min(1 / (s * (1 / g)), largest)),
//           and 0 where s is 0
//
// All in fp32, each operation rounded once; round() and e4m3() to nearest even, saturated.
//
// Layout   input   [rows, columns]              T (16-bit), any two row strides, unit column stride
//          global  [1] or [rows]                fp32, g above or its reciprocal (nvfp4)
//          out     [rows, padded_columns / 2]   e2m1, the first of two in the lower 4 bits; or
//                  [rows, padded_columns]       e4m3; zero behind `columns`
//          out_sf  core/scale_layout.cuh        e4m3 or ue8m0, one byte for 16 or 32 elements
// Threads  one thread takes 16 elements, a block or half of one, because what is done once a block
//          costs as much as the rest. They are numbered in the order of the scales in memory: those
//          of a warp lie side by side in every layout, and the padding is written on the way. In
//          tiles of 128x4 a warp reads 8 rows, 128 bytes each (nvfp4), or 4, 256 bytes each.
// Issue    about 265 instructions a thread of nvfp4 on sm90, 225 of mxfp4, 110 of mxfp8, where the
//          memory of an H200 leaves time for 310 and, of mxfp8, 360.
// Traffic  reads input once, writes out and out_sf once.
// Source   OCP Microscaling Formats (MX) Specification 1.0; NVIDIA, NVFP4 (arXiv:2509.25149). The
//          scales of mx are rounded up, as FlashInfer's and cuBLAS' are, where the specification
//          proposes floor(log2(amax)) minus the format's largest exponent, which saturates.
#pragma once

#include "precast/core/fp4.cuh"
#include "precast/core/fp8.cuh"
#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/scale_layout.cuh"
#include "precast/core/vec.cuh"

namespace precast {

enum class BlockRecipe : int { nvfp4, mxfp4, mxfp8 };

constexpr int block_size(BlockRecipe recipe) { return recipe == BlockRecipe::nvfp4 ? 16 : 32; }

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
  ScaleLayout scales;      // the launcher sets it
  uint32_t scale_columns;  // without padding; the launcher sets it
  uint32_t items;          // the launcher sets it
  bool aligned;            // the launcher sets it
};

#if defined(__CUDACC__)

template <typename T>
struct PairOf;
template <>
struct PairOf<f16> {
  using Type = __half2;
};
template <>
struct PairOf<bf16> {
  using Type = __nv_bfloat162;
};

// The largest magnitude of a thread's elements; NaN if one is NaN, or NaN left out.
template <bool kNan, typename T>
__device__ __forceinline__ float largest(const Vec<T> (&vecs)[2]) {
  using Pair = typename PairOf<T>::Type;
  const uint4 a = vecs[0].bits, b = vecs[1].bits;
  const uint32_t words[8] = {a.x & 0x7fff7fffu, a.y & 0x7fff7fffu, a.z & 0x7fff7fffu,
                             a.w & 0x7fff7fffu, b.x & 0x7fff7fffu, b.y & 0x7fff7fffu,
                             b.z & 0x7fff7fffu, b.w & 0x7fff7fffu};
  const auto larger = [](Pair x, Pair y) { return kNan ? __hmax2_nan(x, y) : __hmax2(x, y); };
  Pair most = reinterpret_cast<const Pair&>(words[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) most = larger(most, reinterpret_cast<const Pair&>(words[i]));
  most = larger(most, __lowhigh2highlow(most));
  return kNan ? __low2float(most) : fmaxf(__low2float(most), 0.0f);
}

constexpr float kLargestFloat = 3.402823466e38f;

// The scale of a block as its byte, and what its elements are multiplied by.
struct BlockScale {
  uint32_t bits;
  float multiplier;
};

template <BlockRecipe kRecipe>
__device__ __forceinline__ BlockScale block_scale(float amax, float global) {
  if constexpr (kRecipe == BlockRecipe::nvfp4) {
    const e4m3 scale = from_float<e4m3>(__fmul_rn(global, __fmul_rn(amax, 1.0f / 6.0f)));
    const float value = to_float(scale);
    const float multiplier = __frcp_rn(__fmul_rn(value, __frcp_rn(global)));
    return {to_bits(scale), value == 0.0f ? 0.0f : fminf(multiplier, kLargestFloat)};
  } else {
    const uint32_t bits =
        kRecipe == BlockRecipe::mxfp4 ? ue8m0_scale_of_e2m1(amax) : ue8m0_scale_of_e4m3(amax);
    return {bits, ue8m0_reciprocal(bits)};
  }
}

__device__ __forceinline__ void store_scale(void* scales, uint32_t index, uint32_t bits) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(static_cast<unsigned char*>(scales) + index),
               "h"(static_cast<unsigned short>(bits))
               : "memory");
}

constexpr int kBlockElements = 16;  // of a thread

// The thread's elements as e2m1. `small`: none is NaN or becomes 7 or more.
template <typename T>
__device__ __forceinline__ uint2 quantize_e2m1(const Vec<T> (&vecs)[2], float multiplier,
                                               bool small) {
  uint32_t words[2];
#if !PRECAST_HAS_E2M1_CONVERSION
  if (small) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[8];
      unpack(vecs[i], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(fabsf(x[j]), multiplier);
      words[i] = pack_small_e2m1(x, vecs[i].bits);
    }
    return make_uint2(words[0], words[1]);
  }
#endif
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x[8];
    unpack(vecs[i], x);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(x[j], multiplier);
    words[i] = pack_e2m1(x);
  }
  return make_uint2(words[0], words[1]);
}

template <typename T>
__device__ __forceinline__ void quantize_e4m3(const Vec<T> (&vecs)[2], float multiplier,
                                              float (&x)[kBlockElements]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float half[8];
    unpack(vecs[i], half);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[8 * i + j] = __fmul_rn(half[j], multiplier);
  }
}

// The elements of a thread: where they are, and where they and their scale go.
struct BlockPosition {
  uint32_t scale;  // its number in memory
  uint32_t part;   // of the block
  uint32_t row;
  int64_t column;      // of the first element
  int64_t out_offset;  // elements
  bool exists;         // there is such a scale, maybe of padding
  bool in_row;         // elements are written
  bool inside;         // elements are read
};

// Dense tiles: CTAs in two dimensions, so that nothing is divided, each inside of one tile.
template <uint32_t kLanes, SfLayout kLayout, bool kDense>
__device__ __forceinline__ BlockPosition find_block(const BlockQuantizeParams& p, uint32_t cta) {
  const uint32_t item = cta * kItemThreads + threadIdx.x;
  BlockPosition at = {item / kLanes, item % kLanes, 0, 0, int64_t(item) * kBlockElements};
  at.exists = at.in_row = at.inside = item < p.items;
  if constexpr (kLayout == SfLayout::linear && kDense) return at;
  if constexpr (kDense) {
    constexpr uint32_t kCtas = 512 * kLanes / kItemThreads;  // a tile
    const ScalePosition s =
        ScalePosition::in_tile<kLayout>(blockIdx.y, blockIdx.x / kCtas, at.scale);
    at.exists = true;
    at.in_row = at.inside = s.row < p.rows.count && s.column < p.scale_columns;
    at.row = s.row;
    at.column = int64_t(s.column * kLanes + at.part) * kBlockElements;
  } else {
    const ScalePosition s = ScalePosition::of<kLayout>(p.scales, at.scale);
    at.row = s.row;
    at.column = int64_t(s.column * kLanes + at.part) * kBlockElements;
    at.in_row = at.exists && s.row < p.rows.count && at.column < p.padded_columns;
    at.inside = at.in_row && at.column < p.columns;
  }
  at.out_offset = at.row * p.padded_columns + at.column;
  return at;
}

// kDense: the input is aligned and contiguous, has no padding, and one scale `global`, as it is, is
// that of all rows.
template <typename T, BlockRecipe kRecipe, SfLayout kLayout, bool kDense>
__global__ __launch_bounds__(kItemThreads) void BlockQuantizeKernel(
    const __grid_constant__ BlockQuantizeParams p) {
  static_assert(Vec<T>::kSize == 8, "a 16-bit type");
  constexpr uint32_t kLanes = block_size(kRecipe) / kBlockElements;  // that share a scale
  const uint32_t cta = kDense ? blockIdx.y * gridDim.x + blockIdx.x : blockIdx.x;
  // Why nobody returns: the lanes of a block exchange maxima.
  const BlockPosition at = find_block<kLanes, kLayout, kDense>(p, cta);
  const T* input = static_cast<const T*>(p.input);  // [kBlockElements] of [columns]
  if (at.inside) {
    if constexpr (kDense) {
      input += at.out_offset;
    } else {
      input = RowPosition(p.rows, at.row).in<T>(p.input, p.input_strides) + at.column;
    }
  }

  allow_next_grid();
  if (may_overlap_previous_grid(cta) && at.inside) prefetch_to_l2(input);
  wait_for_previous_grid();

  Vec<T> vecs[2] = {zero_vec<T>(), zero_vec<T>()};
  const L2Policy policy = read_policy(true);
  if (kDense || (at.inside && p.aligned)) {  // Outside, too: there the first elements, for nothing.
    vecs[0] = load_vec(input, policy);
    vecs[1] = load_vec(input + 8, policy);
  } else if (at.inside) {
    vecs[0] = load_elements(input, 8);
    vecs[1] = load_elements(input + 8, 8);
  }
  float global = 1.0f;
  if constexpr (kRecipe == BlockRecipe::nvfp4) {
    const int64_t row = kDense || !at.inside ? 0 : at.row * p.global_stride;
    global = __uint_as_float(load_word(p.global + row));
    if (!kDense && p.global_is_inverse) global = __frcp_rn(global);
  }
  float amax = largest<true>(vecs);
  const bool has_nan = amax != amax;
  // A vote, because without one the compiler computes the other maximum for all.
  if (__any_sync(0xffffffffu, has_nan)) amax = largest<false>(vecs);
  if constexpr (kLanes == 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  const BlockScale by = block_scale<kRecipe>(amax, global);
  if (at.in_row) {
    if constexpr (kRecipe == BlockRecipe::mxfp8) {
      float x[kBlockElements];
      quantize_e4m3(vecs, by.multiplier, x);
      store_fp8(static_cast<e4m3*>(p.out) + at.out_offset, x);
    } else {
      const bool small = !has_nan && __fmul_rn(amax, by.multiplier) < 7.0f;
      const uint2 words = quantize_e2m1(vecs, by.multiplier, small);
      asm volatile(
          "st.global.v2.u32 [%0], {%1, %2};" ::"l"(static_cast<char*>(p.out) + at.out_offset / 2),
          "r"(words.x), "r"(words.y)
          : "memory");
    }
  }
  if (at.exists && at.part == 0) store_scale(p.out_sf, at.scale, at.inside ? by.bits : 0u);
}

#if !defined(__CUDACC_RTC__)

template <typename T, BlockRecipe kRecipe>
auto choose_block_quantize(SfLayout layout, bool dense) {
  constexpr SfLayout kLinear = SfLayout::linear, kTiles = SfLayout::tiles_128x4;
  if (layout == SfLayout::tiles_8x4) {
    return BlockQuantizeKernel<T, kRecipe, SfLayout::tiles_8x4, false>;
  }
  if (layout == kLinear) {
    return dense ? BlockQuantizeKernel<T, kRecipe, kLinear, true>
                 : BlockQuantizeKernel<T, kRecipe, kLinear, false>;
  }
  return dense ? BlockQuantizeKernel<T, kRecipe, kTiles, true>
               : BlockQuantizeKernel<T, kRecipe, kTiles, false>;
}

// Launches the quantisation on `stream`; nothing where there is no row or no column.
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
  dim3 ctas((p.items - 1) / kItemThreads + 1);
  bool dense = p.aligned && one_run && p.padded_columns == p.columns && !p.global_is_inverse &&
               (p.global_stride == 0 || p.rows.count == 1);
  if (p.layout == SfLayout::tiles_128x4) {
    const uint32_t tile_rows = (p.rows.count - 1) / 128 + 1;
    constexpr uint32_t kMaxTileRows = 65535;  // what the second dimension of a grid holds
    dense = dense && tile_rows <= kMaxTileRows;
    if (dense) ctas = dim3(ctas.x / tile_rows, tile_rows);
  }
  const auto kernel = recipe == BlockRecipe::nvfp4
                          ? choose_block_quantize<T, BlockRecipe::nvfp4>(p.layout, dense)
                      : recipe == BlockRecipe::mxfp4
                          ? choose_block_quantize<T, BlockRecipe::mxfp4>(p.layout, dense)
                          : choose_block_quantize<T, BlockRecipe::mxfp8>(p.layout, dense);
  return launch(kernel, ctas, dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
