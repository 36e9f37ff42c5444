// SPDX-License-Identifier: Apache-2.0
// What follows an all-reduce in a transformer: residual, RMSNorm and quantisation, in one launch.
//
//   s[r, c]    = round(sum of all ranks' input[r, c])                       comm/allreduce.cuh
//   x[r, c]    = s[r, c] + residual[r, c],  residual_out[r, c] = round(x[r, c])
//   y[r, c]    = round(x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * (weight[c] + weight_bias))
//   quant[r, c] = sat(y[r, c] * (1 / scale)), with the scale
//     tensor   given, one number
//     group    max(max_{c in g} |y[r, c]| / 448, 1e-10), rounded up to a power of two
//     token    max(max_c |y[r, c]|, 1e-10) / 448
//
// All arithmetic is fp32. s and y are rounded to T, so that the result equals an all-reduce, a norm
// and a quantisation that run one after the other.
//
// Layout   residual, residual_out, norm_out (y)  [rows, hidden]  T, contiguous
//          weight     [hidden]        T, contiguous
//          quant_out  [rows, hidden]  e4m3, contiguous
//          scales     tensor: [1] fp32, read on the GPU; token: [rows] fp32; group: words of four
//                     exponents, word w of row r at r + w * scale_stride (core/quant.cuh)
// Threads  comm/allreduce.cuh; the sums of a row are over its cluster. The kernel for any rows
//          keeps a thread's vectors in shared memory, and reads the residual twice.
// Traffic  beyond that of the all-reduce: reads residual and weight, writes what is requested
// Measured 2026-11-27 on two H200, bf16, us in a CUDA graph, with the all-reduce alone, and with
//          NCCL and a separate norm:
//          8 x 8192     3.0 (2.4, 9.4)   64 x 8192  5.9 (5.1, 18.8)
//          2048 x 8192  101 (98.7, 169)
// Source   arXiv:1910.07467 (RMSNorm); arXiv:2412.19437, section 3.3 (scales of groups)
#pragma once

#include "precast/comm/allreduce.cuh"
#include "precast/comm/row_reducer.cuh"
#include "precast/core/quant.cuh"
#include "precast/norm/rmsnorm_kernels.cuh"

namespace precast {

enum class QuantMode : int { none, tensor, group, token };

struct AllReduceNormParams : AllReduceParams {
  const void* residual;  // [rows, hidden]
  const void* weight;    // [hidden]
  void* residual_out;    // [rows, hidden], or null
  void* norm_out;        // [rows, hidden], or null
  void* quant_out;       // [rows, hidden], unless mode is none
  const float* scale;    // [1], for QuantMode::tensor
  void* scales;          // for the other modes
  int64_t scale_stride;
  QuantMode mode;
  int group_size;  // 16, 32, 64 or 128
  float eps;
  float weight_bias;
  float inverse_hidden;  // set by the launcher
};

#if defined(__CUDACC__)

template <typename T_>
class NormEpilogue {
 public:
  using T = T_;
  using Params = AllReduceNormParams;
  static constexpr bool kRowsAreWhole = true;
  static constexpr int kSize = Vec<T>::kSize;

  // What is loaded before the wait for the peers.
  template <int kVecs>
  struct Early {
    Vec<T> residual[kVecs];
    Vec<T> weight[kVecs];
  };

  template <int kVecs>
  __device__ __forceinline__ static Early<kVecs> load_early(const Params& p, int64_t row,
                                                            const int (&indices)[kVecs]) {
    Early<kVecs> early;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      early.residual[i] = load_residual(p, row, indices[i], true);
      early.weight[i] = load_weight(p, indices[i], true);
    }
    return early;
  }

  template <int kVecs>
  __device__ __forceinline__ void finish_row(const Params& p, int64_t row,
                                             const int (&indices)[kVecs],
                                             const Vec<T> (&sums)[kVecs],
                                             const Early<kVecs>& early) {
    Vec<T> y[kVecs];
    {
      float x[kVecs][kSize];
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const Elements elements(sums[i], early.residual[i]);
        squares += elements.sum_of_squares();
#pragma unroll
        for (int k = 0; k < kSize; ++k) x[i][k] = elements.x[k];
      }
      const float rstd = rstd_of(p, squares, [&] {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          store_to(p, p.residual_out, row, indices[i], pack<T>(x[i]), true);
        }
      });
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        y[i] = scaled(p, x[i], rstd, early.weight[i]);
        store_to(p, p.norm_out, row, indices[i], y[i], true);
      }
    }
    if constexpr (sizeof(T) == 2) {
      if (p.mode == QuantMode::none) return;
      uint32_t most = 0u;
      if (p.mode == QuantMode::token) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) most = max(most, amax_bits(y[i]));
      }
      const QuantScale scale = row_scale(p, row, indices[0], most);
