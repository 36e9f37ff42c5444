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
// Threads  comm/allreduce.cuh; the sums of a row are over its cluster
// Traffic  beyond that of the all-reduce: reads residual and weight, writes what is requested
// Measured 2026-11-26 on two H200, bf16, us in a CUDA graph, with the all-reduce alone, NCCL and a
//          separate norm, and FlashInfer's:
//          8 x 8192     3.2 (2.4, 9.4, 5.8)   64 x 8192  6.2 (5.2, 18.8, 8.9)
//          2048 x 8192  101 (98.6, 169, 152)
// Source   arXiv:1910.07467 (RMSNorm); arXiv:2412.19437, section 3.3 (scales of groups)
#pragma once

#include "precast/comm/allreduce.cuh"
#include "precast/core/quant.cuh"
#include "precast/core/sm90/cluster_memory.cuh"
#include "precast/core/sm90/mbarrier.cuh"
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

// Sums and maxima over the CTAs of a row, one after the other. Two sets of shared memory in turn
// make that safe: a CTA is in its call n + 2 only when all warps have begun call n + 1.
//
// CTAs of a cluster exchange by stores that complete on an mbarrier. Why not by cluster barriers,
// as cluster_sum() does: their release waits until everything that was sent to the peers has
// arrived there, which took 1.4 us for 8 rows of 8192 (H200).
class RowReducer {
 public:
  __device__ __forceinline__ RowReducer() {
    if (cluster_size() == 1) return;
    if (threadIdx.x == 0) {
      mbarrier_init(&memory().barriers[0]);
      mbarrier_init(&memory().barriers[1]);
      fence_mbarrier_init();
    }
    cluster_arrive_relaxed();
  }

  __device__ __forceinline__ float sum(float x) {
    if (cluster_size() == 1) return block_sum(x, memory().sums[calls_++ & 1]);
    return warp_sum(__uint_as_float(exchange(__float_as_uint(warp_sum(x)))));
  }

  __device__ __forceinline__ uint32_t max(uint32_t x) {
    if (cluster_size() == 1) return block_max(x, memory().words[calls_++ & 1]);
    return warp_max(exchange(warp_max(x)));
  }

 private:
  struct Memory {
    float sums[2][kMaxWarps];
    uint32_t words[2][kMaxWarps];
    uint64_t barriers[2];
  };

  __device__ __forceinline__ static Memory& memory() {
    __shared__ Memory memory;
    return memory;
  }

  // Gives each warp the words of all warps of the cluster: lane l gets that of warp l, or 0.
  __device__ __forceinline__ uint32_t exchange(uint32_t word) {
    const uint32_t lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
    const uint32_t all = warps * cluster_size();
    if (calls_ == 0) cluster_wait();  // the mbarriers of all CTAs are initialised
    const uint32_t turn = calls_ & 1, parity = calls_ / 2 & 1;
    ++calls_;
    uint64_t* barrier = &memory().barriers[turn];
    uint32_t* words = memory().words[turn];
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, all * sizeof(uint32_t));
    if (lane < cluster_size()) {
      store_async(&words[cluster_rank() * warps + threadIdx.x / kWarpSize], barrier,
                  static_cast<int>(lane), word);
    }
    mbarrier_wait_parity(barrier, parity);
    return lane < all ? words[lane] : 0u;
  }

  uint32_t calls_ = 0;
};

template <typename T_>
class NormEpilogue {
 public:
  using T = T_;
  using Params = AllReduceNormParams;
  static constexpr bool kRowsAreWhole = true;
  static constexpr int kSize = Vec<T>::kSize;

  // What is loaded before the wait for the peers. Why only one vector a thread: for two, registers
  // spill, and other rows of the CTA are under way anyway.
  template <int kVecs>
  struct Early {
    static constexpr bool kLoads = kVecs == 1;
    Vec<T> residual[kVecs];
    Vec<T> weight[kVecs];
  };

  template <bool kAligned, int kVecs>
  __device__ __forceinline__ static Early<kVecs> load_early(const Params& p, int64_t row,
                                                            const int (&columns)[kVecs]) {
    Early<kVecs> early = {};
    if constexpr (Early<kVecs>::kLoads) {
      early.residual[0] = load_residual<kAligned>(p, row, columns[0]);
      early.weight[0] = load_weight<kAligned>(p, columns[0]);
    }
    return early;
  }

