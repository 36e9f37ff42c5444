// SPDX-License-Identifier: Apache-2.0
// Dequantisation of blocks that share a scale: MXFP4, MXFP8 and NVFP4.
//
//   out[r, c] = round((q[r, c] * s[r, c / block]) * g)
//
// The first product is exact (that of e2m1 and e4m3 even in f16), the second one is fp32. g is 1
// for formats without a global scale.
//
// Layout   input   [rows, columns / 2]  e2m1, the first of two in the lower 4 bits; or
//                  [rows, columns]      e4m3; contiguous, 16-byte aligned
//          scales  quantize/scale_layout.cuh, ue8m0 or e4m3
//          global  [1]                  fp32
//          out     [rows, columns]      T, contiguous, 16-byte aligned; columns are whole blocks
// Threads  one thread writes 16 bytes of each of two neighbouring rows, or of one row if there are
//          few. With linear scales the tensors are treated as one row, and the 16-byte vectors of a
//          thread are the width of a CTA apart.
// Traffic  reads input and scales once, writes out once
// Source   OCP Microscaling Formats (MX) Specification 1.0
#pragma once

#include "precast/core/aligned_bytes.cuh"
#include "precast/core/fp4.cuh"
#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/vec.cuh"
#include "precast/quantize/scale_layout.cuh"

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
  ScaleLayout scale_layout;  // set by the launcher
  // in tiles, between the scales of kRows neighbouring rows; set by the launcher
  uint32_t scale_step;
  uint32_t block_shift;  // log2(block); set by the launcher
  Items items;           // of kRows rows each; set by the launcher
};

#if defined(__CUDACC__)

// Loads the packed elements of one item: 2 to 8 bytes, aligned to their size.
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
  return AlignedBytes<1>::load(static_cast<const char*>(source), L2Policy{}).bits;
}

// Whether this thread prefetches: one of the threads whose kBytes lie in a line does. Why: several
// requests for a line cost a launch over 64 rows 0.2 to 0.3 us on an H200.
template <int kBytes>
__device__ __forceinline__ bool is_first_in_line() {
  return threadIdx.x % (128 / kBytes) == 0;
}

// Stores a vector of the output. Why two ways: from e2m1, where nearly all traffic is writes,
// streaming stores moved 1 % more bytes a second on an H200; from e4m3 0.4 % less.
template <BlockFormat kFormat, typename T>
__device__ __forceinline__ void store_numbers(T* target, Vec<T> vec) {
  if constexpr (kFormat == BlockFormat::e4m3_ue8m0) {
    store_vec(target, vec);
  } else {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(vec.bits.x),
                 "r"(vec.bits.y), "r"(vec.bits.z), "r"(vec.bits.w)
                 : "memory");
  }
}

// Unpacks the elements of one item and multiplies them by their scale.
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
      if constexpr (kFormat == BlockFormat::e2m1_e4m3) {
        pair = __hmul2(pair, e4m3_to_f16_pair(scale));
      }
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

// Does the same, multiplies by `global` if the format has one, and rounds.
template <typename T, BlockFormat kFormat>
__device__ __forceinline__ Vec<T> dequantize_item(uint64_t bits, uint32_t scale, float global) {
  float x[Vec<T>::kSize];
  unpack_block<kFormat>(bits, scale, x);
  if constexpr (kFormat == BlockFormat::e2m1_e4m3) {
#pragma unroll
    for (int i = 0; i < Vec<T>::kSize; ++i) x[i] = __fmul_rn(x[i], global);
  }
  return pack<T>(x);
}

// The bytes of an item's packed input.
template <typename T, BlockFormat kFormat>
constexpr int kPackedBytes = Vec<T>::kSize / (kFormat == BlockFormat::e4m3_ue8m0 ? 1 : 2);

// The kernel for scales in tiles.
template <typename T, BlockFormat kFormat, int kRows>
__global__ __launch_bounds__(kItemThreads) void BlockDequantizeKernel(
    const __grid_constant__ BlockDequantizeParams p) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr bool kHasGlobal = kFormat == BlockFormat::e2m1_e4m3;
  constexpr int kBytes = kPackedBytes<T, kFormat>;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kSize);
  const uint32_t first = at.row * kRows;
  const uint64_t offset = uint64_t(first) * p.columns + at.column;
  const char* input = static_cast<const char*>(p.input) + offset / kSize * kBytes;
  const uint64_t step = p.columns / kSize * kBytes;  // between rows of input
  T* out = static_cast<T*>(p.out) + offset;
  const char* block_scales =
      static_cast<const char*>(p.scales) +
      scale_offset(p.scale_layout, first, static_cast<uint32_t>(at.column >> p.block_shift));

  launch_dependent_grids();
  if (may_overlap_previous_grid()) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (is_first_in_line<kBytes>() && first + i < p.rows) prefetch_to_l2(input + i * step);
    }
  }
  wait_on_dependent_grids();

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
    store_numbers<kFormat>(out + i * p.columns,
                           dequantize_item<T, kFormat>(bits[i], scales[i], global));
  }
}

