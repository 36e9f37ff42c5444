// SPDX-License-Identifier: Apache-2.0
// RMSNorm followed by an activation: its own SiLU, or a gate that is the sigmoid of another tensor.
//
//   y[r, c]   = input[r, c] / sqrt(mean_c(input[r, c]^2) + eps) * weight[c]
//   out[r, c] = round(y[r, c] * sigmoid(y[r, c]))       (SiLU)
//   out[r, c] = round(y[r, c] * sigmoid(gate[r, c]))    (gated; a missing weight counts as 1)
//
// All arithmetic is fp32; fp8 output saturates and has no scale.
//
// Layout   input, gate  [rows, hidden]  T, any two row strides, unit column stride
//          weight       [hidden]        T, contiguous
//          out          [rows, hidden]  f16, bf16 or e4m3, strides as input; may be input if it has
//                                       its type
// Threads  norm/rmsnorm_rows.cuh
// Traffic  reads input (and gate) once, writes out once
// Source   arXiv:1910.07467. SiLU after the norm: the decoder of Wan's VAE, arXiv:2503.20314. The
//          norm with a sigmoid gate: the output of Kimi Delta Attention, arXiv:2510.26692.
// Measured 2026-11-21 on an H200, bf16, with shares of the elementwise ceiling of the same run
//          (4390 GB/s): SiLU, 16384 x 4096, 64.1 us, 0.95; 99840 x 320 31.2 us, 0.93; the sigmoid
//          gate, 16384 x 32 x 128, 92.5 us, 0.99.
#pragma once

#include "precast/core/math.cuh"
#include "precast/core/store.cuh"
#include "precast/norm/rmsnorm_rows.cuh"

namespace precast {

struct RmsNormGateParams : RmsNormRowsParams {
  const void* gate;  // [rows, hidden], gated only
  void* out;         // [rows, hidden]
  RowStrides gate_strides;
  RowStrides out_strides;
};

#if defined(__CUDACC__)

template <typename T_, typename Out, bool kGated>
struct RmsNormGateEpilogue {
  using T = T_;
  using Params = RmsNormGateParams;
  static constexpr bool kAddsResidual = false;
  static constexpr bool kReadsSecond = kGated;
  static constexpr bool kWeightMayBeNull = kGated;
  static constexpr bool kAddsWeightBias = false;
  static constexpr bool kStoresWholeWarp = false;
  static constexpr int kVecsOfFewRows = 2;
  static constexpr int kVecsOfManyRows = kGated ? 1 : 4;
  const T* second;  // [hidden], the gate
  Out* out;         // [hidden]

  RmsNormGateEpilogue() = default;
  __device__ __forceinline__ RmsNormGateEpilogue(const Params& p, const RowPosition& position)
      : second(position.in<T>(p.gate, p.gate_strides)),
        out(position.in<Out>(p.out, p.out_strides)) {}

  __device__ __forceinline__ void prefetch() const {}
  __device__ __forceinline__ void load_scalars() {}

  template <bool kAligned>
  __device__ __forceinline__ void store(int column, int left, const float (&y)[8],
                                        Vec<T> gate) const {
    float z[8];
    if constexpr (kGated) {
      unpack(gate, z);
#pragma unroll
      for (int i = 0; i < 8; ++i) z[i] = y[i] * sigmoid(z[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) z[i] = silu(y[i]);
    }
    store_rounded<kAligned>(out + column, z, left);
  }
};

#if !defined(__CUDACC_RTC__)

// Launches the kernel on `stream`, unless the tensor is empty.
template <typename T, typename Out, bool kGated>
cudaError_t launch_rmsnorm_gate(const RmsNormGateParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows.count == 0 || p.hidden == 0) return cudaSuccess;
  using Epilogue = RmsNormGateEpilogue<T, Out, kGated>;
  const bool aligned = rows_are_vector_aligned<T>(p.gate, p.gate_strides) &&
                       rows_are_vector_aligned<Out>(p.out, p.out_strides, kStoreBytes<Out>);
  const RowShape shape = rmsnorm_rows_shape<Epilogue>(p, kGated ? 3 : 2, p.out == p.input, aligned);
  return launch_rmsnorm_rows<Epilogue>(p, shape, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
