// SPDX-License-Identifier: Apache-2.0
// Kernels that each call a few primitives of include/precast/core/sm90 and do nothing else.
//
//   wgmma      d = a b, or c + a b: one warpgroup, eight instructions on operands that TMA copies
//   copy_box   what one TMA copy writes to shared memory, as it lies there
//   transpose  V of attention in e4m3 as its producer transposes it
//   pipeline   a tensor through a ring of two stages: a producer warpgroup and two consumers, which
//              exchange what they read, take turns, and hold more registers than a thread has at
//              launch
#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <type_traits>

#include "precast/attention/sm90/transpose.cuh"
#include "precast/core/sm90/mbarrier.cuh"
#include "precast/core/sm90/tensor_map.cuh"
#include "precast/core/sm90/warpgroup.cuh"
#include "precast/core/sm90/wgmma.cuh"

namespace {

using namespace precast;
using tvm::ffi::TensorView;

constexpr int kPanelBytes = 128;  // a row of a panel
constexpr int kAtomRows = 8;

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorName(status);
}

DType dtype_of(const TensorView& tensor) {
  const DLDataType dtype = tensor.dtype();
  if (dtype == DLDataType{kDLBfloat, 16, 1}) return DType::bf16;
  if (dtype == DLDataType{kDLFloat, 16, 1}) return DType::f16;
  if (dtype == DLDataType{kDLFloat, 32, 1}) return DType::f32;
  if (dtype == DLDataType{kDLFloat8_e4m3fn, 8, 1}) return DType::e4m3;
  return DType::i8;
}

// Launches one CTA of a kernel on PyTorch's stream.
template <typename Params>
void launch_one(void (*kernel)(Params), int threads, int shared, const TensorView& tensor,
                const Params& params) {
  const DLDevice device = tensor.device();
  const auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "shared memory");
  kernel<<<1, threads, shared, stream>>>(params);
  check(cudaGetLastError(), "launch");
}

// -- wgmma ----------------------------------------------------------------------------------------

constexpr int kRowBytes = 256;  // of A and of B along k: eight instructions, two panels
constexpr int kStepBytes = 32;  // of one instruction

struct MmaParams {
  TensorMap a, b;
  const uint32_t* a_words;  // [64, kRowBytes / 4]  A, for A in registers
  const float* c;           // [64, N]
  float* d;                 // [64, N]
  int box_rows;             // of B: 8 for atoms of all panels, else all rows
  int panel_bytes;          // of a row of a panel of A and B
};

template <int kColumns>
constexpr int kMmaSharedBytes = (64 + kColumns) * kRowBytes + 16;

// The row and column of accumulator i of this thread.
__device__ int row_of(int i) {
  return threadIdx.x / 32 * 16 + i / 2 % 2 * 8 + threadIdx.x % 32 / 4;
}
__device__ int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// What becomes of D, in the order of test_gpu_sm90_kit.py.
enum class How : int { adds, is_new, either };

// Issues one wgmma. `is_first`: nothing is in D yet, unless it is to be added to.
template <typename T, int kColumns, How kHow, bool kTransposedB, typename A>
__device__ void multiply(float (&d)[kColumns / 2], const A& a, uint64_t b, bool is_first) {
  using Mma = Wgmma<T, kColumns>;
  constexpr bool kNew = kHow == How::is_new;
  if constexpr (kHow == How::either) {
    Mma::template either_ss<kTransposedB>(d, a, b, !is_first);
  } else if constexpr (std::is_array<A>::value && kNew) {
    is_first ? Mma::template new_rs<kTransposedB>(d, a, b)
             : Mma::template add_rs<kTransposedB>(d, a, b);
  } else if constexpr (std::is_array<A>::value) {
    Mma::template add_rs<kTransposedB>(d, a, b);
  } else if constexpr (kNew) {
    is_first ? Mma::template new_ss<kTransposedB>(d, a, b)
             : Mma::template add_ss<kTransposedB>(d, a, b);
  } else {
    Mma::template add_ss<kTransposedB>(d, a, b);
  }
}

