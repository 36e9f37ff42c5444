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

#include "precast/core/types.cuh"

#if CUDART_VERSION < 12080
#error "kernels in CuTe DSL need the headers of CUDA 12.8: cudaLibraryLoadData() is new there"
#endif

namespace precast {

class CuteKernel {
 public:
  // `code` is a fatbin, `entry` the kernel's name in it. Both must live as long as the process.
  constexpr CuteKernel(const void* code, const char* entry, unsigned threads)
      : code_(code), entry_(entry), threads_(threads) {}
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
    void* values[] = {&args...};
    cudaLaunchAttribute pdl = {};
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(ctas, 1, 1);
    config.blockDim = dim3(threads_, 1, 1);
    config.stream = stream;
    config.attrs = &pdl;
    config.numAttrs = enable_pdl ? 1 : 0;
    return cudaLaunchKernelExC(&config, static_cast<const void*>(kernel), values);
  }

 private:
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
  std::atomic<cudaKernel_t> kernel_{nullptr};
  std::mutex mutex_;
};

}  // namespace precast
