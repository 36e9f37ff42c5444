// SPDX-License-Identifier: Apache-2.0
// Numbers from 8-bit codes and their scales, one scale a tile.
//
//   out[b, r, c] = round(code[b, r, c] * scale[b, r / tile_rows, c / tile_columns])
//
// The product is fp32. A tile is a whole tensor, a row, a group of a row, or a block; tiles at the
// ends may be partial.
//
// Layout   input  [batch, rows, columns]  codes, any two strides, unit column stride
//          out    [batch, rows, columns]  T, the same
//          scales [batch, row tiles, column tiles]  fp32 at any strides, or words of four exponents
//                 along the columns
// Threads  one thread writes 16 bytes of out.
// Traffic  reads input and scales once, writes out once.
// Source   definition.
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/quant.cuh"
#include "precast/core/rows.cuh"

namespace precast {

struct DequantizeParams {
  const void* input;   // [batch, rows, columns] codes
  const void* scales;  // [batch, row tiles, column tiles]
  void* out;           // [batch, rows, columns]
  RowStrides input_strides;
  RowStrides out_strides;
  Rows rows;
  int64_t columns;  // below 2^32
  ScaleFormat format;
  RowStrides scale_strides;    // of batch and row tile
  int64_t column_tile_stride;  // of scales
  Divisor tile_rows;
  Divisor tile_columns;
  bool one_scale;  // of all elements of an item; the launcher sets it
  Items items;     // the launcher sets it
};

#if defined(__CUDACC__)

template <typename Q>
__device__ __forceinline__ void unpack_codes(uint32_t bits, float (&x)[4]) {
  unpack_fp8<Q>(bits, x);
}

template <>
__device__ __forceinline__ void unpack_codes<i8>(uint32_t bits, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = static_cast<float>(static_cast<i8>(bits >> 8 * i));
}

// A vector of codes of which `count` exist, zeros behind them.
template <bool kAligned, int kWords>
__device__ __forceinline__ void load_codes(const void* source, int64_t count, L2Policy policy,
                                           uint32_t (&words)[kWords]) {
  if constexpr (!kAligned) {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      if (i % 4 == 0) words[i / 4] = 0u;
      if (i < count) {
        unsigned short byte;
        asm volatile("ld.global.u8 %0, [%1];"
                     : "=h"(byte)
                     : "l"(static_cast<const char*>(source) + i)
                     : "memory");
        words[i / 4] |= static_cast<uint32_t>(byte) << (i % 4 * 8);
      }
    }
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(source), "l"(policy.bits)
                 : "memory");
  } else {
    static_assert(kWords == 1, "as many codes as 16 bytes of numbers have");
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;"
                 : "=r"(words[0])
                 : "l"(source), "l"(policy.bits)
                 : "memory");
  }
}

__device__ __forceinline__ float load_scale(const DequantizeParams& p, int64_t row_offset,
                                            uint32_t column) {
  const uint32_t tile = p.tile_columns.divide(column);
  const uint32_t* words = static_cast<const uint32_t*>(p.scales) + row_offset;
  uint32_t word;
  const bool packed = p.format == ScaleFormat::exponents;
  const int64_t at = static_cast<int64_t>(packed ? tile / 4 : tile) * p.column_tile_stride;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(words + at) : "memory");
  if (!packed) return __uint_as_float(word);
  const uint32_t exponent = word >> (tile % 4 * 8) & 0xffu;
  return __uint_as_float(exponent == 255u ? 0x7fffffffu
                         : exponent > 0u  ? exponent << 23
                                          : 1u << 22);
}

template <typename Q, typename T, bool kAligned>
__global__ __launch_bounds__(kItemThreads) void DequantizeKernel(
    const __grid_constant__ DequantizeParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kSize);
  const RowPosition row(p.rows, at.row);
  const int64_t left = p.columns - at.column;
  const Q* input = row.in<Q>(p.input, p.input_strides) + at.column;  // [kSize] of [columns]
  T* out = row.in<T>(p.out, p.out_strides) + at.column;              // [kSize] of [columns]
  const int64_t scale_row =
      row.outer * p.scale_strides.outer + p.tile_rows.divide(row.inner) * p.scale_strides.inner;

  allow_next_grid();
  if (may_overlap_previous_grid()) prefetch_to_l2(input);
  wait_for_previous_grid();

  uint32_t words[kSize / 4];
  load_codes<kAligned>(input, left, read_policy(true), words);
  const uint32_t column = static_cast<uint32_t>(at.column);
  float scale = load_scale(p, scale_row, column);
  float x[kSize];
#pragma unroll
  for (int i = 0; i < kSize / 4; ++i) {
    float four[4];
    unpack_codes<Q>(words[i], four);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[4 * i + j] = four[j];
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i > 0 && !p.one_scale && i < left) scale = load_scale(p, scale_row, column + i);
    x[i] *= scale;
  }
  store<kAligned>(out, pack<T>(x), left);
}

#if !defined(__CUDACC_RTC__)

// Launches on `stream`; nothing for an empty tensor. cudaErrorInvalidValue if `out` has more than
// 2^32 items of 16 bytes.
template <typename Q, typename T>
cudaError_t launch_dequantize(DequantizeParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows.count == 0 || p.columns == 0) return cudaSuccess;
  constexpr int kSize = Vec<T>::kSize;
  const ItemPlan plan = plan_items(p.rows.count, p.columns, kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  p.one_scale = p.tile_columns.value % kSize == 0 || p.tile_columns.value >= p.columns;
  const bool aligned = p.columns % kSize == 0 && rows_are_vector_aligned<T>(p.out, p.out_strides) &&
                       reinterpret_cast<uint64_t>(p.input) % kSize == 0 &&
                       p.input_strides.outer % kSize == 0 && p.input_strides.inner % kSize == 0;
  const auto kernel = aligned ? DequantizeKernel<Q, T, true> : DequantizeKernel<Q, T, false>;
  return launch(kernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