template <typename T, int kColumns, How kHow, bool kARegisters, bool kTransposedB>
__global__ __launch_bounds__(kWarpgroupSize) void MmaKernel(const __grid_constant__ MmaParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kABytes = 64 * kRowBytes, kBBytes = kColumns * kRowBytes;
  constexpr int kDepth = kRowBytes / sizeof(T);
  constexpr int kRowsB = kTransposedB ? kDepth : kColumns;
  constexpr int kSteps = kRowBytes / kStepBytes;
  const int panel_bytes = p.panel_bytes, atom_bytes = kAtomRows * panel_bytes;
  const int panels_b = kBBytes / kRowsB / panel_bytes, steps_of_panel = panel_bytes / kStepBytes;
  extern __shared__ __align__(1024) unsigned char smem[];
  uint64_t* const barrier = reinterpret_cast<uint64_t*>(smem + kABytes + kBBytes);
  const uint32_t a = shared_address(smem), b = a + kABytes;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, kABytes + kBBytes);
    copy_box(a, &p.a, barrier, 0, 0, 0, 0);
    for (int row = 0; row < kRowsB; row += p.box_rows) {
      copy_box(b + row * panels_b * panel_bytes, &p.b, barrier, 0, row, 0, 0);
    }
  }

  const bool in_atoms = p.box_rows != kRowsB;
  const uint32_t step_b = in_atoms ? panels_b * atom_bytes : atom_bytes;
  const uint32_t panel_step_b = in_atoms ? atom_bytes : kRowsB * panel_bytes;
  const uint64_t a_descriptor = wgmma_descriptor(a, atom_bytes, 16, panel_bytes);
  const uint64_t b_descriptor =
      wgmma_descriptor(b, step_b, kTransposedB ? panel_step_b : 16, panel_bytes);
  uint32_t a_registers[kSteps][4];
  if constexpr (kARegisters) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = step * 8 + i / 2 * 4 + threadIdx.x % 4;
        a_registers[step][i] = p.a_words[row_of(2 * i) * (kRowBytes / 4) + word];
      }
    }
  }
  float d[kColumns / 2];
  if constexpr (kHow != How::is_new) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) d[i] = p.c[row_of(i) * kColumns + column_of(i)];
  }

  mbarrier_wait_parity(barrier, 0, "operands");
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int panel = step / steps_of_panel, in_panel = step % steps_of_panel * kStepBytes;
    const uint64_t b_step =
        b_descriptor + ((kTransposedB ? step * 2 * step_b : panel * panel_step_b + in_panel) >> 4);
    if constexpr (kARegisters) {
      multiply<T, kColumns, kHow, kTransposedB>(d, a_registers[step], b_step, step == 0);
    } else {
      const uint64_t a_step = a_descriptor + ((panel * 64 * panel_bytes + in_panel) >> 4);
      multiply<T, kColumns, kHow, kTransposedB>(d, a_step, b_step, step == 0);
    }
  }
  wgmma_commit_group();
  wgmma_wait_group<0>();
  keep_behind_wait(d);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) p.d[row_of(i) * kColumns + column_of(i)] = d[i];
#endif
}

// [rows, panels * columns of a panel] as [1, panels, rows, columns of a panel].
TensorMap panel_map(const TensorView& tensor, int box_rows, int64_t panel_bytes) {
  const DType dtype = dtype_of(tensor);
  const auto element_bytes = static_cast<int64_t>(tensor_map_element_bytes(dtype));
  const auto rows = tensor.size(0), row_bytes = tensor.size(1) * element_bytes;
  const auto in_panel = static_cast<uint32_t>(panel_bytes / element_bytes);
  const auto panels = static_cast<uint32_t>(row_bytes / panel_bytes);
  TensorMapShape shape;
  shape.dim(in_panel, 0, in_panel)
      .dim(rows, row_bytes, box_rows)
      .dim(panels, panel_bytes, panels)
      .dim(1, 0, 1);
  TensorMap map;
  check(encode_tensor_map(map, dtype, tensor.data_ptr(), shape), "tensor map");
  return map;
}

