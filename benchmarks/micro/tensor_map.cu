// SPDX-License-Identifier: Apache-2.0
// How long the CPU takes to encode a tensor map, as launchers do at every call.
#include <chrono>

#include "micro.cuh"

namespace micro {
namespace {

// Nanoseconds of one of `calls` maps of a pool [rows, 256], with so many dimensions (2 to 5).
double encode_time(TensorView pool, int64_t dims, int64_t calls) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    TensorMapShape shape;
    shape.dim(kPanelBytes, 0, kPanelBytes).dim(pool.size(0) - i % 2, kRowBytes, kTileRows);
    if (dims > 2) shape.dim(kRowBytes / kPanelBytes, kPanelBytes, kRowBytes / kPanelBytes);
    for (int64_t more = 3; more < dims; ++more) shape.dim(1, 0, 1);
    TensorMap map;
    check(encode_tensor_map(map, DType::i8, pool.data_ptr(), shape), "tensor map");
  }
  const std::chrono::duration<double, std::nano> taken = Clock::now() - begin;
  return taken.count() / static_cast<double>(calls);
}

}  // namespace
}  // namespace micro

TVM_FFI_DLL_EXPORT_TYPED_FUNC(encode_time, micro::encode_time);
