// SPDX-License-Identifier: Apache-2.0
// All-reduce of registered buffers, which each GPU reads where they are.
//
//   out[i] = round(sum_k input_k[i])    over the ranks k = 0, 1, ... in this order, in fp32
//
// Every rank has the same bits.
//
// Layout   inputs   one buffer a rank, of 16-byte vectors. Their addresses, as this rank sees
//                   them, are a row of a table in device memory: a captured launch knows the row
//                   before its peers' addresses are known.
//          out      [vecs] vectors, in this rank's own memory
//          signals  each rank's BarrierSignals (comm/peer_barrier.cuh); `scratch_offset` bytes
//                   behind their start is the memory for the sums of two-shot, ceil(vecs / world)
//                   vectors
// Threads  a thread takes the vectors `threads of the grid` apart. CTA b of a rank exchanges data
//          with the CTAs b of its peers alone, so a barrier between these is enough.
//          one-shot  barrier; each rank reads all inputs and adds; barrier, after which the inputs
//                    may be overwritten
//          two-shot  barrier; rank r adds part r of all inputs into its scratch; barrier; each rank
//                    reads the parts
// Traffic  over the links, in each direction: one-shot (world - 1) n bytes, two-shot
//          2 (world - 1) / world n
// Source   the reduce-scatter and all-gather of Thakur, Rabenseifner and Gropp, Optimization of
//          Collective Communication Operations in MPICH, 2005; reading registered buffers of peers
//          from one kernel as in vLLM's custom all-reduce (Apache-2.0), whose interface this serves
#pragma once

#include "precast/comm/peer_barrier.cuh"
#include "precast/core/launch.cuh"

namespace precast {

struct CustomAllReduceParams {
  BarrierSignals* signals[kMaxWorld];
  const void* const* inputs;  // [world], on the device: the buffer of each rank
  const void* source;         // null, or what is first copied to this rank's buffer
  void* registered;           // this rank's buffer, if there is a source
  void* out;
  int64_t scratch_offset;
  uint32_t vecs;
  int rank;
  WaitLimit limit;
};

constexpr int kCustomAllReduceThreads = 512;

#if defined(__CUDACC__)

// Adds the vectors of all ranks in their order.
template <typename T, int kWorld>
__device__ __forceinline__ Vec<T> sum_of_ranks(const Vec<T> (&vecs)[kWorld]) {
  constexpr int kSize = Vec<T>::kSize;
  float sum[kSize], x[kSize];
  unpack(vecs[0], sum);
#pragma unroll
  for (int k = 1; k < kWorld; ++k) {
    unpack(vecs[k], x);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] += x[i];
  }
  return pack<T>(sum);
}

// Calls visit(i, stride) for each kUnroll of this thread's share of [0, count): i, i + stride, ...
template <int kUnroll, typename Visit>
__device__ __forceinline__ void for_each_share(uint32_t count, const Visit& visit) {
  const uint32_t stride = gridDim.x * blockDim.x;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += kUnroll * stride) {
    visit(i, stride);
  }
}

constexpr int kCopyUnroll = 4;

template <typename T, int kWorld, bool kTwoShot>
__global__ __launch_bounds__(kCustomAllReduceThreads, 1) void CustomAllReduceKernel(
    const __grid_constant__ CustomAllReduceParams p) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr int kUnroll = 8 / kWorld > 0 ? 8 / kWorld : 1;
  constexpr int kParts = kTwoShot ? kWorld : 1;
  PeerBarrier barrier(p.signals, p.rank, kWorld, p.limit);
  const uint32_t part = (p.vecs + kParts - 1) / kParts;
  const auto size_of = [&](int k) {  // of part k; the last ones may be shorter, or empty
    const uint32_t begin = k * part;
    return begin >= p.vecs ? 0u : p.vecs - begin < part ? p.vecs - begin : part;
  };
  const T* inputs[kWorld];  // this rank's part of each buffer; loaded while peers start
