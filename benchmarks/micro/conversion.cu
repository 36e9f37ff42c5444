// SPDX-License-Identifier: Apache-2.0
// The rate at which e4m3 becomes 16 bits or f32: in registers alone, and on the way from global to
// shared memory, as a producer of 128 threads does it for tiles of 128 rows of 128 elements.
//
// Every instruction sequence can be compared with exact results, because both kernels write the
// last numbers that they have converted.
#include "micro.cuh"
#include "precast/attention/gemm.cuh"
#include "precast/core/fp8.cuh"
#include "precast/core/sm90/warpgroup.cuh"

namespace micro {
namespace {

// Each converts four numbers of e4m3, the first in the lowest byte.

// What attention of FP8 keys and values does: two conversions of pairs.
struct ToF16 {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void convert(uint32_t x, uint32_t (&out)[2]) {
    fp8x4_to_f16x2<e4m3>(x, out[0], out[1]);
  }
};

// Moves the bits. The results are 2^-8 of the numbers; NaN becomes 1.875.
struct ToF16ByBits {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void convert(uint32_t x, uint32_t (&out)[2]) {
    const uint32_t a = __byte_perm(x, 0u, 0x1404), b = __byte_perm(x, 0u, 0x3424);
    out[0] = (a & 0x80008000u) | (a >> 1 & 0x3f803f80u);
    out[1] = (b & 0x80008000u) | (b >> 1 & 0x3f803f80u);
  }
};

// What the ops on FP8 tensors do (core/fp8.cuh).
struct ToF32 {
  static constexpr int kWords = 4;
  static __device__ __forceinline__ void convert(uint32_t x, uint32_t (&out)[4]) {
    float wide[4];
    unpack_fp8<e4m3>(x, wide);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = __float_as_uint(wide[i]);
  }
};

// By way of f16 and f32.
struct ToBf16 {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void convert(uint32_t x, uint32_t (&out)[2]) {
    fp8x4_to_f16x2<e4m3>(x, out[0], out[1]);
#pragma unroll
    for (uint32_t& pair : out) {
      const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
      const __nv_bfloat162 rounded = __floats2bfloat162_rn(both.x, both.y);
      pair = reinterpret_cast<const uint32_t&>(rounded);
    }
  }
};

// Moves the bits, and multiplies by the 2^120 by which the biases of the exponents differ, unless
// a scale of later has it. NaN becomes 480.
template <bool kMultiplies>
struct ToBf16ByBits {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void convert(uint32_t x, uint32_t (&out)[2]) {
    const uint32_t a = __byte_perm(x, 0u, 0x1404), b = __byte_perm(x, 0u, 0x3424);
    out[0] = (a & 0x80008000u) | (a >> 4 & 0x07f007f0u);
    out[1] = (b & 0x80008000u) | (b >> 4 & 0x07f007f0u);
    if constexpr (kMultiplies) {
#pragma unroll
      for (uint32_t& pair : out) {
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(0x7b807b80u));
      }
    }
  }
};

struct ConversionParams {
  const unsigned char* pool;  // [rows, kRowBytes]
  uint32_t places;            // of tiles of FP8 in the pool
  int rounds;                 // or tiles
  long long* clocks;          // [ctas, 1]
  uint32_t* out;              // the last numbers of CTA 0
};

// -- registers ------------------------------------------------------------------------------------

constexpr int kWordsOfThread = 16, kMaxThreads = 512;

// out [16, threads, words of a conversion]: thread t converts words 16 t .. of the pool.
template <typename Conversion>
__global__ __launch_bounds__(kMaxThreads,
                             1) void RegisterKernel(const __grid_constant__ ConversionParams p) {
  uint32_t x[kWordsOfThread];
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(p.pool);
#pragma unroll
  for (int i = 0; i < kWordsOfThread; ++i) x[i] = words[i * blockDim.x + threadIdx.x];
  if (blockIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kWordsOfThread; ++i) {
      uint32_t results[Conversion::kWords];
      Conversion::convert(x[i], results);
#pragma unroll
      for (int k = 0; k < Conversion::kWords; ++k) {
        p.out[(i * blockDim.x + threadIdx.x) * Conversion::kWords + k] = results[k];
      }
    }
  }
  __syncthreads();
  const long long begin = clock64();
  for (int round = 0; round < p.rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kWordsOfThread; ++i) {
      uint32_t results[Conversion::kWords];
      Conversion::convert(x[i], results);
      // Keeps the results alive at the price of one instruction for two words of them.
#pragma unroll
      for (int k = 0; k < Conversion::kWords; ++k) x[i] ^= results[k];
    }
  }
  const long long clocks = clock64() - begin;
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kWordsOfThread; ++i) all ^= x[i];
  if (all == 0x12345u) p.out[0] = all;
  if (threadIdx.x == 0) p.clocks[blockIdx.x] = clocks;
}

// -- global memory, registers, shared memory ------------------------------------------------------

