// SPDX-License-Identifier: Apache-2.0
// RMSNorm of the sum with a residual, quantised to fp8 with one scale for each 128 columns of a
// row.
//
//   x[r, c]        = input[r, c] + residual[r, c],  residual[r, c] = round(x[r, c])
//   y[r, c]        = round(x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * weight[c])
//   normed[r, c]   = y[r, c]                                  (if requested)
//   s[r, g]        = max(max_{c in g} |y[r, c]|, 1e-10) / 448, with ue8m0 rounded up to 2^n
//   out[r, c]      = sat(y[r, c] * (1 / s[r, g]))
//
// y is rounded to T first, so that the result equals a norm followed by a quantisation of its
// output. Otherwise all arithmetic is fp32, with quotient and reciprocal correctly rounded. A NaN
// in a row makes its scales NaN; so does an infinity under ue8m0 if y overflows T.
//
// Layout   input, residual, normed  [rows, hidden]  T, any two row strides, unit column stride
//          weight  [hidden]        T, contiguous; hidden is a multiple of 128
//          out     [rows, hidden]  e4m3, strides as input
//          scales  fp32, element (r, g) at r * scale_row_stride + g * scale_group_stride:
//                  [rows, groups], or [groups, rows rounded up to 4] for a GEMM that loads them
//                  column by column with TMA; their padding is not written
// Threads  norm/rmsnorm_rows.cuh; the 16 lanes of a group reduce its maximum by shuffles
// Traffic  7 bytes for an element of 16 bits (and 2 for normed), 1/32 for the scales. The separate
//          ops, fused_add_rmsnorm and a quantisation by groups, move 11.
// Source   arXiv:1910.07467; scaling by groups: DeepSeek-AI, arXiv:2412.19437, section 3.3
// Measured 2026-11-21 on an H200, bf16, with shares of the elementwise ceiling of the same run
//          (4390 GB/s), with and without normed:
//          8192 x 7168   129.0 us  0.94     99.1 us  0.95
//          16384 x 4096  145.7 us  0.95    112.0 us  0.96
//          A build that stores no scales had 0.95 at 8192 x 7168 with normed.
#pragma once

#include "precast/core/math.cuh"
#include "precast/core/quant.cuh"
#include "precast/core/store.cuh"
#include "precast/norm/rmsnorm_rows.cuh"

namespace precast {

constexpr int kQuantGroup = 128;  // columns that share a scale
constexpr float kMinGroupMax = 1e-10f;

struct RmsNormBlockQuantParams : RmsNormRowsParams {
  void* residual;  // [rows, hidden]
  void* out;       // [rows, hidden]
  void* normed;    // [rows, hidden], or null
  float* scales;   // see above
  RowStrides residual_strides;
  RowStrides out_strides;
  RowStrides normed_strides;
  int64_t scale_row_stride;
  int64_t scale_group_stride;
  bool ue8m0;
};

#if defined(__CUDACC__)

template <typename T_>
struct RmsNormBlockQuantEpilogue {
  using T = T_;
  using Params = RmsNormBlockQuantParams;
  static constexpr bool kAddsResidual = true;
  static constexpr bool kReadsSecond = true;
  static constexpr bool kWeightMayBeNull = false;
  static constexpr bool kAddsWeightBias = false;
  static constexpr bool kStoresWholeWarp = true;
  // As in RmsNormEpilogue, so that sums have the same order and normed has the same bits.
  static constexpr int kVecsOfFewRows = 2;
  static constexpr int kVecsOfManyRows = 1;
  static constexpr int kLanes = kQuantGroup / Vec<T>::kSize;  // lanes of a group
  T* second;                                                  // [hidden], the residual
  T* normed;                                                  // [hidden], or null
  e4m3* out;                                                  // [hidden]
  float* scales;                                              // [groups] at scale_group_stride
  int64_t scale_group_stride;
  bool ue8m0;

  RmsNormBlockQuantEpilogue() = default;
  __device__ __forceinline__ RmsNormBlockQuantEpilogue(const Params& p, const RowPosition& position)
      : second(position.in<T>(p.residual, p.residual_strides)),
        normed(p.normed == nullptr ? nullptr : position.in<T>(p.normed, p.normed_strides)),
        out(position.in<e4m3>(p.out, p.out_strides)),
        scales(p.scales + (int64_t(position.outer) * p.rows.inner.value + position.inner) *
                              p.scale_row_stride),
        scale_group_stride(p.scale_group_stride),
        ue8m0(p.ue8m0) {}

  __device__ __forceinline__ void prefetch() const {}
  __device__ __forceinline__ void load_scalars() {}

