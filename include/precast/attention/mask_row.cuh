// SPDX-License-Identifier: Apache-2.0
// The row of a query in a custom mask. Both layouts have the lowest bit of a byte first:
//
//   of all tokens  packed_mask + mask_indptr[request] holds [q_len, kv_len] bits without gaps
//   of drafts      packed_mask holds [q_rows, mask_row_bytes], one row for each row of q; bit j is
//                  that of the request's query j. Its queries are its newest tokens, and every
//                  query attends to the tokens before them.
//
// Why the second layout is not expanded to the first: to write the bits of all tokens takes longer
// than the decode that reads them.
#pragma once

#include "precast/attention/params.cuh"

namespace precast {

class MaskRow {
 public:
  MaskRow() = default;

  PRECAST_HOST_DEVICE MaskRow(const AttentionParams& p, const WorkTile& work, int32_t q_idx) {
    if (p.mask_row_bytes > 0) {
      first_token_ = work.kv_len - work.q_len;
      bits_ = p.packed_mask + int64_t(work.q_begin + q_idx) * p.mask_row_bytes;
      first_bit_ = -int64_t(first_token_);
      end_bit_ = int64_t(p.mask_row_bytes) * 8;
    } else {
      const int64_t first_byte = p.mask_indptr[work.request_idx];
      first_token_ = 0;
      bits_ = p.packed_mask + first_byte;
      first_bit_ = int64_t(q_idx) * work.kv_len;
      end_bit_ = first_byte < 0 ? 0 : (p.mask_bytes - first_byte) * 8;
    }
  }

  PRECAST_HOST_DEVICE bool attends_to(int32_t token) const {
    if (token < first_token_) return true;
    const int64_t bit = first_bit_ + token;
    return bit < end_bit_ && bits_[bit >> 3] >> (bit & 7) & 1;
  }

 private:
  const unsigned char* bits_;
  int64_t first_bit_;    // that of token 0, which the mask of drafts may not have
  int64_t end_bit_;      // bits from here on are outside of the mask and count as 0
  int32_t first_token_;  // every query attends to the tokens before it
};

}  // namespace precast
