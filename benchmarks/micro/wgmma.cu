// SPDX-License-Identifier: Apache-2.0
// The rate of wgmma, alone and beside other work of the same SM: the TMA copies that attention and
// GEMMs fill their next buffers with, or the exponentials of another warpgroup. A round is four
// instructions, 128 bytes of k. Operands are whatever the pool holds, which sets the power.
#include <type_traits>

#include "micro.cuh"
#include "precast/core/math.cuh"
#include "precast/core/sm90/warpgroup.cuh"
#include "precast/core/sm90/wgmma.cuh"

namespace micro {
namespace {

constexpr int kSteps = 4, kStepBytes = 32;  // of a round
constexpr int kFillStages = 2;
constexpr int kMostWarpgroups = 3;

struct MmaParams {
  TensorMap map;              // of boxes of kTileRows
  const unsigned char* pool;  // [rows, kRowBytes]
  uint32_t rows;
  int rounds;         // of wgmma
  int beside;         // rounds of the other warpgroup; or the clocks from copy to copy, -1: none
  int warpgroups;     // that issue wgmma
  long long* clocks;  // [ctas, roles]
  float* sink;        // is not written
};

__device__ __forceinline__ void fill_operands(const MmaParams& p, unsigned char* smem, int bytes) {
  for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) {
    *reinterpret_cast<uint4*>(smem + i) = *reinterpret_cast<const uint4*>(p.pool + i);
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  fence_shared_for_async();
#endif
  __syncthreads();
}

// Word `i` of this thread, of which nothing is known at compile time.
template <typename Word>
__device__ __forceinline__ Word word_of(const MmaParams& p, int i) {
  return reinterpret_cast<const Word*>(p.pool)[i * blockDim.x + threadIdx.x];
}

template <int kCount>
__device__ __forceinline__ void keep(const MmaParams& p, const float (&x)[kCount]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += x[i];
  if (sum == 0.12345f) *p.sink = sum;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Issues the rounds of a warpgroup. kNew: each round is a new D, which is then added to another
// accumulator, as FP8 needs it. Returns the clocks.
template <typename T, int kColumns, bool kNew, bool kARegisters>
__device__ __forceinline__ long long issue_rounds(const MmaParams& p, uint32_t a, uint32_t b) {
  using Mma = Wgmma<T, kColumns>;
  constexpr int kCount = kColumns / 2, kSums = kCount < 64 ? kCount : 64;
  const uint64_t a_descriptor = wgmma_descriptor(a, 1024), b_descriptor = wgmma_descriptor(b, 1024);
  uint32_t a_words[kSteps][4];
#pragma unroll
  for (int i = 0; i < kSteps * 4; ++i) a_words[i / 4][i % 4] = word_of<uint32_t>(p, i);
  float d[kCount] = {}, sums[kSums] = {};
  const long long begin = clock64();
  for (int round = 0; round < p.rounds; ++round) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t b_step = b_descriptor + (step * kStepBytes >> 4);
      const uint64_t a_step = a_descriptor + (step * kStepBytes >> 4);
      if constexpr (kARegisters && kNew) {
        step == 0 ? Mma::template new_rs<false>(d, a_words[step], b_step)
                  : Mma::template add_rs<false>(d, a_words[step], b_step);
      } else if constexpr (kARegisters) {
        Mma::template add_rs<false>(d, a_words[step], b_step);
      } else if constexpr (kNew) {
        step == 0 ? Mma::template new_ss<false>(d, a_step, b_step)
                  : Mma::template add_ss<false>(d, a_step, b_step);
      } else {
        Mma::template add_ss<false>(d, a_step, b_step);
      }
    }
    wgmma_commit_group();
    wgmma_wait_group<kNew ? 0 : 1>();
    if constexpr (kNew) {
      keep_behind_wait(d);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i % kSums] += d[i];
    }
  }
  wgmma_wait_group<0>();
  keep_behind_wait(d);
  const long long clocks = clock64() - begin;
  keep(p, d);
  keep(p, sums);
  return clocks;
}