  // Stores vectors of eight values at columns[i]; a negative column means that there is no vector.
  // All lanes of a warp call it together. Why all of them: for shuffles within half a warp the
  // compiler cannot know that the lanes are converged, and tests it at run time (MATCH, VOTE): with
  // these tests, and one vector after the other, 64 rows of 7168 took 3.28 us instead of 3.07.
  template <int kVecs>
  __device__ __forceinline__ void store_warp(const int (&columns)[kVecs],
                                             const float (&y)[kVecs][8]) const {
    static_assert(kVecs <= 2, "two magnitudes of 16 bits make a word");
    Vec<T> rounded[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      rounded[i] = pack<T>(y[i]);
      if (normed != nullptr && columns[i] >= 0) store_vec(normed + columns[i], rounded[i]);
    }
    const uint32_t first = pairwise_magnitude(rounded[0]);
    const uint32_t last = pairwise_magnitude(rounded[kVecs - 1]);
    // The maximum of vector i is in bits 16 i to 16 i + 15, so that both share the same shuffles.
    uint32_t max_value =
        __vmaxu2(__byte_perm(first, last, 0x5410), __byte_perm(first, last, 0x7632));
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      max_value = __vmaxu2(max_value, __shfl_xor_sync(0xffffffffu, max_value, distance));
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const uint32_t magnitude =
          widen_magnitude(T(), i == 0 ? max_value & 0xffffu : max_value >> 16);
      const GroupScale scale = group_scale(magnitude);
      if (columns[i] >= 0) {
        if (threadIdx.x % kLanes == 0) {
          store_evict_last(scales + columns[i] / kQuantGroup * scale_group_stride, scale.scale);
        }
        float x[8];
        unpack(rounded[i], x);
#pragma unroll
        for (int k = 0; k < 8; ++k) x[k] *= scale.reciprocal;
        store_fp8(out + columns[i], x);
      }
    }
  }

  // Does the same for one vector, by the lanes of a warp that hold its group. The kernel that loops
  // over rows uses it.
  template <bool kAligned>
  __device__ __forceinline__ void store(int column, int left, const float (&y)[8],
                                        Vec<T> /*second*/) const {
    const Vec<T> rounded = pack<T>(y);
    if (normed != nullptr) precast::store<kAligned>(normed + column, rounded, left);
    uint32_t magnitude = amax_bits(rounded);
    const uint32_t lane = threadIdx.x % kWarpSize;
    const uint32_t lanes = ((1u << kLanes) - 1u) << (lane & ~(kLanes - 1u));
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      magnitude = max(magnitude, __shfl_xor_sync(lanes, magnitude, distance));
    }
    const GroupScale scale = group_scale(magnitude);
    if (lane % kLanes == 0) scales[column / kQuantGroup * scale_group_stride] = scale.scale;
    float x[8];
    unpack(rounded, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale.reciprocal;
    store_rounded<kAligned>(out + column, x, left);
  }

 private:
  // Why evict_last: eight rows fill a sector of scales, and other lines leave L2 before that.
  __device__ __forceinline__ static void store_evict_last(float* target, float x) {
    const L2Policy policy = read_policy(true);
    asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(target), "f"(x),
                 "l"(policy.bits)
                 : "memory");
  }

  struct GroupScale {
    float scale;
    float reciprocal;
  };

  // Returns the largest of the 16-bit magnitudes in each half of the words.
  __device__ __forceinline__ static uint32_t pairwise_magnitude(Vec<T> vec) {
    constexpr uint32_t kMagnitudes = 0x7fff7fffu;
    return __vmaxu2(__vmaxu2(vec.bits.x & kMagnitudes, vec.bits.y & kMagnitudes),
                    __vmaxu2(vec.bits.z & kMagnitudes, vec.bits.w & kMagnitudes));
  }

  // Quotient and reciprocal are correctly rounded, by the steps that the compiler takes for normal
  // numbers; its branches for other numbers cost a third of the kernel's instructions. The quotient
  // lies between 2^-43 and 2^120, or is infinite or NaN.
  __device__ __forceinline__ GroupScale group_scale(uint32_t magnitude) const {
    constexpr float kInverse = 1.0f / Fp8<e4m3>::kMax;
    const uint32_t bits = max(magnitude, __float_as_uint(kMinGroupMax));
    const float max_value = __uint_as_float(bits);
    GroupScale result;
    const float quotient = max_value * kInverse;
    result.scale = fmaf(fmaf(-Fp8<e4m3>::kMax, quotient, max_value), kInverse, quotient);
    if (bits >= 0x7f800000u) result.scale = max_value;
    if (ue8m0) result.scale = round_up_to_power_of_two(result.scale);
    const float reciprocal = fast_reciprocal(result.scale);
    result.reciprocal = fmaf(reciprocal, fmaf(-result.scale, reciprocal, 1.0f), reciprocal);
    if (bits >= 0x7f800000u) result.reciprocal = reciprocal;
    return result;
  }
};

#if !defined(__CUDACC_RTC__)

// Launches the kernel on `stream`, unless the tensor is empty. hidden must be a multiple of
// kQuantGroup.
template <typename T>
cudaError_t launch_rmsnorm_block_quant(const RmsNormBlockQuantParams& p, bool enable_pdl,
                                       cudaStream_t stream) {
  if (p.rows.count == 0 || p.hidden == 0) return cudaSuccess;
  if (p.hidden % kQuantGroup != 0) return cudaErrorInvalidValue;
  using Epilogue = RmsNormBlockQuantEpilogue<T>;
  const bool aligned = rows_are_vector_aligned<T>(p.residual, p.residual_strides) &&
                       rows_are_vector_aligned<T>(p.normed, p.normed_strides) &&
                       rows_are_vector_aligned<e4m3>(p.out, p.out_strides, kStoreBytes<e4m3>);
  const RowShape shape = rmsnorm_rows_shape<Epilogue>(p, 4, true, aligned);
  return launch_rmsnorm_rows<Epilogue>(p, shape, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
