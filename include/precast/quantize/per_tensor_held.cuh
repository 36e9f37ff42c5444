// SPDX-License-Identifier: Apache-2.0
// Quantisation of a whole tensor in one kernel whose CTAs stay until its largest number is known,
// and keep what they can of it: see quantize/per_tensor.cuh.
//
// Threads  two CTAs a multiprocessor walk the tensor in rounds of one vector a thread. The last
//          rounds are held in shared memory, those before them in L2, as far as they fit; behind a
//          barrier of the grid the rest is read again.
#pragma once

#include "precast/quantize/cooperative.cuh"
#include "precast/quantize/per_tensor_item.cuh"

namespace precast {

constexpr int kHeldCtas = 2;  // a multiprocessor

#if defined(__CUDACC__)

// For what is not read again.
__device__ __forceinline__ L2Policy drop_policy() {
  uint64_t bits;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(bits));
  return L2Policy{bits};
}

template <typename T, typename Q, TensorAccess kAccess>
__global__ __launch_bounds__(kTensorThreads, kHeldCtas) void HeldTensorQuantKernel(
    const __grid_constant__ TensorQuantParams p) {
  constexpr int kUnroll = kTensorUnroll;
  using Item = TensorItem<T, Q, kAccess>;
  extern __shared__ uint4 held[];  // [held_rounds, kTensorThreads]
  const uint32_t step = gridDim.x * kTensorThreads;
  const uint32_t first = blockIdx.x * kTensorThreads + threadIdx.x;
  const int rounds = static_cast<int>((p.items.count - 1) / step + 1);
  const int held_rounds = min(rounds, p.held_rounds);  // of them the last may be partial
  const int read_rounds = rounds - held_rounds;        // are read twice
  const int l2_round = max(0, read_rounds - static_cast<int>(p.l2_items / step));
  const auto item_of = [&](int round) { return uint64_t(step) * uint32_t(round) + first; };

  allow_next_grid();
  wait_for_previous_grid();

  const L2Policy passing = drop_policy(), staying = read_policy(true);
  uint32_t amax = 0u;
  for (int round = 0; round < held_rounds; round += kUnroll) {
    QuantVec<T, false> vecs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint64_t item = item_of(read_rounds + round + i);
      vecs[i].clear();
      if (round + i < held_rounds && item < p.items.count) {
        vecs[i] = Item(p, static_cast<uint32_t>(item)).load(passing);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      amax = max(amax, vecs[i].amax());
      if (round + i < held_rounds) {
        held[(round + i) * kTensorThreads + threadIdx.x] = vecs[i].loaded.bits;
      }
    }
  }
  for (int round = 0; round < read_rounds; round += kUnroll) {
    const L2Policy policy = round < l2_round ? passing : staying;
    QuantVec<T, false> vecs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      vecs[i].clear();
      if (round + i < read_rounds) {
        vecs[i] = Item(p, static_cast<uint32_t>(item_of(round + i))).load(policy);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) amax = max(amax, vecs[i].amax());
  }
  __shared__ uint32_t scratch[2][kMaxWarps];
  amax = block_max(amax, scratch[0]);
  if (threadIdx.x == 0) store_amax(p, amax);
  grid_barrier();
  const QuantScale scale = quant_scale<Q>(load_amax(p, scratch[1]), p.eps, ScaleFormat::numbers);

  // Backwards. The held rounds are spread over the others, so that reads and writes mix.
  const int turns = (read_rounds + kUnroll - 1) / kUnroll;
  const int held_per_turn = turns > 0 ? (held_rounds + turns - 1) / turns : held_rounds;
  int next_held = 0;
  const auto store_held = [&](int count) {
    const int end = min(held_rounds, next_held + count);
    for (; next_held < end; ++next_held) {
      const uint64_t item = item_of(read_rounds + next_held);
      if (item >= p.items.count) continue;
      QuantVec<T, false> vec;
      vec.loaded.bits = held[next_held * kTensorThreads + threadIdx.x];
      Item(p, static_cast<uint32_t>(item)).store(vec, scale.reciprocal);
    }
  };
  for (int round = read_rounds - 1; round >= 0; round -= kUnroll) {
    const L2Policy policy = round < l2_round ? staying : passing;
    QuantVec<T, false> vecs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (round >= i) vecs[i] = Item(p, static_cast<uint32_t>(item_of(round - i))).load(policy);
    }
    store_held(held_per_turn);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (round >= i) {
        Item(p, static_cast<uint32_t>(item_of(round - i))).store(vecs[i], scale.reciprocal);
      }
    }
  }
  store_held(held_rounds);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_scale(p.scale, ScaleFormat::numbers, 0, 0, 0, 1, scale);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches on `stream`. cudaErrorCooperativeLaunchTooLarge, no longer pending, if the device cannot
// hold all CTAs. `kernel` is a HeldTensorQuantKernel.
inline cudaError_t launch_held_tensor_quant(void (*kernel)(TensorQuantParams), TensorQuantParams p,
                                            bool enable_pdl, cudaStream_t stream) {
  int device = 0, sms = 0, smem = 0, l2 = 0;
  cudaError_t status = cudaGetDevice(&device);
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(value, attribute, device);
  };
  read(&sms, cudaDevAttrMultiProcessorCount);
  read(&smem, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  read(&l2, cudaDevAttrL2CacheSize);
  if (status != cudaSuccess) return status;
  constexpr int kRoundBytes = kTensorThreads * kVecBytes;
  // Why not all: loads on their way need L1, which is what shared memory leaves. On H200 13 rounds
  // take 3 % longer than 12.
  constexpr int kLeftToL1 = 32 << 10;
  constexpr int kOtherSmem = 2048;  // a CTA: what it declares and the system's
  p.held_rounds = ((smem - kLeftToL1) / kHeldCtas - kOtherSmem) / kRoundBytes;
  p.l2_items = static_cast<uint32_t>(l2 / 2 / kVecBytes);
  p.amax_ctas =
      static_cast<uint32_t>(sms * kHeldCtas < kTensorCtas ? sms * kHeldCtas : kTensorCtas);
  return launch_cooperative(kernel, dim3(p.amax_ctas), dim3(kTensorThreads),
                            p.held_rounds * kRoundBytes, enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