// What is the same for all instances of a call.
struct MmaCall {
  const TensorView& d;
  const MmaParams& params;
  How how;
  bool a_registers, transposed_b;
};

// The kernel of a form that python/precast/_plan/wgmma.py has, or null.
template <typename T, int kColumns, bool kTransposedB>
auto mma_kernel(How how, bool a_registers) {
  constexpr bool kIsFp8 = sizeof(T) == 1;
  void (*kernel)(MmaParams) = nullptr;
  // Some columns are for A in shared memory alone, others for A in registers.
  constexpr bool kIsOfSums = kColumns == 8 || kColumns == 72 || kColumns == 136;
  constexpr bool kIsPowerOfTwo = kColumns == 64 || kColumns == 128 || kColumns == 256;
  constexpr bool kIsOfFewRows = std::is_same_v<T, bf16> && kColumns == 32;
  constexpr bool kAInRegisters =
      kIsPowerOfTwo || (kIsFp8 ? kIsOfSums : kIsOfFewRows || kColumns == 96);
  if (a_registers) {
    if constexpr (kAInRegisters) {
      if (how == How::adds) kernel = MmaKernel<T, kColumns, How::adds, true, kTransposedB>;
      if constexpr (kIsFp8) {
        if (how == How::is_new) kernel = MmaKernel<T, kColumns, How::is_new, true, kTransposedB>;
      }
    }
  } else if constexpr (kIsFp8 ? kColumns == 72 || kColumns == 136 : kColumns == 96) {
    return kernel;
  } else {
    if constexpr (kIsFp8 || kColumns == 64 || kColumns == 128) {
      if (how == How::is_new) kernel = MmaKernel<T, kColumns, How::is_new, false, kTransposedB>;
    }
    if constexpr (kIsFp8 && kColumns == 128) {
      if (how == How::either) kernel = MmaKernel<T, kColumns, How::either, false, kTransposedB>;
    }
    if (how == How::adds) kernel = MmaKernel<T, kColumns, How::adds, false, kTransposedB>;
  }
  return kernel;
}

template <typename T, int kColumns>
void launch_mma(const MmaCall& call) {
  void (*kernel)(MmaParams) = nullptr;
  if (!call.transposed_b) {
    kernel = mma_kernel<T, kColumns, false>(call.how, call.a_registers);
  } else if constexpr (sizeof(T) == 2) {
    kernel = mma_kernel<T, kColumns, true>(call.how, call.a_registers);
  }
  if (kernel == nullptr) TVM_FFI_THROW(ValueError) << "wgmma: no such instance";
  launch_one(kernel, kWarpgroupSize, kMmaSharedBytes<kColumns>, call.d, call.params);
}

template <typename T>
void launch_mma_of_type(const MmaCall& call) {
  if constexpr (sizeof(T) == 1) {
    switch (call.d.size(1)) {
      case 8:
        return launch_mma<T, 8>(call);
      case 72:
        return launch_mma<T, 72>(call);
      case 136:
        return launch_mma<T, 136>(call);
    }
  }
  switch (call.d.size(1)) {
    case 16:
      return launch_mma<T, 16>(call);
    case 32:
      return launch_mma<T, 32>(call);
    case 48:
      return launch_mma<T, 48>(call);
    case 64:
      return launch_mma<T, 64>(call);
    case 80:
      return launch_mma<T, 80>(call);
    case 96:
      return launch_mma<T, 96>(call);
    case 128:
      return launch_mma<T, 128>(call);
    case 160:
      return launch_mma<T, 160>(call);
    case 176:
      return launch_mma<T, 176>(call);
    case 192:
      return launch_mma<T, 192>(call);
    case 256:
      return launch_mma<T, 256>(call);
    default:
      TVM_FFI_THROW(ValueError) << "wgmma: no instance has " << call.d.size(1) << " columns";
  }
}

