// SPDX-License-Identifier: Apache-2.0
// Quantisation of a whole tensor by persistent CTAs: see quantize/per_tensor.cuh. They keep as much
// of the tensor as they can until its largest magnitude is known.
//
// Threads  two CTAs a multiprocessor process the tensor in rounds of one vector a thread. The last
//          rounds stay in shared memory, the rounds before them in L2 as far as they fit. After a
//          grid barrier all other rounds are read again.
#pragma once

#include "precast/quantize/cooperative.cuh"
#include "precast/quantize/per_tensor_params.cuh"

namespace precast {

constexpr int kCtasPerMultiprocessor = 2;

#if defined(__CUDACC__)

// The policy for data that is not read again.
__device__ __forceinline__ L2Policy drop_policy() {
  uint64_t bits;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(bits));
  return L2Policy{bits};
}

template <typename T, typename Q, TensorAccess kAccess>
__global__
__launch_bounds__(kTensorThreads, kCtasPerMultiprocessor) void PersistentTensorQuantKernel(
    const __grid_constant__ TensorQuantParams p) {
  constexpr int kUnroll = kTensorUnroll;
  using Item = TensorVec<T, Q, kAccess>;
  extern __shared__ uint4 smem_vecs[];  // [smem_rounds, kTensorThreads]
  const uint32_t step = gridDim.x * kTensorThreads;
  const uint32_t first = blockIdx.x * kTensorThreads + threadIdx.x;
  const int rounds = static_cast<int>((p.items.count - 1) / step + 1);
  const int smem_rounds = min(rounds, p.smem_rounds);  // the last of them may be partial
  const int read_rounds = rounds - smem_rounds;        // these rounds are read twice
  const int first_l2_round = max(0, read_rounds - static_cast<int>(p.l2_items / step));
  const auto item_index = [&](int round) { return uint64_t(step) * uint32_t(round) + first; };

  launch_dependent_grids();
  wait_on_dependent_grids();

  const L2Policy evict_first = drop_policy(), evict_last = read_policy(true);
  uint32_t amax = 0u;
  for (int round = 0; round < smem_rounds; round += kUnroll) {
    QuantVec<T, false> vecs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint64_t item = item_index(read_rounds + round + i);
      vecs[i].clear();
      if (round + i < smem_rounds && item < p.items.count) {
        vecs[i] = Item(p, static_cast<uint32_t>(item)).load(evict_first);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      amax = max(amax, vecs[i].amax());
      if (round + i < smem_rounds) {
        smem_vecs[(round + i) * kTensorThreads + threadIdx.x] = vecs[i].loaded.bits;
      }
    }
  }
  for (int round = 0; round < read_rounds; round += kUnroll) {
    const L2Policy policy = round < first_l2_round ? evict_first : evict_last;
    QuantVec<T, false> vecs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      vecs[i].clear();
      if (round + i < read_rounds) {
        vecs[i] = Item(p, static_cast<uint32_t>(item_index(round + i))).load(policy);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) amax = max(amax, vecs[i].amax());
  }
  __shared__ uint32_t scratch[2][kMaxWarps];
  amax = block_max(amax, scratch[0]);
  if (threadIdx.x == 0) store_amax(p, amax);
  grid_sync();
  const QuantScale scale = quant_scale<Q>(load_amax(p, scratch[1]), p.eps, ScaleFormat::numbers);

  // The second pass runs backwards. The rounds in shared memory are spread over the others, so that
  // reads and writes mix.
  const int num_batches = (read_rounds + kUnroll - 1) / kUnroll;
  const int smem_rounds_per_batch =
      num_batches > 0 ? (smem_rounds + num_batches - 1) / num_batches : smem_rounds;
  int next_smem_round = 0;
  const auto store_smem_rounds = [&](int count) {
    const int end = min(smem_rounds, next_smem_round + count);
    for (; next_smem_round < end; ++next_smem_round) {
      const uint64_t item = item_index(read_rounds + next_smem_round);
      if (item >= p.items.count) continue;
      QuantVec<T, false> vec;
      vec.loaded.bits = smem_vecs[next_smem_round * kTensorThreads + threadIdx.x];
      Item(p, static_cast<uint32_t>(item)).store(vec, scale.reciprocal);
    }
  };
  for (int round = read_rounds - 1; round >= 0; round -= kUnroll) {
    const L2Policy policy = round < first_l2_round ? evict_last : evict_first;
    QuantVec<T, false> vecs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (round >= i) vecs[i] = Item(p, static_cast<uint32_t>(item_index(round - i))).load(policy);
    }
    store_smem_rounds(smem_rounds_per_batch);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (round >= i) {
        Item(p, static_cast<uint32_t>(item_index(round - i))).store(vecs[i], scale.reciprocal);
      }
    }
  }
  store_smem_rounds(smem_rounds);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_scale(p.scale, ScaleFormat::numbers, 0, 0, 0, 1, scale);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches a PersistentTensorQuantKernel on `stream`. Returns cudaErrorCooperativeLaunchTooLarge,
// and clears it, if the device cannot hold all CTAs.
inline cudaError_t launch_persistent_tensor_quant(void (*kernel)(TensorQuantParams),
                                                  TensorQuantParams p, bool enable_pdl,
                                                  cudaStream_t stream) {
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
  // Why not all shared memory: loads in flight need L1, which is what remains of it. On an H200 13
  // rounds take 3 % longer than 12.
  constexpr int kL1Bytes = 32 << 10;
  constexpr int kReservedSmem = 2048;  // of a CTA: its static shared memory and that of the system
  p.smem_rounds = ((smem - kL1Bytes) / kCtasPerMultiprocessor - kReservedSmem) / kRoundBytes;
  p.l2_items = static_cast<uint32_t>(l2 / 2 / kVecBytes);
  p.amax_ctas = static_cast<uint32_t>(
      sms * kCtasPerMultiprocessor < kTensorCtas ? sms * kCtasPerMultiprocessor : kTensorCtas);
  return launch_cooperative(kernel, dim3(p.amax_ctas), dim3(kTensorThreads),
                            p.smem_rounds * kRoundBytes, enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
