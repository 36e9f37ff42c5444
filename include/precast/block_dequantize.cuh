// SPDX-License-Identifier: Apache-2.0
// Numbers from blocks that share a scale: MXFP4, MXFP8 and NVFP4.
//
//   out[r, c] = round((q[r, c] * s[r, c / block]) * g)
//
// The first product is exact, of e2m1 and e4m3 also in f16; the second one fp32; g is 1 where there
// is none.
//
// Layout   input   [rows, columns / 2]  e2m1, the first of two in the lower 4 bits; or
//                  [rows, columns]      e4m3; contiguous, 16-byte aligned
//          scales  core/scale_layout.cuh, ue8m0 or e4m3
//          global  [1]                  fp32
//          out     [rows, columns]      T, contiguous, 16-byte aligned; columns are whole blocks
// Threads  one thread writes 16 bytes of each of two neighbouring rows, or of one where there are
//          few.
// Traffic  reads input and scales once, writes out once.
// Source   OCP Microscaling Formats (MX) Specification 1.0.
#pragma once

#include "precast/core/fp4.cuh"
#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/scale_layout.cuh"
#include "precast/core/unit.cuh"
#include "precast/core/vec.cuh"

namespace precast {

enum class BlockFormat : int { e2m1_ue8m0, e2m1_e4m3, e4m3_ue8m0 };

struct BlockDequantizeParams {
  const void* input;    // [rows, columns], or half of them
  const void* scales;   // one byte a block
  const float* global;  // [1], or null
  void* out;            // [rows, columns]
  uint32_t rows;
  int64_t columns;
  uint32_t block;  // elements, a power of two of at least 8
  SfLayout layout;
  ScaleLayout scale_layout;  // the launcher sets it
  uint32_t scale_step;       // from one of kRows rows to the next; the launcher sets it
  uint32_t block_shift;      // the launcher sets it
  Items items;               // of kRows rows; the launcher sets it
};

#if defined(__CUDACC__)

// The bits of one item's elements: 2 to 8 bytes at an address that is aligned to as many.
template <int kBytes>
__device__ __forceinline__ uint64_t load_packed(const void* source, L2Policy policy) {
  if constexpr (kBytes == 2) {
    unsigned short bits;
    asm volatile("ld.global.L2::cache_hint.u16 %0, [%1], %2;"
                 : "=h"(bits)
                 : "l"(source), "l"(policy.bits)
                 : "memory");
    return bits;
  } else if constexpr (kBytes == 4) {
    uint32_t bits;
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;"
                 : "=r"(bits)
                 : "l"(source), "l"(policy.bits)
                 : "memory");
    return bits;
  } else {
    static_assert(kBytes == 8, "2, 4 or 8 bytes");
    uint64_t bits;
    asm volatile("ld.global.L2::cache_hint.u64 %0, [%1], %2;"
                 : "=l"(bits)
                 : "l"(source), "l"(policy.bits)
                 : "memory");
    return bits;
  }
}

__device__ __forceinline__ uint32_t load_byte(const void* source) {
  return Unit<1>::load(static_cast<const char*>(source), L2Policy{}).bits;
}

// The elements of one item times their scale.
template <BlockFormat kFormat, int kSize>
__device__ __forceinline__ void unpack_block(uint64_t bits, uint32_t scale, float (&x)[kSize]) {
  const uint32_t words[2] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
  if constexpr (kFormat == BlockFormat::e4m3_ue8m0) {
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      float four[4];
      unpack_fp8<e4m3>(words[i], four);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[4 * i + j] = __fmul_rn(four[j], ue8m0_to_float(scale));
    }
  } else {
    uint32_t pairs[4];
    e2m1_to_f16(words[0], pairs);
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      __half2 pair = reinterpret_cast<const __half2&>(pairs[i]);
      if constexpr (kFormat == BlockFormat::e2m1_e4m3)
        pair = __hmul2(pair, e4m3_to_f16_pair(scale));
      const float2 both = __half22float2(pair);
      x[2 * i] = both.x;
      x[2 * i + 1] = both.y;
    }
    if constexpr (kFormat == BlockFormat::e2m1_ue8m0) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = __fmul_rn(x[i], ue8m0_to_float(scale));
    }
  }
}