// a [64, k], b [N, k] or, transposed, [k, N], c and d [64, N]; all contiguous, rows of k have 256
// bytes. If D is new, c is not read.
void wgmma(TensorView a, TensorView b, TensorView c, TensorView d, int64_t box_rows,
           int64_t panel_bytes, int64_t how, bool a_registers, bool transposed_b) {
  MmaParams params = {};
  params.a = panel_map(a, 64, panel_bytes);
  params.b = panel_map(b, static_cast<int>(box_rows), panel_bytes);
  params.a_words = static_cast<const uint32_t*>(a.data_ptr());
  params.c = static_cast<const float*>(c.data_ptr());
  params.d = static_cast<float*>(d.data_ptr());
  params.box_rows = static_cast<int>(box_rows);
  params.panel_bytes = static_cast<int>(panel_bytes);
  const MmaCall call = {d, params, static_cast<How>(how), a_registers, transposed_b};
  switch (dtype_of(a)) {
    case DType::f16:
      return launch_mma_of_type<f16>(call);
    case DType::bf16:
      return launch_mma_of_type<bf16>(call);
    case DType::e4m3:
      return launch_mma_of_type<e4m3>(call);
    default:
      TVM_FFI_THROW(ValueError) << "wgmma: a has another type than f16, bf16 and e4m3";
  }
}

// -- copies ---------------------------------------------------------------------------------------

constexpr int kCopyThreads = 128;

struct CopyParams {
  TensorMap map;
  int dims, at[5];  // innermost first
  int bytes;        // of the box, a multiple of 16
  uint4* out;
};

__global__ __launch_bounds__(kCopyThreads) void CopyKernel(const __grid_constant__ CopyParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  uint64_t* const barrier = reinterpret_cast<uint64_t*>(smem + p.bytes);
  uint4* const box = reinterpret_cast<uint4*>(smem);
  // What the copy does not write shows as NaN.
  for (int i = threadIdx.x; i < p.bytes / 16; i += kCopyThreads) {
    box[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  fence_shared_for_async();
#endif
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.map);
    mbarrier_init(barrier);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, p.bytes);
    if (p.dims == 4) {
      copy_box(shared_address(smem), &p.map, barrier, p.at[0], p.at[1], p.at[2], p.at[3]);
    } else {
      copy_box(shared_address(smem), &p.map, barrier, p.at[0], p.at[1], p.at[2], p.at[3], p.at[4]);
    }
  }
  mbarrier_wait_parity(barrier, 0, "a box");
  for (int i = threadIdx.x; i < p.bytes / 16; i += kCopyThreads) p.out[i] = box[i];
}

// Copies the box at `at` [dims] of the tensor at the address of `data`, of its element type.
// `layout` [dims, 3] has size, stride in bytes and edge of the box of each dimension, innermost
// first; `layout`, `at` and `map` [16] are int64 on the CPU. Returns the error of the encoder, or
// writes `out`, which is as large as the box.
int64_t copy_box_of(TensorView data, TensorView layout, TensorView at, TensorView map,
                    TensorView out) {
  CopyParams params = {};
  params.dims = static_cast<int>(layout.size(0));
  const auto* const rows = static_cast<const int64_t*>(layout.data_ptr());
  const auto* const starts = static_cast<const int64_t*>(at.data_ptr());
  TensorMapShape shape;
  for (int i = 0; i < params.dims; ++i) {
    shape.dim(rows[3 * i], rows[3 * i + 1], static_cast<uint32_t>(rows[3 * i + 2]));
    params.at[i] = static_cast<int>(starts[i]);
  }
  const cudaError_t status = encode_tensor_map(params.map, dtype_of(data), data.data_ptr(), shape);
  if (status != cudaSuccess) return status;
  for (int i = 0; i < 16; ++i) {
    static_cast<int64_t*>(map.data_ptr())[i] = static_cast<int64_t>(params.map.words[i]);
  }
  params.bytes = static_cast<int>(out.size(0));
  params.out = static_cast<uint4*>(out.data_ptr());
  launch_one(CopyKernel, kCopyThreads, params.bytes + 16, out, params);
  return cudaSuccess;
}