// Copies tiles until `is_done`, one each `p.beside` clocks at the most. One thread calls it. Writes
// its clocks and the tiles.
__device__ __forceinline__ void fill_until(const MmaParams& p, uint32_t target, uint64_t* full,
                                           const volatile int& is_done, long long* out) {
  const long long begin = clock64();
  int tile = 0;
  for (; !is_done; ++tile) {
    const int stage = tile % kFillStages, round = tile / kFillStages;
    if (round > 0) mbarrier_wait_parity(&full[stage], (round - 1) % 2, "a tile");
    while (clock64() - begin < static_cast<long long>(tile) * p.beside) continue;
    const uint32_t row = random_place(tile, p.rows / kTileRows) * kTileRows;
    mbarrier_arrive_expect_tx(&full[stage], kTileBytes);
    copy_box(target + stage * kTileBytes, &p.map, &full[stage], 0, static_cast<int>(row), 0, 0);
  }
  out[0] = clock64() - begin;
  out[1] = tile;
  for (int last = max(0, tile - kFillStages); last < tile; ++last) {
    mbarrier_wait_parity(&full[last % kFillStages], last / kFillStages % 2, "the last tiles");
  }
}
#endif

// Some warpgroups that issue wgmma, and behind the most of them one that fills other buffers.
// Roles: each warpgroup up to three, the clocks of the fill, and its tiles.
template <int kColumns, bool kNew>
constexpr int kWarpgroups = kColumns > 128 || kNew ? 2 : kMostWarpgroups;

template <typename T, int kColumns, bool kNew, bool kARegisters>
__global__ __launch_bounds__((kWarpgroups<kColumns, kNew> + 1) * kWarpgroupSize,
                             1) void MmaKernel(const __grid_constant__ MmaParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kMost = kWarpgroups<kColumns, kNew>;
  constexpr int kABytes = 64 * kPanelBytes, kBBytes = kColumns * kPanelBytes;
  constexpr int kOperands = kMostWarpgroups * kABytes + kBBytes;
  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* const fill = smem + kOperands;
  uint64_t* const full = reinterpret_cast<uint64_t*>(fill + kFillStages * kTileBytes);
  volatile int& is_done = *reinterpret_cast<volatile int*>(full + kFillStages);
  long long* const clocks = p.clocks + blockIdx.x * (kMostWarpgroups + 2);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kFillStages; ++i) mbarrier_init(&full[i]);
    fence_mbarrier_init();
    is_done = 0;
  }
  fill_operands(p, smem, kOperands);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupSize, 0);
  if (warpgroup == kMost) {
    decrease_registers<kMost == 2 ? 40 : 32>();
    if (p.beside >= 0 && threadIdx.x % kWarpgroupSize == 0) {
      fill_until(p, shared_address(fill), full, is_done, clocks + kMostWarpgroups);
    }
    return;
  }
  if (warpgroup >= p.warpgroups) return;
  increase_registers<kMost == 2 ? 232 : 160>();
  const uint32_t a = shared_address(smem);
  const long long taken = issue_rounds<T, kColumns, kNew, kARegisters>(
      p, a + warpgroup * kABytes, a + kMostWarpgroups * kABytes);
  if (threadIdx.x % kWarpgroupSize == 0) clocks[warpgroup] = taken;
  is_done = 1;
#endif
}

// One warpgroup issues wgmma while another computes. kIsSoftmax: beside exp2, what the softmax of
// attention does with each score. A round has 32 scores a thread. Roles: wgmma, exp2.
constexpr int kScores = 32, kBesideColumns = 128;
constexpr int kBesideShared = (64 + kBesideColumns) * kPanelBytes;

template <bool kIsSoftmax>
__device__ __forceinline__ long long exponentials(const MmaParams& p) {
  float x[kScores], sum = 0.0f;
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kScores; ++i) x[i] = word_of<float>(p, i);
  const float scale = -fabsf(x[0]), offset = x[1];  // so that x stays finite
  const long long begin = clock64();
  for (int round = 0; round < p.beside; ++round) {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      if constexpr (kIsSoftmax) {
        x[i] = fast_exp2(fmaf(x[i], scale, offset));
        x[i + 1] = fast_exp2(fmaf(x[i + 1], scale, offset));
        sum += x[i];
        sum += x[i + 1];
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[i], x[i + 1]);
        packed ^= reinterpret_cast<const uint32_t&>(pair);
      } else {
        x[i] = fast_exp2(-x[i]);
        x[i + 1] = fast_exp2(-x[i + 1]);
      }
    }
  }
  const long long clocks = clock64() - begin;
  keep(p, x);
  if (packed == 0x12345u || sum == 0.12345f) *p.sink = sum;
  return clocks;
}

template <bool kARegisters, bool kIsSoftmax>
__global__ __launch_bounds__(2 * kWarpgroupSize,
                             1) void BesideKernel(const __grid_constant__ MmaParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  fill_operands(p, smem, kBesideShared);
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupSize, 0);
  const uint32_t a = shared_address(smem);
  long long taken;
  if (role == 0) {
    taken = issue_rounds<bf16, kBesideColumns, false, kARegisters>(p, a, a + 64 * kPanelBytes);
  } else {
    taken = exponentials<kIsSoftmax>(p);
  }
  if (threadIdx.x % kWarpgroupSize == 0) p.clocks[blockIdx.x * 2 + role] = taken;