  template <bool kAligned, int kVecs>
  __device__ __forceinline__ void finish_row(const Params& p, int64_t row,
                                             const int (&columns)[kVecs],
                                             const Vec<T> (&sums)[kVecs],
                                             const Early<kVecs>& early) {
    const int64_t start = row * p.columns;
    Vec<T> y[kVecs];
    {
      float x[kVecs][kSize];
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const RmsNormElements<T, true> elements(
            sums[i],
            Early<kVecs>::kLoads ? early.residual[i] : load_residual<kAligned>(p, row, columns[i]));
        squares += elements.sum_of_squares();
#pragma unroll
        for (int k = 0; k < kSize; ++k) x[i][k] = elements.x[k];
        store_row<kAligned>(p.residual_out, start, columns[i], pack<T>(x[i]), p);
      }
      const float rstd = rsqrtf(reducer_.sum(squares) * p.inverse_hidden + p.eps);
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        float w[kSize];
        unpack(Early<kVecs>::kLoads ? early.weight[i] : load_weight<kAligned>(p, columns[i]), w);
#pragma unroll
        for (int k = 0; k < kSize; ++k) x[i][k] = x[i][k] * rstd * (w[k] + p.weight_bias);
        y[i] = pack<T>(x[i]);
        store_row<kAligned>(p.norm_out, start, columns[i], y[i], p);
      }
    }
    if constexpr (sizeof(T) == 2) {
      if (p.mode != QuantMode::none) quantize<kAligned>(p, row, columns, y);
    }
  }

 private:
  template <bool kAligned>
  __device__ __forceinline__ static Vec<T> load_residual(const Params& p, int64_t row, int column) {
    return load_if<kAligned>(static_cast<const T*>(p.residual) + row * p.columns + column,
                             p.columns - column);
  }

  template <bool kAligned>
  __device__ __forceinline__ static Vec<T> load_weight(const Params& p, int column) {
    return load_if<kAligned>(static_cast<const T*>(p.weight) + column, p.columns - column);
  }

  template <bool kAligned>
  __device__ __forceinline__ static void store_row(void* target, int64_t start, int column,
                                                   Vec<T> vec, const Params& p) {
    if (target == nullptr || column >= p.columns) return;
    store<kAligned>(static_cast<T*>(target) + start + column, vec, p.columns - column);
  }

  // All threads of the row call it.
  template <bool kAligned, int kVecs>
  __device__ __forceinline__ void quantize(const Params& p, int64_t row,
                                           const int (&columns)[kVecs], const Vec<T> (&y)[kVecs]) {
    constexpr float kMinScale = 1e-10f;
    QuantScale scale = {};
    if (p.mode == QuantMode::tensor) {
      scale.reciprocal = 1.0f / load_scalar(p.scale);
    } else if (p.mode == QuantMode::token) {
      uint32_t most = 0u;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) most = max(most, amax_bits(y[i]));
      scale = quant_scale<e4m3>(reducer_.max(most), kMinScale, ScaleFormat::numbers);
      if (columns[0] == 0) {
        store_scale(p.scales, ScaleFormat::numbers, row, 0u, 0, 1u, scale);
      }
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (p.mode == QuantMode::group) {
        const int lanes = p.group_size / kSize;
        const uint32_t most = warp_max(amax_bits(y[i]), lanes);
        scale = quant_scale<e4m3>(most, kMinScale * CodeRange<e4m3>::kMax, ScaleFormat::exponents);
        if (columns[i] < p.columns && threadIdx.x % lanes == 0) {
          store_scale(p.scales, ScaleFormat::exponents, row, columns[i] / p.group_size,
                      p.scale_stride, p.columns / p.group_size, scale);
        }
      }
      const int64_t left = p.columns - columns[i];
      if (left <= 0) continue;
      float x[8];
      unpack(y[i], x);
      e4m3* target = static_cast<e4m3*>(p.quant_out) + row * p.columns + columns[i];
      store_codes<e4m3, kAligned>(target, x, scale.reciprocal, left);
    }
  }

  RowReducer reducer_;
};

#endif  // __CUDACC__

}  // namespace precast
