// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the order of rows by experts, and of copies in it.
#include "core/ffi_export.h"
#include "moe/expert_checks.h"
#include "precast/moe/moe_permute.cuh"
#include "precast/moe/moe_sort.cuh"

namespace precast {

// csrc/moe/moe_permute.cu
cudaError_t moe_sort(const MoeSortParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t moe_permute(const MoePermuteParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void moe_sort_entry(TensorView token_selected_experts, int64_t first_expert,
                    TensorView expert_offsets, TensorView permuted_rows, TensorView row_experts,
                    OptionalTensor counts, bool enable_pdl) {
  const TensorMatcher match("moe_sort");
  const TensorMatch in = match(token_selected_experts, "token_selected_experts");
  const TensorMatch offsets = match(expert_offsets, "expert_offsets");
  const TensorMatch rows = match(permuted_rows, "permuted_rows");
  const TensorMatch experts_of = match(row_experts, "row_experts");
  in.cuda().dtype(kInt32).rank(2, 2).contiguous();
  const int64_t pairs = token_selected_experts.numel();
  PRECAST_CHECK(pairs <= kMostExpertRows, ValueError)
      << "moe_sort: token_selected_experts must have at most " << kMostExpertRows
      << " elements, got shape " << to_string(token_selected_experts.shape());
  offsets.same_device(in).dtype(kInt32).rank(1, 1).contiguous();
  const int64_t experts = expert_offsets.size(0) - 1;
  PRECAST_CHECK(experts >= 0 && experts <= kMaxSortExperts, ValueError)
      << "moe_sort: expert_offsets must have 1 to " << kMaxSortExperts + 1
      << " elements, got shape " << to_string(expert_offsets.shape());
  PRECAST_CHECK(first_expert >= 0 && first_expert <= kMostExpertRows - experts, ValueError)
      << "moe_sort: first_expert must be from 0 to " << kMostExpertRows - experts << ", got "
      << first_expert;
  rows.same_device(in).dtype(kInt32).shape_of(in).contiguous();
  experts_of.same_device(in).dtype(kInt32).shape({pairs}).contiguous();
  const int64_t chunks = moe_sort_chunks(pairs);
  MoeSortParams params = {};
  params.counts = match.optional<int32_t>(counts, "counts", [&](const TensorMatch& scratch) {
    scratch.same_device(in).dtype(kInt32).rank(2, 2).contiguous();
    if (chunks > 1) scratch.shape({chunks, experts});
  });
  PRECAST_CHECK(chunks == 1 || counts.has_value(), ValueError)
      << "moe_sort: counts must have shape [" << chunks << ", " << experts << "], got None";
  check_written({TensorMemory(offsets),
                 TensorMemory(rows),
                 TensorMemory(experts_of),
                 {"moe_sort", "counts", counts}},
                {TensorMemory(in)});

  params.selected = in.data<const int32_t>();
  params.rows = rows.data<int32_t>();
  params.offsets = offsets.data<int32_t>();
  params.row_experts = experts_of.data<int32_t>();
  params.pairs = static_cast<uint32_t>(pairs);
  params.experts = static_cast<int>(experts);
  params.first_expert = static_cast<int>(first_expert);
  launch_on(in, [&](cudaStream_t stream) { return moe_sort(params, enable_pdl, stream); });
}

void moe_permute_entry(TensorView input, TensorView permuted_rows, TensorView out,
                       bool enable_pdl) {
  const TensorMatcher match("moe_permute");
  const TensorMatch in = match(input, "input");
  const TensorMatch rows = match(permuted_rows, "permuted_rows");
  const TensorMatch to = match(out, "out");
  in.cuda();
  const int64_t bytes = (input.dtype().bits + 7) / 8;
  const int64_t vector = bytes < kVecBytes ? kVecBytes / bytes : 1;
  check_expert_matrix(in, vector, false);
  to.same_device(in).dtype(input.dtype());
  check_expert_matrix(to, vector, true);
  const int64_t tokens = input.size(0), columns = input.size(1);
  to.shape({out.size(0), columns}).elements_apart();
  MoePermuteParams params = {};
  params.slots = slots_of(rows, in, tokens, out.size(0));
  check_written({TensorMemory(to)}, {TensorMemory(in), TensorMemory(rows)});
  check_expert_items(in, tokens, columns * bytes, kVecBytes);
  if (tokens == 0 || columns == 0) return;

  params.input = data_of(input);
  params.out = data_of(out);
  params.input_stride = input.stride(0) * bytes;
  params.out_stride = out.stride(0) * bytes;
  params.tokens = static_cast<uint32_t>(tokens);
  params.row_bytes = columns * bytes;
  launch_on(in, [&](cudaStream_t stream) { return moe_permute(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(moe_sort, moe_sort_entry)
PRECAST_EXPORT(moe_permute, moe_permute_entry)

}  // namespace precast
