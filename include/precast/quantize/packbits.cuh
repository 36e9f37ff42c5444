// SPDX-License-Identifier: Apache-2.0
// Packs eight truth values into a byte.
//
//   big     y[j] = sum over i < 8 of (x[8 j + i] != 0) << (7 - i)
//   little  y[j] = sum over i < 8 of (x[8 j + i] != 0) << i
//
// Values behind the end of x count as 0.
//
// Layout   x  [n]            bytes, contiguous, at any address
//          y  [ceil(n / 8)]  bytes, at any address
// Threads  a warp writes 256 bytes of y from a multiple of 256 on: 16 bits a lane from each of four
//          aligned vectors of x. If x and y are not aligned to each other, the bits are shifted
//          rather than the bytes. Partial spans are packed byte by byte.
// Traffic  reads x once, writes y once
// Source   numpy.packbits
// Measured 2026-11-21 on an H200: 2^28 values 68.6 us, 0.997 of the elementwise ceiling.
#pragma once

#include "precast/core/aligned_bytes.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"

namespace precast {

struct PackBitsParams {
  const void* x;  // [count]
  void* y;        // [bytes]
  int64_t count;
  int64_t bytes;
  bool little;
};

#if defined(__CUDACC__)

using Byte = unsigned char;

// Returns whether each of four bytes is not zero, as 4 bits above the bits of `before`; the first
// byte gives the lowest bit.
__device__ __forceinline__ uint32_t pack_4_bits(uint32_t bytes, uint32_t before) {
  const uint32_t truth = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
  // Bits 7, 15, 23 and 31 become 28 to 31.
  return __funnelshift_l(truth * 0x00204081u, before, 4);
}

__device__ __forceinline__ uint32_t pack_8_bits(uint2 bytes) {
  return pack_4_bits(bytes.x, pack_4_bits(bytes.y, 0u));
}

__device__ __forceinline__ uint32_t pack_16_bits(uint4 bytes) {
  return pack_4_bits(bytes.x, pack_4_bits(bytes.y, pack_4_bits(bytes.z, pack_4_bits(bytes.w, 0u))));
}

// Puts bytes whose first value is in the lowest bit into the requested bit order.
__device__ __forceinline__ uint32_t to_bit_order(uint32_t bits, bool little) {
  return little ? bits : __byte_perm(__brev(bits), 0u, 0x0123);
}

// Loads kBytes bytes, aligned to their size, as an integer or a pair of integers.
template <int kBytes>
__device__ __forceinline__ auto load_bytes(const Byte* source) {
  return AlignedBytes<kBytes>::load(reinterpret_cast<const char*>(source), L2Policy{}).bits;
}

// Loads the first `count` of eight bytes from any address; the others become zeros. It reads whole
// aligned words, each of which holds a byte of x, which lies between `begin` and `end`.
__device__ __forceinline__ uint2 load_8_bytes(const Byte* source, int64_t count, const Byte* begin,
                                              const Byte* end) {
  if (count <= 0) return make_uint2(0u, 0u);
  const uint32_t offset = reinterpret_cast<uint64_t>(source) & 7u;
  const Byte* aligned = source - offset;
  uint2 bytes;
  if (offset == 0 && aligned + 8 <= end) {
    bytes = load_bytes<8>(aligned);
  } else if (aligned >= begin && aligned + 16 <= end) {
    const uint2 low = load_bytes<8>(aligned), high = load_bytes<8>(aligned + 8);
    const uint64_t first = uint64_t(low.y) << 32 | low.x, second = uint64_t(high.y) << 32 | high.x;
    const uint64_t both = first >> 8 * offset | second << (64 - 8 * offset);
    bytes = make_uint2(static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32));
  } else {
    uint32_t words[2] = {0u, 0u};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) words[i / 4] |= uint32_t(load_bytes<1>(source + i)) << (i % 4 * 8);
    }
    return make_uint2(words[0], words[1]);
  }
  if (count < 8) {
    const uint64_t kept = (uint64_t(bytes.y) << 32 | bytes.x) & ((uint64_t(1) << 8 * count) - 1);
    bytes = make_uint2(static_cast<uint32_t>(kept), static_cast<uint32_t>(kept >> 32));
  }
  return bytes;
}

__device__ __forceinline__ void store_bits(Byte* target, uint32_t bits) {
  AlignedBytes<1>{static_cast<unsigned short>(bits)}.store(reinterpret_cast<char*>(target));
}

constexpr int kPackVecs = 4;  // vectors of a lane
constexpr int kWarpValues = kPackVecs * 32 * kVecBytes;
constexpr int kWarpBytes = kWarpValues / 8;
constexpr int kPackThreads = 128;
constexpr int kPackWarps = kPackThreads / kWarpSize;

__device__ __forceinline__ uint32_t offset_in(const void* address, uint32_t alignment) {
  return static_cast<uint32_t>(reinterpret_cast<uint64_t>(address)) % alignment;
}