#endif
}

MmaParams params_of(const TensorView& pool, const TensorView& clocks, int64_t rounds,
                    int64_t beside) {
  MmaParams params = {};
  params.map = pool_map(pool, kTileRows);
  params.pool = static_cast<const unsigned char*>(pool.data_ptr());
  params.rows = static_cast<uint32_t>(pool.size(0));
  params.rounds = static_cast<int>(rounds);
  params.beside = static_cast<int>(beside);
  params.clocks = clocks_of(clocks);
  params.sink = static_cast<float*>(pool.data_ptr());
  return params;
}

struct MmaLaunch {
  void (*kernel)(MmaParams) = nullptr;
  int threads = 0;
};

template <typename T, int kColumns, bool kNew>
MmaLaunch launch_of(bool a_registers) {
  constexpr int kThreads = (kWarpgroups<kColumns, kNew> + 1) * kWarpgroupSize;
  if (!a_registers) return {MmaKernel<T, kColumns, kNew, false>, kThreads};
  // No kernel has A in registers beside other numbers of columns.
  if constexpr (kColumns == 64 || kColumns == 128 || kColumns == 256) {
    return {MmaKernel<T, kColumns, kNew, true>, kThreads};
  }
  return {};
}

template <int kColumns>
MmaLaunch fp8_launch_of(bool is_new, bool a_registers) {
  return is_new ? launch_of<e4m3, kColumns, true>(a_registers)
                : launch_of<e4m3, kColumns, false>(a_registers);
}

MmaLaunch launch_of(bool is_fp8, int64_t columns, bool is_new, bool a_registers) {
  if (!is_fp8) {
    return columns == 128 && !is_new ? launch_of<bf16, 128, false>(a_registers) : MmaLaunch{};
  }
  switch (columns) {
    case 8:
      return fp8_launch_of<8>(is_new, a_registers);
    case 16:
      return fp8_launch_of<16>(is_new, a_registers);
    case 32:
      return fp8_launch_of<32>(is_new, a_registers);
    case 64:
      return fp8_launch_of<64>(is_new, a_registers);
    case 96:
      return fp8_launch_of<96>(is_new, a_registers);
    case 128:
      return fp8_launch_of<128>(is_new, a_registers);
    case 160:
      return fp8_launch_of<160>(is_new, a_registers);
    case 192:
      return fp8_launch_of<192>(is_new, a_registers);
    case 256:
      return fp8_launch_of<256>(is_new, a_registers);
    default:
      return {};
  }
}

// pool [rows, 256 bytes] in bf16 or e4m3, clocks [ctas, 5].
void wgmma_rate(TensorView pool, TensorView clocks, int64_t columns, bool is_new, bool a_registers,
                int64_t warpgroups, int64_t rounds, int64_t fill_clocks) {
  MmaParams params = params_of(pool, clocks, rounds, fill_clocks);
  params.warpgroups = static_cast<int>(warpgroups);
  const MmaLaunch launch = launch_of(pool.dtype().bits == 8, columns, is_new, a_registers);
  if (launch.threads < (params.warpgroups + 1) * kWarpgroupSize) {
    TVM_FFI_THROW(ValueError) << "wgmma_rate: no such instance";
  }
  const int operands = (kMostWarpgroups * 64 + static_cast<int>(columns)) * kPanelBytes;
  const int shared = operands + kFillStages * (kTileBytes + 8) + 8;
  launch_on_all(launch.kernel, launch.threads, shared, clocks, params);
}

// pool [rows, 256 bytes] in bf16, clocks [ctas, 2].
void wgmma_beside_exp(TensorView pool, TensorView clocks, bool a_registers, bool is_softmax,
                      int64_t rounds, int64_t exp_rounds) {
  const auto kernel = a_registers
                          ? (is_softmax ? BesideKernel<true, true> : BesideKernel<true, false>)
                          : (is_softmax ? BesideKernel<false, true> : BesideKernel<false, false>);
  launch_on_all(kernel, 2 * kWarpgroupSize, kBesideShared, clocks,
                params_of(pool, clocks, rounds, exp_rounds));
}

}  // namespace
}  // namespace micro

TVM_FFI_DLL_EXPORT_TYPED_FUNC(wgmma_rate, micro::wgmma_rate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wgmma_beside_exp, micro::wgmma_beside_exp);
