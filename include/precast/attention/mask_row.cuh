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

// A word of 32 tokens from `token` on: the bits of those before `end` are set.
PRECAST_HOST_DEVICE inline uint32_t bits_before(int32_t end, int32_t token) {
  if (end <= token) return 0;
  return end - token >= 32 ? ~0u : (1u << (end - token)) - 1;
}

class MaskRow {
 public:
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

  // The bits of 32 tokens from `token` on, whose own is the lowest.
  PRECAST_HOST_DEVICE uint32_t word(int32_t token) const {
    const uint32_t before = bits_before(first_token_, token);
    if (before == ~0u) return before;
    // Less than 0 for tokens before the drafts, whose bits are set below.
    const int64_t bit = first_bit_ + token, byte = bit >> 3;
    uint64_t bits = 0;
    for (int i = 0; i < 5; ++i) {
      const bool exists = byte + i >= 0 && (byte + i) * 8 < end_bit_;
      if (exists) bits |= uint64_t(bits_[byte + i]) << (8 * i);
    }
    return static_cast<uint32_t>(bits >> (bit & 7)) | before;
  }

 private:
  const unsigned char* bits_;
  int64_t first_bit_;    // that of token 0, which the mask of drafts may not have
  int64_t end_bit_;      // bits from here on are outside of the mask and count as 0
  int32_t first_token_;  // every query attends to the tokens before it
};

}  // namespace precast