constexpr int kColumns = 128, kFp8TileBytes = kTileRows * kColumns;
constexpr int kLoads = kFp8TileBytes / 16 / kWarpgroupSize;  // of 16 bytes, by a thread
constexpr int kStages = 2;

// The tile of FP8 [128, 128] goes to two panels [128, 64] of 16 bits, swizzled as wgmma reads them.
// kAhead tiles are on their way to registers. out: the last tile as it lies in shared memory.
template <typename Conversion, int kAhead>
__global__ __launch_bounds__(kWarpgroupSize,
                             1) void TileKernel(const __grid_constant__ ConversionParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  // Eight lanes store to eight different 16-byte columns: two rows, of which the swizzle of one
  // leaves even chunks in even columns and that of the other does not.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp * 4 + lane / 16 * 2 + lane / 4 % 2, panel = lane / 8 % 2, quarter = lane % 4;
  uint4 loaded[kAhead][kLoads];
  const auto load = [&](int tile, uint4(&into)[kLoads]) {
    const uint64_t place = random_place(tile, p.places);
    const unsigned char* const from =
        p.pool + place * kFp8TileBytes + row * kColumns + panel * 64 + quarter * 16;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      into[i] = *reinterpret_cast<const uint4*>(from + i * 16 * kColumns);
    }
  };
  const auto store = [&](const uint4(&from)[kLoads], unsigned char* stage) {
    unsigned char* const to = stage + panel * (kTileRows * kPanelBytes) + row * kPanelBytes;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint32_t words[4] = {from[i].x, from[i].y, from[i].z, from[i].w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[2], b[2];
        Conversion::convert(words[2 * half], a);
        Conversion::convert(words[2 * half + 1], b);
        const int chunk = (2 * quarter + half) ^ row % 8;
        *reinterpret_cast<uint4*>(to + i * 16 * kPanelBytes + chunk * 16) =
            make_uint4(a[0], a[1], b[0], b[1]);
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i, loaded[i]);
  const long long begin = clock64();
  for (int tile = 0; tile < p.rounds; tile += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      store(loaded[i], smem + (tile + i) % kStages * kTileBytes);
      load(tile + i + kAhead, loaded[i]);
      fence_shared_for_async();
      named_barrier(1, kWarpgroupSize);
    }
  }
  if (threadIdx.x == 0) p.clocks[blockIdx.x] = clock64() - begin;
  if (blockIdx.x != 0) return;
  const int last = (p.rounds - 1) % kStages * kTileBytes;
  for (int i = threadIdx.x; i < kTileBytes / 4; i += kWarpgroupSize) {
    p.out[i] = reinterpret_cast<const uint32_t*>(smem + last)[i];
  }
#endif
}

using Kernel = void (*)(ConversionParams);

// In the order of CONVERSIONS in bench_micro_conversion.py.
Kernel register_kernel(int64_t conversion) {
  constexpr Kernel kKernels[] = {RegisterKernel<ToF16>,
                                 RegisterKernel<ToF16ByBits>,
                                 RegisterKernel<ToF32>,
                                 RegisterKernel<ToBf16>,
                                 RegisterKernel<ToBf16ByBits<true>>,
                                 RegisterKernel<ToBf16ByBits<false>>};
  return kKernels[conversion];
}

ConversionParams params_of(const TensorView& pool, const TensorView& clocks, const TensorView& out,
                           int64_t rounds) {
  ConversionParams params = {};
  params.pool = static_cast<const unsigned char*>(pool.data_ptr());
  params.places = static_cast<uint32_t>(pool.size(0) * kRowBytes / kFp8TileBytes);
  params.rounds = static_cast<int>(rounds);
  params.clocks = clocks_of(clocks);
  params.out = static_cast<uint32_t*>(out.data_ptr());
  return params;
}

// pool [rows, 256] in bytes, clocks [ctas, 1], out: a word for every two or four bytes of the
// pool's first 64 bytes a thread.
void conversion_rate(TensorView pool, TensorView clocks, TensorView out, int64_t conversion,
                     int64_t threads, int64_t rounds) {
  launch_on_all(register_kernel(conversion), static_cast<int>(threads), 0, clocks,
                params_of(pool, clocks, out, rounds));
}

// out [128, 128] in 16 bits; the conversion is to f16, or to bf16 by way of f16 and f32.
void tile_conversion_rate(TensorView pool, TensorView clocks, TensorView out, bool to_f16,
                          int64_t ahead, int64_t tiles) {
  const Kernel kernel = to_f16 ? (ahead == 2 ? TileKernel<ToF16, 2> : TileKernel<ToF16, 1>)
                               : (ahead == 2 ? TileKernel<ToBf16, 2> : TileKernel<ToBf16, 1>);
  launch_on_all(kernel, kWarpgroupSize, kStages * kTileBytes, clocks,
                params_of(pool, clocks, out, tiles));
}

}  // namespace
}  // namespace micro

TVM_FFI_DLL_EXPORT_TYPED_FUNC(conversion_rate, micro::conversion_rate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tile_conversion_rate, micro::tile_conversion_rate);
