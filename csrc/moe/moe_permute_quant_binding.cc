// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the quantised rows in the order of their experts.
#include "core/ffi_export.h"
#include "moe/expert_checks.h"
#include "precast/moe/moe_permute_quant.cuh"

namespace precast {

// csrc/moe/moe_permute_quant.cu
extern const DType moe_permute_quant_dtype;
cudaError_t moe_permute_quant(const MoePermuteQuantParams& params, bool enable_pdl,
                              cudaStream_t stream);

namespace {

void moe_permute_quant_entry(TensorView input, TensorView permuted_rows, TensorView out,
                             TensorView out_scale, bool enable_pdl) {
  const TensorMatcher match("moe_permute_quant");
  const TensorMatch in = match(input, "input");
  const TensorMatch rows = match(permuted_rows, "permuted_rows");
  const TensorMatch to = match(out, "out");
  const TensorMatch scales = match(out_scale, "out_scale");
  in.cuda().dtype(moe_permute_quant_dtype);
  check_expert_matrix(in, kExpertGroup, false);
  to.same_device(in).dtype(DType::e4m3);
  check_expert_matrix(to, kExpertGroup, true);
  const int64_t tokens = input.size(0), columns = input.size(1);
  to.shape({out.size(0), columns}).elements_apart();
  check_group_scales(scales, in, out.size(0), columns);
  MoePermuteQuantParams params = {};
  params.slots = slots_of(rows, in, tokens, out.size(0));
  check_written({TensorMemory(to), TensorMemory(scales)}, {TensorMemory(in), TensorMemory(rows)});
  check_expert_items(in, tokens, columns, kVecBytes / 2);
  if (tokens == 0 || columns == 0) return;

  params.input = data_of(input);
  params.out = data_of(out);
  params.scale = scales.data<float>();
  params.input_stride = input.stride(0);
  params.out_stride = out.stride(0);
  params.scale_row_stride = out_scale.stride(0);
  params.scale_group_stride = out_scale.stride(1);
  params.tokens = static_cast<uint32_t>(tokens);
  params.columns = columns;
  launch_on(in, [&](cudaStream_t stream) { return moe_permute_quant(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(moe_permute_quant, moe_permute_quant_entry)

}  // namespace precast
