// SPDX-License-Identifier: Apache-2.0
// The lengths of a batch in memory, from which kernels plan (attention/plan.cuh).
#pragma once

#include "precast/attention/plan_layout.cuh"

namespace precast {

// Longer requests are cut off here. Why: sums of a few such lengths stay below 2^31.
constexpr int32_t kMaxKvLen = 1 << 30;

// The lengths of a batch. Whatever the tensors hold, a planned request has lengths that are not
// negative, at most kMaxKvLen tokens, no tokens past its pages, and fewer than 2^31 packed rows.
struct BatchLengths {
  const int32_t* qo_indptr;      // or null
  const int32_t* kv_indptr;      // or null: kv_start is 0
  const int32_t* last_page_len;  // or null
  const int32_t* kv_len;         // or null
  int32_t q_len_per_req;         // used if qo_indptr is null
  int32_t page_size;             // 0: kv_indptr counts tokens

  PRECAST_HOST_DEVICE PlannedRequest request(int32_t request_idx, int32_t group_size) const {
    return request(request_idx, group_size, [](const int32_t* x) { return *x; });
  }

  // The same, with `load` for a word in memory.
  template <typename Load>
  PRECAST_HOST_DEVICE PlannedRequest request(int32_t request_idx, int32_t group_size,
                                             const Load& load) const {
    PlannedRequest planned = {};
    planned.request_idx = request_idx;
    if (qo_indptr != nullptr) {
      planned.q_begin = load(qo_indptr + request_idx);
      const int64_t q_len = int64_t(load(qo_indptr + request_idx + 1)) - planned.q_begin;
      planned.q_len = planned.q_begin < 0 || q_len < 0 ? 0 : static_cast<int32_t>(q_len);
    } else {
      planned.q_begin = request_idx * q_len_per_req;
      planned.q_len = q_len_per_req;
    }
    int64_t capacity = int64_t(1) << 31;  // tokens that the request's part of kv_indptr can hold
    if (kv_indptr != nullptr) {
      planned.kv_start = load(kv_indptr + request_idx);
      capacity = int64_t(load(kv_indptr + request_idx + 1)) - planned.kv_start;
    }
    int64_t length = capacity;
    if (page_size > 0) {
      if (last_page_len != nullptr && capacity > 0) {
        length = (capacity - 1) * page_size + load(last_page_len + request_idx);
      }
      capacity *= page_size;
    }
    if (kv_len != nullptr) length = load(kv_len + request_idx);
    if (length > capacity) length = capacity;
    if (length > kMaxKvLen) length = kMaxKvLen;
    planned.kv_len = static_cast<int32_t>(length < 0 ? 0 : length);
    if (int64_t(planned.q_len) * group_size > 0x7fffffff) planned.q_len = 0x7fffffff / group_size;
    return planned;
  }
};

}  // namespace precast
