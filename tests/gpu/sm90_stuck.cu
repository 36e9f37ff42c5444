// SPDX-License-Identifier: Apache-2.0
// A kernel that waits for a phase that ends, and then for one that never does.
#include <cuda_runtime_api.h>
#include <tvm/ffi/function.h>

#include "precast/core/sm90/mbarrier.cuh"

#if !defined(PRECAST_DEBUG_BARRIERS)
#error "tests/gpu/sm90_stuck.cu: define PRECAST_DEBUG_BARRIERS, or the kernel never ends"
#endif

namespace {

__global__ void StuckKernel() {
  __shared__ uint64_t barrier;
  precast::mbarrier_init(&barrier);
  precast::fence_mbarrier_init();
  precast::mbarrier_arrive(&barrier);
  precast::mbarrier_wait_parity(&barrier, 0, "a phase that ends");
  precast::mbarrier_wait_parity(&barrier, 1, "a phase that nobody ends");
}

void stuck() { StuckKernel<<<1, 1>>>(); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(stuck, stuck);
