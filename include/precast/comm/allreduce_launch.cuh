// SPDX-License-Identifier: Apache-2.0
// The launches of an all-reduce.
//
// A message that does not fit the receive buffer goes in several launches, each a round of its own.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <atomic>
#endif

#include "precast/comm/allreduce_norm.cuh"

namespace precast {

struct AllReduceOptions {
  AllReduceStrategy strategy;
  AllReduceTuning tuning;
  int64_t one_shot_bytes;  // automatic: the largest message in one phase; -1 for the default
  bool checks_signatures;  // debug
  bool enable_pdl;
};

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

// CTAs of a cluster at most: 1 on targets that have none.
constexpr int kMaxRowCtas = kMaxClusterSize > 1 ? 8 : 1;

// Limits a grid to half of the current GPU.
inline cudaError_t limit_ctas(int world, bool norm, bool aligned, AllReduceTuning* cut) {
  int device = 0, sms = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const int half = ctas_of_half(sms, world, norm, aligned, *cut);
  if (cut->ctas == 0 || cut->ctas > half) cut->ctas = half;
  return status;
}

template <typename Epilogue, int kWorld>
cudaError_t load_allreduce_kernels() {
  using Kernel = void (*)(typename Epilogue::Params);
  for (const Kernel kernel : {Kernel(AllReduceAnyKernel<Epilogue, kWorld>),
                              Kernel(allreduce_kernel<Epilogue, kWorld, 1>(false)),
                              Kernel(allreduce_kernel<Epilogue, kWorld, 1>(true)),
                              Kernel(allreduce_kernel<Epilogue, kWorld, 2>(false)),
                              Kernel(allreduce_kernel<Epilogue, kWorld, 2>(true))}) {
    cudaFuncAttributes unused;
    const cudaError_t status = cudaFuncGetAttributes(&unused, kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Loads all kernels of T on the current GPU, at the first call there. Why: CUDA loads a kernel when
// it is needed first, and may wait for the GPU to do that. If a kernel that waits for a peer runs
// then, on another stream, and the peer's host does the same, both wait for ever.
template <typename T, int kWorld>
cudaError_t load_allreduce_kernels_once() {
  static std::atomic<uint64_t> loaded{0};  // a bit for each GPU
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const uint64_t bit = uint64_t(1) << (device % 64);
  if (loaded.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  status = load_allreduce_kernels<StoreEpilogue<T>, kWorld>();
  if (status == cudaSuccess) status = load_allreduce_kernels<NormEpilogue<T>, kWorld>();
  if (status == cudaSuccess) loaded.fetch_or(bit, std::memory_order_relaxed);
  return status;
}

// What all ranks must agree on; never 0.
inline uint32_t launch_signature(const AllReduceParams& p, int kind) {
  uint64_t hash = 0x9e3779b97f4a7c15u;
  for (const int64_t x :
       {p.count, int64_t(p.columns), p.rows, int64_t(p.two_shot), int64_t(kind)}) {
    hash = (hash ^ static_cast<uint64_t>(x)) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 33;
  }
  return static_cast<uint32_t>(hash) | 1u;
}

// Reduces `p.count` elements of any shape.
template <typename T, int kWorld>
cudaError_t launch_allreduce(AllReduceParams p, const AllReduceOptions& options,
                             cudaStream_t stream) {
  constexpr int kSize = Vec<T>::kSize;
  cudaError_t status = load_allreduce_kernels_once<T, kWorld>();
  if (status != cudaSuccess) return status;
  p.two_shot =
      !is_one_shot(kWorld, p.count * int64_t(sizeof(T)), options.strategy, options.one_shot_bytes);
  const T* input = static_cast<const T*>(p.input);
  T* output = static_cast<T*>(p.output);
  for (int64_t left = p.count; left > 0;) {
    AllReduceTuning cut = options.tuning;
    cut_plain((left + kSize - 1) / kSize, kWorld, p.two_shot, &cut);
    status = limit_ctas(kWorld, false, p.aligned, &cut);
    if (status != cudaSuccess) return status;
    p.row_vecs = cut.threads * cut.vecs;
    p.columns = p.row_vecs * kSize;
    const int64_t most = rows_of_round(kWorld, p.two_shot, p.row_vecs, p.region_bytes) * p.columns;
    if (most == 0) return cudaErrorInvalidValue;
    p.count = left < most ? left : most;
    p.rows = (p.count + p.columns - 1) / p.columns;
    p.input = input;
    p.output = output;
    p.signature = options.checks_signatures ? launch_signature(p, 0) : 0u;
    status = launch_allreduce_rows<StoreEpilogue<T>, kWorld>(p, cut, options.enable_pdl, stream);
    if (status != cudaSuccess) return status;
    input += p.count;
    output += p.count;
    left -= p.count;
  }
  return cudaSuccess;
}

template <typename T>
T* rows_further(T* pointer, int64_t bytes) {
  return pointer == nullptr ? nullptr
                            : reinterpret_cast<T*>(reinterpret_cast<intptr_t>(pointer) + bytes);
}

// Reduces `p.rows` rows of `p.columns`, and does what follows.
template <typename T, int kWorld>
cudaError_t launch_allreduce_norm(AllReduceNormParams p, const AllReduceOptions& options,
                                  cudaStream_t stream) {
  constexpr int kSize = Vec<T>::kSize;
  cudaError_t status = load_allreduce_kernels_once<T, kWorld>();
  if (status != cudaSuccess) return status;
  p.row_vecs = ceil_div(p.columns, kSize);
  p.inverse_hidden = 1.0f / static_cast<float>(p.columns);
  p.two_shot = !is_one_shot(kWorld, p.rows * p.columns * int64_t(sizeof(T)), options.strategy,
                            options.one_shot_bytes);
  const int64_t most = rows_of_round(kWorld, p.two_shot, p.row_vecs, p.region_bytes);
  if (most == 0) return cudaErrorInvalidValue;
  for (int64_t left = p.rows; left > 0;) {
    p.rows = left < most ? left : most;
    p.count = p.rows * p.columns;
    AllReduceTuning cut = options.tuning;
    if (!cut_rows(p.rows, p.row_vecs, kWorld, kMaxRowCtas, &cut)) {
      return cudaErrorInvalidConfiguration;
    }
    status = limit_ctas(kWorld, true, p.aligned, &cut);
    if (status != cudaSuccess) return status;
    const int kind = 1 + static_cast<int>(p.mode);
    p.signature = options.checks_signatures ? launch_signature(p, kind) : 0u;
    status = launch_allreduce_rows<NormEpilogue<T>, kWorld>(p, cut, options.enable_pdl, stream);
    if (status != cudaSuccess) return status;
    const int64_t bytes = p.count * int64_t(sizeof(T));
    p.input = rows_further(p.input, bytes);
    p.residual = rows_further(p.residual, bytes);
    p.residual_out = rows_further(p.residual_out, bytes);
    p.norm_out = rows_further(p.norm_out, bytes);
    p.quant_out = rows_further(p.quant_out, p.count);
    p.scales = rows_further(p.scales, p.rows * 4);  // words of a row stand `scale_stride` apart
    left -= p.rows;
  }
  return cudaSuccess;
}

#endif

}  // namespace precast
