// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of hash_topk.
#include <cmath>

#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "precast/moe/hash_topk.cuh"

namespace precast {

// csrc/moe/hash_topk.cu
cudaError_t hash_topk(const HashTopKParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void hash_topk_entry(TensorView router_logits, TensorView input_ids, TensorView tid2eid,
                     int64_t num_fused_shared_experts, double routed_scaling_factor,
                     TensorView topk_weights, TensorView topk_ids, bool launch_with_pdl) {
  const char* op = "hash_topk";
  const Arg in = PRECAST_ARG(op, router_logits);
  const Arg ids = PRECAST_ARG(op, input_ids);
  const Arg table = PRECAST_ARG(op, tid2eid);
  const Arg weights = PRECAST_ARG(op, topk_weights);
  const Arg experts = PRECAST_ARG(op, topk_ids);
  TensorMatch(in).cuda();
  PRECAST_CHECK(num_fused_shared_experts == 0 || num_fused_shared_experts == 1, ValueError)
      << op << ": num_fused_shared_experts must be from 0 to 1, got " << num_fused_shared_experts;
  const float scale = static_cast<float>(routed_scaling_factor);
  PRECAST_CHECK(num_fused_shared_experts == 0 || (std::isnormal(scale) && scale > 0), ValueError)
      << op << ": routed_scaling_factor must be positive and finite with a shared expert, got "
      << routed_scaling_factor;
  TensorMatch(in).dtype(DType::f32).rank(2, 2).unit_stride();
  const int64_t tokens = router_logits.size(0), shared = num_fused_shared_experts;
  TensorMatch(ids).same_device(in).dtype(kInt64).shape({tokens}).contiguous();
  TensorMatch(table).same_device(in).dtype(kInt32).rank(2, 2).contiguous();
  const int64_t topk = tid2eid.size(1), most = kMaxHashTopK - shared;
  PRECAST_CHECK(topk >= 1 && topk <= most, ValueError)
      << table.what() << " must have 1 to " << most << " columns, got shape "
      << to_string(tid2eid.shape());
  PRECAST_CHECK(tokens <= 0x07ffffff && router_logits.size(1) <= 0x7fffffff, ValueError)
      << in.what() << " must have at most 2^27 - 1 rows, got shape "
      << to_string(router_logits.shape());
  TensorMatch(weights).same_device(in).dtype(DType::f32).shape({tokens, topk + shared});
  TensorMatch(weights).contiguous();
  TensorMatch(experts).same_device(in).dtype(kInt32).shape({tokens, topk + shared}).contiguous();
  check_written({weights, experts}, {in, ids, table});
  if (tokens == 0) return;

  HashTopKParams params = {};
  params.logits = static_cast<const float*>(data_of(router_logits));
  params.ids = static_cast<const int64_t*>(data_of(input_ids));
  params.table = static_cast<const int32_t*>(data_of(tid2eid));
  params.weights = static_cast<float*>(data_of(topk_weights));
  params.experts = static_cast<int32_t*>(data_of(topk_ids));
  params.stride = router_logits.stride(0);
  params.vocabulary = tid2eid.size(0);
  params.tokens = static_cast<uint32_t>(tokens);
  params.num_experts = static_cast<int>(router_logits.size(1));
  params.topk = static_cast<int>(topk);
  params.shared = static_cast<int>(shared);
  params.shared_weight = 1.0f / scale;
  launch_on(in, [&](cudaStream_t stream) { return hash_topk(params, launch_with_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(hash_topk, hash_topk_entry)

}  // namespace precast