#pragma unroll
  for (int k = 0; k < kWorld; ++k) {
    inputs[k] =
        static_cast<const T*>(p.inputs[k]) + (kTwoShot ? int64_t(p.rank) * part : 0) * kSize;
  }
  T* out = static_cast<T*>(p.out);

  if (p.source != nullptr) {
    // Part by part, so that the CTAs b of the peers read what this CTA has copied.
    for (int k = 0; k < kParts; ++k) {
      const T* from = static_cast<const T*>(p.source) + int64_t(k) * part * kSize;
      T* to = static_cast<T*>(p.registered) + int64_t(k) * part * kSize;
      const uint32_t count = size_of(k);
      for_each_share<kCopyUnroll>(count, [&](uint32_t first, uint32_t stride) {
        Vec<T> vecs[kCopyUnroll];
#pragma unroll
        for (int u = 0; u < kCopyUnroll; ++u) {
          if (count - first > u * stride) {
            vecs[u] = load_vec(from + int64_t(first + u * stride) * kSize);
          }
        }
#pragma unroll
        for (int u = 0; u < kCopyUnroll; ++u) {
          if (count - first > u * stride) {
            store_vec_system(to + int64_t(first + u * stride) * kSize, vecs[u]);
          }
        }
      });
    }
    barrier.wait<true>();
  } else {
    barrier.wait<false>();
  }

  const auto scratch_of = [&](int rank) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(p.signals[rank]) + p.scratch_offset);
  };
  T* sums = kTwoShot ? scratch_of(p.rank) : out;
  const uint32_t count = size_of(kTwoShot ? p.rank : 0);
  for_each_share<kUnroll>(count, [&](uint32_t first, uint32_t stride) {
    Vec<T> vecs[kUnroll][kWorld];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (count - first <= u * stride) break;
#pragma unroll
      for (int k = 0; k < kWorld; ++k) {
        vecs[u][k] = load_vec_system(inputs[k] + int64_t(first + u * stride) * kSize);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (count - first <= u * stride) break;
      store_vec(sums + int64_t(first + u * stride) * kSize, sum_of_ranks<T, kWorld>(vecs[u]));
    }
  });

  if constexpr (!kTwoShot) {
    // Peers may overwrite their inputs when this rank has read them. Why no release: nothing that
    // this rank wrote is for its peers, and it stores no sum before it has what it adds.
    barrier.wait<false>();
  } else {
    barrier.wait<true>();  // That, and the sums are there.
    for_each_share<1>(part, [&](uint32_t i, uint32_t) {
      Vec<T> parts[kWorld];
#pragma unroll
      for (int k = 0; k < kWorld; ++k) {
        if (i < size_of(k)) parts[k] = load_vec_system(scratch_of(k) + int64_t(i) * kSize);
      }
#pragma unroll
      for (int k = 0; k < kWorld; ++k) {
        if (i < size_of(k)) store_vec(out + (int64_t(k) * part + i) * kSize, parts[k]);
      }
    });
  }
  barrier.finish();
}

#if !defined(__CUDACC_RTC__)

// Above these bytes, a copy by the whole GPU and a second launch take less time than a copy by the
// CTAs of the all-reduce.
constexpr int64_t kCopyBytes = 512 << 10;

// Launches the all-reduce of `world` ranks on `stream` with at most `ctas` CTAs, at most
// kMaxBarrierCtas; all ranks must pass the same numbers. Returns cudaErrorInvalidValue for another
// world than 2, 4, 6 and 8.
template <typename T>
cudaError_t launch_custom_all_reduce(CustomAllReduceParams p, int world, bool two_shot, int ctas,
                                     cudaStream_t stream) {
  const int64_t bytes = int64_t(p.vecs) * kVecBytes;
  if (p.source != nullptr && bytes > kCopyBytes) {
    const cudaError_t status = cudaMemcpyAsync(p.registered, p.source, static_cast<size_t>(bytes),
                                               cudaMemcpyDeviceToDevice, stream);
    if (status != cudaSuccess) return status;
    p.source = nullptr;
  }
  const uint32_t work = two_shot ? (p.vecs + world - 1) / world : p.vecs;
  const uint32_t needed = (work + kCustomAllReduceThreads - 1) / kCustomAllReduceThreads;
  const dim3 grid(needed < static_cast<uint32_t>(ctas) ? needed : static_cast<uint32_t>(ctas));
  const auto run = [&](void (*one)(CustomAllReduceParams), void (*two)(CustomAllReduceParams)) {
    return launch(two_shot ? two : one, grid, dim3(kCustomAllReduceThreads), false, stream, p);
  };
  switch (world) {
    case 2:
      return run(CustomAllReduceKernel<T, 2, false>, CustomAllReduceKernel<T, 2, true>);
    case 4:
      return run(CustomAllReduceKernel<T, 4, false>, CustomAllReduceKernel<T, 4, true>);
    case 6:
      return run(CustomAllReduceKernel<T, 6, false>, CustomAllReduceKernel<T, 6, true>);
    case 8:
      return run(CustomAllReduceKernel<T, 8, false>, CustomAllReduceKernel<T, 8, true>);
    default:
      return cudaErrorInvalidValue;
  }
}

#endif

#endif  // __CUDACC__

}  // namespace precast
