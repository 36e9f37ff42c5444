// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the all-reduce of registered buffers.
#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "precast/comm/custom_all_reduce.cuh"

namespace precast {

// csrc/comm/custom_all_reduce.cu
extern const DType custom_all_reduce_dtype;
cudaError_t custom_all_reduce(const CustomAllReduceParams& params, int world, bool two_shot,
                              int ctas, cudaStream_t stream);

namespace {

constexpr const char* kOp = "vllm_all_reduce";

// What python/precast/_ops/comm/custom_all_reduce.py packs of a handle.
struct HandleBlock {
  int64_t rank;
  int64_t world;
  int64_t scratch_offset;
  int64_t scratch_bytes;  // of this rank's memory behind it
  int64_t one_shot_bytes;
  int64_t timeout_nanoseconds;
  int64_t report;  // the address of a WaitReport
  int64_t signals[kMaxWorld];
};

const HandleBlock& block_of(const TensorView& block) {
  const Arg arg = PRECAST_ARG(kOp, block);
  constexpr int64_t kWords = sizeof(HandleBlock) / sizeof(int64_t);
  TensorMatch(arg).dtype(kInt64).shape({kWords}).contiguous();
  PRECAST_CHECK(block.device().device_type == kDLCPU, ValueError)
      << arg.what() << " must be a CPU tensor, got " << device_name(block.device());
  const auto& b = *static_cast<const HandleBlock*>(data_of(block));
  PRECAST_CHECK(b.scratch_offset >= static_cast<int64_t>(sizeof(BarrierSignals)) &&
                    b.scratch_offset % kVecBytes == 0,
                ValueError)
      << arg.what() << " must leave " << sizeof(BarrierSignals) << " bytes for signals, got "
      << b.scratch_offset;
  return b;
}

// `inputs` is the address of a row of the table of registered buffers.
void custom_all_reduce_entry(TensorView inp, TensorView out, int64_t reg_buffer,
                             int64_t reg_buffer_sz_bytes, int64_t num_ctas, int64_t inputs,
                             TensorView block) {
  const Arg in = PRECAST_ARG(kOp, inp);
  const Arg to = PRECAST_ARG(kOp, out);
  const TensorMemory memory(in), written(to);
  TensorMatch(in).cuda().dtype(custom_all_reduce_dtype).contiguous().aligned();
  TensorMatch(to).same_device(in).dtype(custom_all_reduce_dtype).contiguous().aligned();
  const HandleBlock& b = block_of(block);
  const int64_t bytes = inp.numel() * inp.dtype().bits / 8;
  PRECAST_CHECK(inp.numel() == out.numel(), ValueError)
      << to.what() << " must have inp's " << inp.numel() << " elements, got shape "
      << to_string(out.shape());
  PRECAST_CHECK(bytes % kVecBytes == 0, ValueError)
      << in.what() << " must have a multiple of " << kVecBytes << " bytes, got shape "
      << to_string(inp.shape());
  PRECAST_CHECK(bytes / kVecBytes <= 0x7fffffff, ValueError)
      << in.what() << " must have less than 32 GiB, got shape " << to_string(inp.shape());
  PRECAST_CHECK(num_ctas >= 1 && num_ctas <= kMaxBarrierCtas, ValueError)
      << kOp << ": num_ctas must be 1 to " << kMaxBarrierCtas << ", got " << num_ctas;
  check_written({written}, {memory});
  CustomAllReduceParams params = {};
  if (reg_buffer != 0) {
    PRECAST_CHECK(bytes <= reg_buffer_sz_bytes, ValueError)
        << in.what() << " must fit reg_buffer's " << reg_buffer_sz_bytes << " bytes, got " << bytes;
    PRECAST_CHECK(reg_buffer % kVecBytes == 0, ValueError)
        << kOp << ": reg_buffer must be a multiple of " << kVecBytes << ", got " << reg_buffer;
    params.registered = reinterpret_cast<void*>(reg_buffer);
    const TensorMemory registered(kOp, "reg_buffer", params.registered, bytes);
    check_memory_apart(written, registered);
    check_memory_apart(registered, memory);
    params.source = data_of(inp);
  }
  if (bytes == 0) return;
  const int world = static_cast<int>(b.world);
  const bool two_shot = bytes > b.one_shot_bytes;
  const int64_t part = (bytes / kVecBytes + world - 1) / world * kVecBytes;
  PRECAST_CHECK(!two_shot || part <= b.scratch_bytes, ValueError)
      << in.what() << " of " << bytes << " bytes needs " << part
      << " bytes behind the signals of each rank, got " << b.scratch_bytes
      << ". Fix: create_shared_buffer(vllm_meta_size() + the largest input)";
  for (int i = 0; i < world; ++i) {
    params.signals[i] = reinterpret_cast<BarrierSignals*>(b.signals[i]);
  }
  params.inputs = reinterpret_cast<const void* const*>(inputs);
  params.out = data_of(out);
  params.scratch_offset = b.scratch_offset;
  params.vecs = static_cast<uint32_t>(bytes / kVecBytes);
  params.rank = static_cast<int>(b.rank);
  params.limit.nanoseconds = static_cast<uint64_t>(b.timeout_nanoseconds);
  params.limit.report = reinterpret_cast<WaitReport*>(b.report);
  launch_on(in, [&](cudaStream_t stream) {
    return custom_all_reduce(params, world, two_shot, static_cast<int>(num_ctas), stream);
  });
}

}  // namespace

PRECAST_EXPORT(custom_all_reduce, custom_all_reduce_entry)

}  // namespace precast
