// SPDX-License-Identifier: Apache-2.0
// A kernel that the build compiled from a Python source in CuTe DSL, as machine code of one target.
//
// nvcc writes a kernel's registration into an object, so that <<<>>> finds it. Here the library is
// loaded by hand instead, with functions that the documentation of the CUDA runtime has under
// "Library Management", when the kernel is first launched.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "precast/core/sm90/tensor_map.cuh"
#include "precast/core/types.cuh"

#if CUDART_VERSION < 12080
#error "kernels in CuTe DSL need the headers of CUDA 12.8: cudaLibraryLoadData() is new there"
#endif

namespace precast {

class CuteKernel {
 public:
  // `code` is a fatbin, `entry` the kernel's name in it. Both must live as long as the process. A
  // CTA has `shared_bytes` of dynamic shared memory, a cluster `cluster` CTAs.
  constexpr CuteKernel(const void* code, const char* entry, unsigned threads, int shared_bytes,
                       unsigned cluster)
      : code_(code),
        entry_(entry),
        threads_(threads),
        shared_bytes_(shared_bytes),
        cluster_(cluster) {}
  CuteKernel(const CuteKernel&) = delete;
  CuteKernel& operator=(const CuteKernel&) = delete;

  // Launches `ctas` CTAs on `stream` of the current device. The arguments must have the kernel's
  // own types. Returns the error of the launch.
  template <typename... Args>
  cudaError_t launch(uint32_t ctas, bool enable_pdl, cudaStream_t stream, Args... args) {
    cudaKernel_t kernel = kernel_.load(std::memory_order_acquire);
    if (kernel == nullptr) {
      const cudaError_t status = load(&kernel);
      if (status != cudaSuccess) return status;
    }
    if (shared_bytes_ > kMostUsualSharedBytes) {
      const cudaError_t status = allow_shared_bytes(kernel);
      if (status != cudaSuccess) return status;
    }
    void* values[] = {&args...};
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(ctas, 1, 1);
    config.blockDim = dim3(threads_, 1, 1);
    config.dynamicSmemBytes = shared_bytes_;
    config.stream = stream;
    config.attrs = attributes;
    if (enable_pdl) {
      cudaLaunchAttribute& pdl = attributes[config.numAttrs++];
      pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      pdl.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster_ > 1) {
      cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim.x = cluster_;
      cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    }
    return cudaLaunchKernelExC(&config, static_cast<const void*>(kernel), values);
  }

 private:
  // More must be asked for, on each device.
  static constexpr int kMostUsualSharedBytes = 48 * 1024;

  cudaError_t allow_shared_bytes(cudaKernel_t kernel) {
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    // Devices behind the 64th are asked at each launch.
    const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
    if ((devices_.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
    status = cudaKernelSetAttributeForDevice(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             shared_bytes_, device);
    if (status == cudaSuccess) devices_.fetch_or(bit, std::memory_order_release);
    return status;
  }

  [[gnu::noinline]] cudaError_t load(cudaKernel_t* kernel) {
    const std::lock_guard<std::mutex> guard(mutex_);
    *kernel = kernel_.load(std::memory_order_relaxed);
    if (*kernel != nullptr) return cudaSuccess;
    // Why: the first launch may be captured in a CUDA graph, and what loads code may be forbidden
    // to a thread that captures. Nothing here touches a stream.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t status = cudaThreadExchangeStreamCaptureMode(&mode);
    if (status != cudaSuccess) return status;
    cudaLibrary_t library = nullptr;
    status = cudaLibraryLoadData(&library, code_, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (status == cudaSuccess) status = cudaLibraryGetKernel(kernel, library, entry_);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (status == cudaSuccess) kernel_.store(*kernel, std::memory_order_release);
    return status;
  }

  const void* code_;
  const char* entry_;
  unsigned threads_;
  int shared_bytes_;
  unsigned cluster_;
  std::atomic<uint64_t> devices_{0};  // bits of those that allow shared_bytes_
  std::atomic<cudaKernel_t> kernel_{nullptr};
  std::mutex mutex_;
};

}  // namespace precast
