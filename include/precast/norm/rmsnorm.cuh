// SPDX-License-Identifier: Apache-2.0
// RMSNorm, alone or fused with the addition of a residual.
//
//   x[r, c]   = input[r, c]                         (RmsNorm)
//   x[r, c]   = input[r, c] + residual[r, c]        (fused; residual[r, c] = round(x[r, c]))
//   out[r, c] = round(x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * (weight[c] + weight_bias))
//
// weight_bias is 0, or 1 for Gemma's form. All arithmetic is fp32, including x: the residual is
// rounded only when it is stored.
//
// Layout   input, residual, out  [rows, hidden]  T, any two row strides, unit column stride
//          weight                [hidden]        T, contiguous
//          out may be input.
// Threads  norm/rmsnorm_rows.cuh
// Traffic  reads input (and residual) once, writes out (and residual) once
// Source   Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467
// Measured 2026-11-21 on an H200, bf16, with shares of the elementwise ceilings of the same run
//          (4278 GB/s with one read and one write, 4390 GB/s with two reads and one write):
//          16384 x 4096   4281 GB/s  1.00 / 0.98    fused  4265 GB/s  1.00 / 0.97
//          16384 x 8192   4289 GB/s  1.00 / 0.98    fused  4317 GB/s  1.01 / 0.98
#pragma once

#include "precast/norm/rmsnorm_rows.cuh"

namespace precast {

struct RmsNormParams : RmsNormRowsParams {
  void* residual;  // [rows, hidden], fused only
  void* out;       // [rows, hidden]
  RowStrides residual_strides;
  RowStrides out_strides;
};

#if defined(__CUDACC__)

// Rounds y to T.
template <typename T_, bool kFused>
struct RmsNormEpilogue {
  using T = T_;
  using Params = RmsNormParams;
  static constexpr bool kAddsResidual = kFused;
  static constexpr bool kReadsSecond = kFused;
  static constexpr bool kWeightMayBeNull = false;
  static constexpr bool kAddsWeightBias = true;
  static constexpr bool kStoresWholeWarp = false;
  static constexpr int kVecsOfFewRows = 2;
  static constexpr int kVecsOfManyRows = kFused ? 1 : 2;
  T* second;  // [hidden], the residual
  T* out;     // [hidden]

  RmsNormEpilogue() = default;
  __device__ __forceinline__ RmsNormEpilogue(const Params& p, const RowPosition& position)
      : second(position.in<T>(p.residual, p.residual_strides)),
        out(position.in<T>(p.out, p.out_strides)) {}

  __device__ __forceinline__ void prefetch() const {}
  __device__ __forceinline__ void load_scalars() {}

  template <bool kAligned>
  __device__ __forceinline__ void store(int column, int left, const float (&y)[8],
                                        Vec<T> /*second*/) const {
    precast::store<kAligned>(out + column, pack<T>(y), left);
  }
};

#if !defined(__CUDACC_RTC__)

// Launches RMSNorm of every row on `stream`, unless the tensor is empty.
template <typename T, bool kFused>
cudaError_t launch_rmsnorm(const RmsNormParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows.count == 0 || p.hidden == 0) return cudaSuccess;
  using Epilogue = RmsNormEpilogue<T, kFused>;
  const bool aligned = rows_are_vector_aligned<T>(p.residual, p.residual_strides) &&
                       rows_are_vector_aligned<T>(p.out, p.out_strides);
  const RowShape shape = rmsnorm_rows_shape<Epilogue>(p, kFused ? 4 : 2, p.out == p.input, aligned);
  return launch_rmsnorm_rows<Epilogue>(p, shape, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
