// SPDX-License-Identifier: Apache-2.0
// What a binding asks of a device once.
#pragma once

#include "core/tvm_ffi_utils.h"

namespace precast {

// Multiprocessors of a device. Why: the runtime takes 0.2 us to say it.
PRECAST_ONE_COPY int multiprocessors(const char* op, int device) {
  constexpr int kDevices = 64;
  static int known[kDevices];  // races write the same number
  const bool has_place = device >= 0 && device < kDevices;
  if (has_place && known[device] != 0) return known[device];
  int count = 0;
  check_cuda_status(op, cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (has_place) known[device] = count;
  return count;
}

}  // namespace precast