template <typename T, BlockFormat kFormat, int kRows>
__global__ __launch_bounds__(kItemThreads) void BlockDequantizeKernel(
    const __grid_constant__ BlockDequantizeParams p) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr bool kE2m1 = kFormat != BlockFormat::e4m3_ue8m0;
  constexpr bool kHasGlobal = kFormat == BlockFormat::e2m1_e4m3;
  constexpr int kBytes = kE2m1 ? kSize / 2 : kSize;  // of an item's input
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kSize);
  const uint32_t first = at.row * kRows;
  const uint64_t offset = uint64_t(first) * p.columns + at.column;
  const char* input = static_cast<const char*>(p.input) + offset / kSize * kBytes;
  const uint64_t step = p.columns / kSize * kBytes;  // from one row of input to the next
  T* out = static_cast<T*>(p.out) + offset;
  const char* block_scales =
      static_cast<const char*>(p.scales) +
      scale_offset(p.scale_layout, first, static_cast<uint32_t>(at.column >> p.block_shift));

  allow_next_grid();
  if (may_overlap_previous_grid()) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i < p.rows) prefetch_to_l2(input + i * step);
    }
  }
  wait_for_previous_grid();

  const L2Policy policy = read_policy(true);
  uint64_t bits[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i < p.rows) bits[i] = load_packed<kBytes>(input + i * step, policy);
  }
  uint32_t scales[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i < p.rows) scales[i] = load_byte(block_scales + i * p.scale_step);
  }
  const float global = kHasGlobal ? load_scalar(p.global) : 1.0f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i >= p.rows) return;
    float x[kSize];
    unpack_block<kFormat>(bits[i], scales[i], x);
    if constexpr (kHasGlobal) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) x[j] = __fmul_rn(x[j], global);
    }
    store_vec(out + i * p.columns, pack<T>(x));
  }
}

#if !defined(__CUDACC_RTC__)

// Two moved the most on H200: 0.936 of the elementwise ceiling for mxfp8, against 0.906 with four
// and 0.895 with one.
constexpr int kBlockDequantizeRows = 2;
constexpr uint32_t kManyBlockItems = 1u << 19;  // about two for each thread of a large GPU

template <typename T, int kRows>
auto choose_block_dequantize(BlockFormat format) {
  switch (format) {
    case BlockFormat::e2m1_ue8m0:
      return BlockDequantizeKernel<T, BlockFormat::e2m1_ue8m0, kRows>;
    case BlockFormat::e2m1_e4m3:
      return BlockDequantizeKernel<T, BlockFormat::e2m1_e4m3, kRows>;
    case BlockFormat::e4m3_ue8m0:
      break;
  }
  return BlockDequantizeKernel<T, BlockFormat::e4m3_ue8m0, kRows>;
}

// Launches it on `stream`; nothing where there is no element. cudaErrorInvalidValue if `out` has
// more than 2^32 items of 16 bytes.
template <typename T>
cudaError_t launch_block_dequantize(BlockFormat format, BlockDequantizeParams p, bool enable_pdl,
                                    cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  ItemPlan plan = plan_items(p.rows, p.columns, Vec<T>::kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  const bool many = plan.items.count > kManyBlockItems;
  if (many) plan = plan_items((p.rows - 1) / kBlockDequantizeRows + 1, p.columns, Vec<T>::kSize);
  p.items = plan.items;
  p.scale_layout = make_scale_layout(p.layout, p.columns / p.block);
  // Why: the rows of a thread start at a multiple of kRows, and such stay together in every tile.
  p.scale_step = p.layout == SfLayout::linear      ? p.scale_layout.per_row.value
                 : p.layout == SfLayout::tiles_8x4 ? 4
                                                   : 16;
  p.block_shift = 0;
  while (1u << p.block_shift < p.block) ++p.block_shift;
  const auto kernel = many ? choose_block_dequantize<T, kBlockDequantizeRows>(format)
                           : choose_block_dequantize<T, 1>(format);
  return launch(kernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