// -- transpose ------------------------------------------------------------------------------------

constexpr int kTokens = 128;

struct TransposeParams {
  const uint4* values;  // [kTokens, kColumns], as TMA writes them
  uint4* transposed;    // [kColumns, kTokens] as they lie in shared memory
  int count;
  uint32_t atom_step, panel_step;
};

template <int kColumns>
__global__ __launch_bounds__(kWarpgroupSize) void TransposeKernel(
    const __grid_constant__ TransposeParams p) {
  constexpr int kBytes = kTokens * kColumns;
  extern __shared__ __align__(1024) unsigned char smem[];
  uint4* const values = reinterpret_cast<uint4*>(smem);
  for (int i = threadIdx.x; i < kBytes / 16; i += kWarpgroupSize) values[i] = p.values[i];
  __syncthreads();
  const int warp = threadIdx.x / 32;
  const ValueTransposer<kColumns, kColumns % 128 == 0 ? 128 : 64> transposer(warp, p.atom_step,
                                                                             p.panel_step);
  transposer.run(shared_address(smem), shared_address(smem) + kBytes, p.count, warp);
  __syncthreads();
  for (int i = threadIdx.x; i < kBytes / 16; i += kWarpgroupSize) {
    p.transposed[i] = values[kBytes / 16 + i];
  }
}

// values, transposed: uint8 [128 * columns]; steps as of ValueTransposer.
void transpose(TensorView values, TensorView transposed, int64_t count, int64_t atom_step,
               int64_t panel_step) {
  const TransposeParams params = {
      static_cast<const uint4*>(values.data_ptr()), static_cast<uint4*>(transposed.data_ptr()),
      static_cast<int>(count), static_cast<uint32_t>(atom_step), static_cast<uint32_t>(panel_step)};
  const auto columns = values.size(0) / kTokens;
  void (*const kernel)(TransposeParams) = columns == 64    ? TransposeKernel<64>
                                          : columns == 128 ? TransposeKernel<128>
                                                           : TransposeKernel<256>;
  launch_one(kernel, kWarpgroupSize, static_cast<int>(2 * values.size(0)), values, params);
}

// -- pipeline -------------------------------------------------------------------------------------

constexpr int kConsumers = 2, kStages = 2;
constexpr int kBlockRows = 64, kBlockBytes = kBlockRows * kPanelBytes;
constexpr int kNumbers = 192;  // of a consumer thread: more than the 168 registers at launch
constexpr int kFirstTurn = 1 + kConsumers;  // named barriers 1 and 2 are of one consumer each
constexpr int kPipelineThreads = kWarpgroupSize * (1 + kConsumers);

struct PipelineParams {
  TensorMap map;  // [1, 1, blocks * 64, 64]
  int blocks;
  uint4* out;            // [blocks, kBlockBytes / 16]
  const float* numbers;  // [kNumbers, consumer threads]
  float* sums;           // [kNumbers, consumer threads]
  int* turns;            // [blocks * kConsumers]  whose turn it was
};

struct PipelineStorage {
  unsigned char stages[kStages][kBlockBytes];
  uint4 exchange[kConsumers][kBlockBytes / kConsumers / 16];
  uint64_t full[kStages], empty[kStages];
  int turns;  // taken; no atomics, because a turn is one consumer's
};