// The kernel for linear scales. Input, scales and output count as one row each, so that no index is
// divided.
template <typename T, BlockFormat kFormat, int kUnroll>
__global__ __launch_bounds__(kItemThreads) void LinearBlockDequantizeKernel(
    const __grid_constant__ BlockDequantizeParams p) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr bool kHasGlobal = kFormat == BlockFormat::e2m1_e4m3;
  constexpr int kBytes = kPackedBytes<T, kFormat>;
  constexpr int kSizeShift = kSize == 8 ? 3 : 2;
  const uint32_t first = blockIdx.x * (kItemThreads * kUnroll) + threadIdx.x;
  const auto exists = [&](int i) { return first + i * kItemThreads < p.items.count; };
  const char* input = static_cast<const char*>(p.input) + uint64_t(first) * kBytes;
  T* out = static_cast<T*>(p.out) + uint64_t(first) * kSize;
  const char* block_scales = static_cast<const char*>(p.scales);
  const uint32_t shift = p.block_shift - kSizeShift;  // from indices of items to indices of blocks

  launch_dependent_grids();
  if (may_overlap_previous_grid()) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (is_first_in_line<kBytes>() && exists(i)) {
        prefetch_to_l2(input + i * (kItemThreads * kBytes));
      }
    }
    if (threadIdx.x == 0) prefetch_to_l2(block_scales + (first >> shift));
    if (kHasGlobal && blockIdx.x == 0 && threadIdx.x == 0) prefetch_to_l2(p.global);
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  uint64_t bits[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (exists(i)) bits[i] = load_packed<kBytes>(input + i * (kItemThreads * kBytes), policy);
  }
  uint32_t scales[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (exists(i)) scales[i] = load_byte(block_scales + ((first + i * kItemThreads) >> shift));
  }
  const float global = kHasGlobal ? load_scalar(p.global) : 1.0f;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (!exists(i)) return;
    store_numbers<kFormat>(out + i * (kItemThreads * kSize),
                           dequantize_item<T, kFormat>(bits[i], scales[i], global));
  }
}

#if !defined(__CUDACC_RTC__)

// Rows or items of a thread. Two were fastest on an H200: 0.936 of the elementwise ceiling for
// mxfp8, against 0.906 with four and 0.895 with one.
constexpr int kBlockDequantizeUnroll = 2;
constexpr uint32_t kLargeLaunchItems = 1u << 19;  // about two for each thread of a large GPU

template <typename T, BlockFormat kFormat>
auto choose_block_dequantize(bool linear, bool many) {
  constexpr int kUnroll = kBlockDequantizeUnroll;
  if (linear) {
    return many ? LinearBlockDequantizeKernel<T, kFormat, kUnroll>
                : LinearBlockDequantizeKernel<T, kFormat, 1>;
  }
  return many ? BlockDequantizeKernel<T, kFormat, kUnroll> : BlockDequantizeKernel<T, kFormat, 1>;
}

template <typename T>
auto choose_block_dequantize(BlockFormat format, bool linear, bool many) {
  switch (format) {
    case BlockFormat::e2m1_ue8m0:
      return choose_block_dequantize<T, BlockFormat::e2m1_ue8m0>(linear, many);
    case BlockFormat::e2m1_e4m3:
      return choose_block_dequantize<T, BlockFormat::e2m1_e4m3>(linear, many);
    case BlockFormat::e4m3_ue8m0:
      break;
  }
  return choose_block_dequantize<T, BlockFormat::e4m3_ue8m0>(linear, many);
}

// Launches the kernel on `stream`, unless there are no elements. Returns cudaErrorInvalidValue if
// `out` has more than 2^32 items of 16 bytes.
template <typename T>
cudaError_t launch_block_dequantize(BlockFormat format, BlockDequantizeParams p, bool enable_pdl,
                                    cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  ItemPlan plan = plan_items(p.rows, p.columns, Vec<T>::kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  const bool many = plan.items.count > kLargeLaunchItems;
  const bool linear = p.layout == SfLayout::linear;
  if (many && linear) {
    plan.ctas = (plan.ctas - 1) / kBlockDequantizeUnroll + 1;
  } else if (many) {
    plan = plan_items((p.rows - 1) / kBlockDequantizeUnroll + 1, p.columns, Vec<T>::kSize);
  }
  p.items = plan.items;
  p.scale_layout = make_scale_layout(p.layout, p.columns / p.block);
  // Why this is right: the rows of a thread start at a multiple of kRows, and such rows are
  // neighbours in every tile.
  p.scale_step = p.layout == SfLayout::tiles_8x4 ? 4 : 16;
  p.block_shift = 0;
  while (1u << p.block_shift < p.block) ++p.block_shift;
  const auto kernel = choose_block_dequantize<T>(format, linear, many);
  return launch(kernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