// Returns the index of the first byte of y that the warp writes. Its address is a multiple of
// kWarpBytes, so the index may be negative.
__device__ __forceinline__ int64_t first_byte_of_warp(const PackBitsParams& p, int64_t cta,
                                                      int passes = 1, int span = kWarpBytes) {
  const int64_t warp = cta * passes * kPackWarps + threadIdx.x / kWarpSize;
  return warp * span - offset_in(p.y, kWarpBytes);
}

// Whether pack_full_vecs() from `source` on reads nothing outside of x.
__device__ __forceinline__ bool full_vecs_in_bounds(const PackBitsParams& p, const Byte* source,
                                                    int values = kWarpValues) {
  const Byte* x = static_cast<const Byte*>(p.x);
  const uint32_t offset = offset_in(source, kVecBytes);
  const Byte* end = source - offset + values + (offset > 0 ? kVecBytes : 0);
  return source - offset >= x && end <= x + p.count;
}

// Packs kVecs vectors a lane, a multiple of four, by one warp, from any address to an address that
// is a multiple of 64.
template <int kVecs>
__device__ __forceinline__ void pack_full_vecs(const Byte* source, Byte* target, bool little) {
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t offset = offset_in(source, kVecBytes);
  const Byte* vecs = source - offset;
  uint4 values[kVecs + 1];
  const L2Policy policy = read_policy(true);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    values[i] = load_vec(vecs + (i * kWarpSize + lane) * kVecBytes, policy).bits;
  }
  if (offset > 0) values[kVecs] = load_vec(vecs + kVecs * (kWarpSize * kVecBytes), policy).bits;
  uint32_t bits[kVecs + 1];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) bits[i] = pack_16_bits(values[i]);
  if (offset > 0) {  // Each lane takes its last bits from the first bits of the next lane.
    bits[kVecs] = pack_16_bits(values[kVecs]);
    const bool last = lane == kWarpSize - 1;
    uint32_t next = __shfl_sync(0xffffffffu, bits[0], (lane + 1) % kWarpSize);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const uint32_t after = __shfl_sync(0xffffffffu, bits[i + 1], (lane + 1) % kWarpSize);
      bits[i] = (bits[i] | (last ? after : next) << 16) >> offset & 0xffffu;
      next = after;
    }
  }
  // Lanes 4 k to 4 k + 3 hold 16 bits of each of four places. After a transposition each holds 64
  // bits of one place.
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int first = 0; first < kVecs; first += 4) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t even_bits = bits[first + 2 * i], odd_bits = bits[first + 2 * i + 1];
      const uint32_t mine = odd ? odd_bits : even_bits;
      const uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? even_bits : odd_bits, 1);
      words[i] = odd ? theirs | mine << 16 : mine | theirs << 16;
    }
    const uint32_t mine = upper ? words[1] : words[0];
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, upper ? words[0] : words[1], 2);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target + first * 64 + lane % 4 * 64 +
                                                          lane / 4 * 8),
                 "r"(to_bit_order(upper ? theirs : mine, little)),
                 "r"(to_bit_order(upper ? mine : theirs, little))
                 : "memory");
  }
}

__global__ __launch_bounds__(kPackThreads) void PackBitsKernel(
    const __grid_constant__ PackBitsParams p) {
  const Byte* x = static_cast<const Byte*>(p.x);
  Byte* y = static_cast<Byte*>(p.y);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = first_byte_of_warp(p, blockIdx.x);

  launch_dependent_grids();
  wait_on_dependent_grids();

  if (first >= 0 && (first + kWarpBytes) * 8 <= p.count && full_vecs_in_bounds(p, x + first * 8)) {
    pack_full_vecs<kPackVecs>(x + first * 8, y + first, p.little);
    return;
  }
  for (int64_t at = first + lane; at < first + kWarpBytes && at < p.bytes; at += kWarpSize) {
    if (at < 0) continue;
    const uint2 values = load_8_bytes(x + at * 8, p.count - at * 8, x, x + p.count);
    store_bits(y + at, to_bit_order(pack_8_bits(values), p.little));
  }
}

#if !defined(__CUDACC_RTC__)

// `cta_bytes` is what a CTA writes. Returns false from 2^31 CTAs on.
inline bool plan_packbits(const PackBitsParams& p, uint64_t cta_bytes, uint32_t& ctas) {
  const uint64_t bytes = uint64_t(p.bytes) + reinterpret_cast<uint64_t>(p.y) % kWarpBytes;
  const uint64_t count = bytes > 0 ? (bytes - 1) / cta_bytes + 1 : 1;
  ctas = static_cast<uint32_t>(count);
  return count <= 0x7fffffffu;
}

// Launches the packing of one array on `stream`, unless it is empty. Returns cudaErrorInvalidValue
// from 2^42 values on.
inline cudaError_t launch_packbits(const PackBitsParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.count == 0) return cudaSuccess;
  uint32_t ctas;
  if (!plan_packbits(p, kPackWarps * kWarpBytes, ctas)) return cudaErrorInvalidValue;
  return launch(PackBitsKernel, dim3(ctas), dim3(kPackThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