__global__ __launch_bounds__(kPipelineThreads,
                             1) void PipelineKernel(const __grid_constant__ PipelineParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  PipelineStorage& shared = *reinterpret_cast<PipelineStorage*>(smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], kConsumers * 4);
    }
    fence_mbarrier_init();
    shared.turns = 0;
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < 4) {
    decrease_registers<40>();
    if (threadIdx.x != 0) return;
    for (int i = 0; i < p.blocks; ++i) {
      const int stage = i % kStages, parity = i / kStages % 2;
      mbarrier_wait_parity(&shared.empty[stage], parity ^ 1, "an empty stage");
      if (i % 3 == 2) __nanosleep(3000);  // now the consumers wait, now the producer
      mbarrier_arrive_expect_tx(&shared.full[stage], kBlockBytes);
      copy_box(shared_address(shared.stages[stage]), &p.map, &shared.full[stage], 0, i * kBlockRows,
               0, 0);
    }
    return;
  }
  increase_registers<232>();
  constexpr int kChunks = kBlockBytes / kConsumers / 16;  // of a consumer, two a thread
  const int consumer = warp / 4 - 1, thread = threadIdx.x % kWarpgroupSize;
  if (consumer == 1) named_barrier_arrive(kFirstTurn, 2 * kWarpgroupSize);
  for (int i = 0; i < p.blocks; ++i) {
    const int stage = i % kStages, parity = i / kStages % 2;
    mbarrier_wait_parity(&shared.full[stage], parity, "a full stage");
    const uint4* const from =
        reinterpret_cast<const uint4*>(shared.stages[stage]) + consumer * kChunks;
    uint4 first = from[thread], second = from[thread + kChunks / 2];
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.empty[stage]);
    // Each thread writes what another one of its warpgroup has read.
    if ((i + warp) % 4 == 0) __nanosleep(2000);
    shared.exchange[consumer][thread] = first;
    shared.exchange[consumer][thread + kChunks / 2] = second;
    named_barrier(1 + consumer, kWarpgroupSize);
    const int mirrored = kChunks - 1 - thread;
    first = shared.exchange[consumer][mirrored];
    second = shared.exchange[consumer][mirrored - kChunks / 2];
    named_barrier(1 + consumer, kWarpgroupSize);
    uint4* const out = p.out + (i * kConsumers + consumer) * kChunks;
    out[mirrored] = first;
    out[mirrored - kChunks / 2] = second;
    // Consumers take turns. The last one gives its turn to nobody.
    named_barrier(kFirstTurn + consumer, 2 * kWarpgroupSize);
    if (thread == 0) p.turns[shared.turns++] = consumer;
    if (consumer == 0 || i + 1 < p.blocks) {
      named_barrier_arrive(kFirstTurn + 1 - consumer, 2 * kWarpgroupSize);
    }
  }
  // All numbers are in registers at the barrier, because no load may cross it.
  const int consumer_thread = threadIdx.x - kWarpgroupSize;
  constexpr int kConsumerThreads = kConsumers * kWarpgroupSize;
  float numbers[kNumbers];
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) numbers[i] = p.numbers[i * kConsumerThreads + consumer_thread];
  named_barrier(1 + consumer, kWarpgroupSize);
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    p.sums[i * kConsumerThreads + consumer_thread] = numbers[i] + numbers[(i + 101) % kNumbers];
  }
#endif
}

// data [blocks * 64, 64] in 16 bits, out its bytes as they lie in shared memory; numbers and sums
// [192, 256] f32; turns [blocks * 2] int32.
void pipeline(TensorView data, TensorView out, TensorView numbers, TensorView sums,
              TensorView turns) {
  PipelineParams params = {};
  params.map = panel_map(data, kBlockRows, kPanelBytes);
  params.blocks = static_cast<int>(data.size(0) / kBlockRows);
  params.out = static_cast<uint4*>(out.data_ptr());
  params.numbers = static_cast<const float*>(numbers.data_ptr());
  params.sums = static_cast<float*>(sums.data_ptr());
  params.turns = static_cast<int*>(turns.data_ptr());
  launch_one(PipelineKernel, kPipelineThreads, sizeof(PipelineStorage), data, params);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(wgmma, wgmma);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_box, copy_box_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(transpose, transpose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pipeline, pipeline);
