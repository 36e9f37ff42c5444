// SPDX-License-Identifier: Apache-2.0
// RMSNorm, alone or fused with the addition of a residual, with fp8 output by one given scale.
//
//   x[r, c]   = input[r, c]                         (RmsNormQuant)
//   x[r, c]   = input[r, c] + residual[r, c]        (fused; residual[r, c] = round(x[r, c]))
//   y[r, c]   = x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * weight[c]
//   out[r, c] = sat(y[r, c] * (1 / scale))
//
// scale is the dequantisation scale; it is read on the GPU. All arithmetic is fp32, with a
// correctly rounded reciprocal; sat rounds to nearest even and saturates. input is not changed.
//
// Layout   input, residual  [rows, hidden]  T, any two row strides, unit column stride
//          weight           [hidden]        T, contiguous
//          scale            [1]             fp32
//          out              [rows, hidden]  e4m3 or e5m2, strides as input
// Threads  norm/rmsnorm_rows.cuh; a thread reads 16 bytes and writes 8
// Traffic  reads input (and residual) once, writes out (and residual) once: 3 (fused 7) bytes for
//          an element of 16 bits. The separate ops, a norm and a quantisation, move 7 (fused 11).
// Measured 2026-11-21 on an H200, bf16 to e4m3, with shares of the elementwise ceiling of the same
//          run (4390 GB/s):
//          16384 x 4096  4220 GB/s  0.96    fused  4351 GB/s  0.99
//          16384 x 8192  4333 GB/s  0.99    fused  4307 GB/s  0.98
// Source   arXiv:1910.07467; saturation: OCP 8-bit Floating Point Specification 1.0
#pragma once

#include "precast/core/store.cuh"
#include "precast/norm/rmsnorm_rows.cuh"

namespace precast {

struct RmsNormQuantParams : RmsNormRowsParams {
  void* residual;      // [rows, hidden], fused only
  void* out;           // [rows, hidden]
  const float* scale;  // [1]
  RowStrides residual_strides;
  RowStrides out_strides;
};

#if defined(__CUDACC__)

// Divides y by a scale and stores it as Out.
template <typename T_, typename Out, bool kFused>
struct RmsNormQuantEpilogue {
  using T = T_;
  using Params = RmsNormQuantParams;
  static constexpr bool kAddsResidual = kFused;
  static constexpr bool kReadsSecond = kFused;
  static constexpr bool kWeightMayBeNull = false;
  static constexpr bool kAddsWeightBias = false;
  static constexpr bool kStoresWholeWarp = false;
  static constexpr int kVecsOfFewRows = kFused ? 1 : 2;
  static constexpr int kVecsOfManyRows = kFused ? 1 : 4;
  T* second;  // [hidden], the residual
  Out* out;   // [hidden]
  const float* scale;
  float divisor;  // the scale, valid after load_scalars()

  RmsNormQuantEpilogue() = default;
  __device__ __forceinline__ RmsNormQuantEpilogue(const Params& p, const RowPosition& position)
      : second(position.in<T>(p.residual, p.residual_strides)),
        out(position.in<Out>(p.out, p.out_strides)),
        scale(p.scale) {}

  __device__ __forceinline__ void prefetch() const { prefetch_to_l2(scale); }
  __device__ __forceinline__ void load_scalars() { divisor = load_scalar(scale); }

  template <bool kAligned>
  __device__ __forceinline__ void store(int column, int left, const float (&y)[8],
                                        Vec<T> /*second*/) const {
    const float multiplier = 1.0f / divisor;
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = y[i] * multiplier;
    store_rounded<kAligned>(out + column, scaled, left);
  }
};

#if !defined(__CUDACC_RTC__)

// Launches the quantised RMSNorm of every row on `stream`, unless the tensor is empty.
template <typename T, typename Out, bool kFused>
cudaError_t launch_rmsnorm_quant(const RmsNormQuantParams& p, bool enable_pdl,
                                 cudaStream_t stream) {
  if (p.rows.count == 0 || p.hidden == 0) return cudaSuccess;
  using Epilogue = RmsNormQuantEpilogue<T, Out, kFused>;
  const bool aligned = rows_are_vector_aligned<T>(p.residual, p.residual_strides) &&
                       rows_are_vector_aligned<Out>(p.out, p.out_strides, kStoreBytes<Out>);
  const RowShape shape = rmsnorm_rows_shape<Epilogue>(p, kFused ? 4 : 2, kFused, aligned);
  return launch_rmsnorm_rows<Epilogue>(p, shape, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