#pragma unroll
      for (int i = 0; i < kVecs; ++i) quantize(p, row, indices[i], y[i], scale, true);
    }
  }

  static constexpr size_t shared_bytes(const AllReduceTuning& cut) {
    return static_cast<size_t>(cut.threads) * cut.vecs * kVecBytes;
  }

  // The same arithmetic in the same order, so that the bits do not depend on which one runs.
  template <typename SumOf>
  __device__ __forceinline__ void finish_any_row(const Params& p, int64_t row, int first, int step,
                                                 const SumOf& sum_of) {
    extern __shared__ uint4 kept_bits[];  // [vecs, threads], of s, then of y
    Vec<T>* kept = reinterpret_cast<Vec<T>*>(kept_bits) + threadIdx.x;
    const int vecs = (p.row_vecs + step - 1) / step;  // the same for all lanes of a warp
    float squares = 0.0f;
#pragma unroll 1
    for (int i = 0; i < vecs; ++i) {
      const int index = first + i * step;
      if (index >= p.row_vecs) break;
      const Vec<T> sum = sum_of(index);
      kept[i * blockDim.x] = sum;
      squares += Elements(sum, load_residual(p, row, index, p.aligned)).sum_of_squares();
    }
    const float rstd = rstd_of(p, squares, [] {});
    uint32_t most = 0u;
#pragma unroll 1
    for (int i = 0; i < vecs; ++i) {
      const int index = first + i * step;
      if (index >= p.row_vecs) break;
      Vec<T>& place = kept[i * blockDim.x];
      const Elements x(place, load_residual(p, row, index, p.aligned));
      store_to(p, p.residual_out, row, index, pack<T>(x.x), p.aligned);
      const Vec<T> y = scaled(p, x.x, rstd, load_weight(p, index, p.aligned));
      store_to(p, p.norm_out, row, index, y, p.aligned);
      if constexpr (sizeof(T) == 2) {
        most = max(most, amax_bits(y));
        place = y;
      }
    }
    if constexpr (sizeof(T) == 2) {
      if (p.mode == QuantMode::none) return;
      const QuantScale scale = row_scale(p, row, first, most);
#pragma unroll 1
      for (int i = 0; i < vecs; ++i) {
        const int index = first + i * step;
        const bool exists = index < p.row_vecs;
        const Vec<T> y = exists ? kept[i * blockDim.x] : zero_vec<T>();
        quantize(p, row, index, y, scale, p.aligned);
      }
    }
  }

 private:
  using Elements = RmsNormElements<T, true>;

  __device__ __forceinline__ static Vec<T> load_residual(const Params& p, int64_t row, int index,
                                                         bool aligned) {
    const int column = index * kSize;
    return load_if(static_cast<const T*>(p.residual) + row * p.columns + column, p.columns - column,
                   aligned);
  }

  __device__ __forceinline__ static Vec<T> load_weight(const Params& p, int index, bool aligned) {
    const int column = index * kSize;
    return load_if(static_cast<const T*>(p.weight) + column, p.columns - column, aligned);
  }

  __device__ __forceinline__ static void store_to(const Params& p, void* target, int64_t row,
                                                  int index, Vec<T> vec, bool aligned) {
    if (target == nullptr) return;
    const int column = index * kSize;
    store_if(static_cast<T*>(target) + row * p.columns + column, vec, p.columns - column, aligned);
  }

  // `meanwhile()` runs while the sums of the other CTAs are under way.
  template <typename Action>
  __device__ __forceinline__ float rstd_of(const Params& p, float squares,
                                           const Action& meanwhile) {
    return rsqrtf(reducer_.sum(squares, meanwhile) * p.inverse_hidden + p.eps);
  }

  __device__ __forceinline__ static Vec<T> scaled(const Params& p, const float (&x)[kSize],
                                                  float rstd, Vec<T> weight) {
    float w[kSize], y[kSize];
    unpack(weight, w);
#pragma unroll
    for (int k = 0; k < kSize; ++k) y[k] = x[k] * rstd * (w[k] + p.weight_bias);
    return pack<T>(y);
  }

  static constexpr float kMinScale = 1e-10f;

  // The scale of the tensor or of the row. All threads of the row call it, with the largest
  // magnitude of their vectors, of which `first` is the first one.
  __device__ __forceinline__ QuantScale row_scale(const Params& p, int64_t row, int first,
                                                  uint32_t most) {
    QuantScale scale = {};
    if (p.mode == QuantMode::tensor) {
      scale.reciprocal = 1.0f / load_scalar(p.scale);
    } else if (p.mode == QuantMode::token) {
      scale = quant_scale<e4m3>(reducer_.max(most), kMinScale, ScaleFormat::numbers);
      if (first == 0) store_scale(p.scales, ScaleFormat::numbers, row, 0u, 0, 1u, scale);
    }
    return scale;
  }

  // Writes the codes of a vector, and the scale of its group. All lanes of a warp call it, with
  // zeros if the vector does not exist.
  __device__ __forceinline__ static void quantize(const Params& p, int64_t row, int index, Vec<T> y,
                                                  QuantScale scale, bool aligned) {
    const int column = index * kSize;
    if (p.mode == QuantMode::group) {
      const int lanes = p.group_size / kSize;
      const uint32_t most = warp_max(amax_bits(y), lanes);
      scale = quant_scale<e4m3>(most, kMinScale * CodeRange<e4m3>::kMax, ScaleFormat::exponents);
      if (column < p.columns && threadIdx.x % lanes == 0) {
        store_scale(p.scales, ScaleFormat::exponents, row, column / p.group_size, p.scale_stride,
                    p.columns / p.group_size, scale);
      }
    }
    const int64_t left = p.columns - column;
    if (left <= 0) return;
    float x[8];
    unpack(y, x);
    e4m3* target = static_cast<e4m3*>(p.quant_out) + row * p.columns + column;
    if (aligned) {
      store_codes<e4m3, true>(target, x, scale.reciprocal, left);
    } else {
      store_codes<e4m3, false>(target, x, scale.reciprocal, left);
    }
  }

  RowReducer reducer_;
};

#endif  // __CUDACC__

}  // namespace precast
