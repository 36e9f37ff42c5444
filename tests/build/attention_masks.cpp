// SPDX-License-Identifier: Apache-2.0
// Tests which bits of a custom mask attention reads, with random masks of both layouts: of all
// tokens, and of drafts. Masks lie in memory of their own size, so that the address sanitizer sees
// a read beside them. Prints the first wrong bit and returns 1.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "precast/attention/mask_row.cuh"

using namespace precast;

namespace {

std::mt19937 generator;

int random_int(int least, int most) {
  return std::uniform_int_distribution<int>(least, most)(generator);
}

struct Request {
  int32_t q_begin, q_len, kv_len;
};

std::vector<Request> random_requests(int longest) {
  std::vector<Request> requests;
  int32_t q_begin = 0;
  for (int i = random_int(1, 5); i > 0; --i) {
    const int32_t q_len = random_int(0, longest);
    // Some have fewer tokens than queries: their first queries are before the first token.
    const int32_t kv_len = random_int(0, 3) > 0 ? q_len + random_int(0, 100) : random_int(0, q_len);
    requests.push_back({q_begin, q_len, kv_len});
    q_begin += q_len;
  }
  return requests;
}

std::unique_ptr<unsigned char[]> random_bytes(int64_t count) {
  std::unique_ptr<unsigned char[]> bytes(new unsigned char[count]);
  for (int64_t i = 0; i < count; ++i) bytes[i] = static_cast<unsigned char>(random_int(0, 255));
  return bytes;
}

void check_rows(int number, const char* layout, const AttentionParams& p,
                const std::vector<Request>& requests,
                const std::vector<std::vector<bool>>& expected) {
  size_t row = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const Request& request = requests[i];
    WorkTile work = {};
    work.request_idx = static_cast<int32_t>(i);
    work.q_begin = request.q_begin;
    work.q_len = request.q_len;
    work.kv_len = request.kv_len;
    for (int32_t q_idx = 0; q_idx < request.q_len; ++q_idx, ++row) {
      const MaskRow mask(p, work, q_idx);
      for (int32_t first = 0; first < request.kv_len; first += random_int(1, 32)) {
        const uint32_t word = mask.word(first);
        for (int32_t token = first; token < request.kv_len && token < first + 32; ++token) {
          if ((word >> (token - first) & 1) == expected[row][token]) continue;
          std::printf("case %d, %s: request %zu, query %d of %d, token %d of %d\n", number, layout,
                      i, q_idx, request.q_len, token, request.kv_len);
          std::exit(1);
        }
      }
    }
  }
}

// Rows of drafts: word j / 16 of a row has bit j % 16 for draft j, as callers pack them.
void test_drafts(int number) {
  const int longest = random_int(1, 70), words = 2 * ((longest + 31) / 32);
  // A request may have more queries than callers said: nobody attends to what has no bit.
  const std::vector<Request> requests = random_requests(longest + (random_int(0, 9) == 0 ? 40 : 0));
  const int rows = requests.back().q_begin + requests.back().q_len;
  AttentionParams p;
  p.mask = AttentionMask::custom;
  p.mask_row_bytes = 2 * words;
  p.mask_bytes = int64_t(rows) * p.mask_row_bytes;
  const auto mask = random_bytes(p.mask_bytes);
  p.packed_mask = mask.get();
  const auto bit = [&](int row, int draft) {
    if (draft / 16 >= words) return false;
    const unsigned char* word = mask.get() + 2 * (int64_t(row) * words + draft / 16);
    return ((word[0] | word[1] << 8) >> draft % 16 & 1) != 0;
  };
  std::vector<std::vector<bool>> expected(rows);
  for (const Request& request : requests) {
    for (int32_t q_idx = 0; q_idx < request.q_len; ++q_idx) {
      const int row = request.q_begin + q_idx;
      for (int32_t token = 0; token < request.kv_len; ++token) {
        const int32_t draft = request.q_len - (request.kv_len - token);
        expected[row].push_back(draft < 0 || bit(row, draft));
      }
    }
  }
  check_rows(number, "drafts", p, requests, expected);
}

// Requests one after the other from mask_indptr on; the last bytes may be missing.
void test_all_tokens(int number) {
  const std::vector<Request> requests = random_requests(20);
  std::vector<int32_t> indptr = {0};
  for (const Request& r : requests) indptr.push_back(indptr.back() + (r.q_len * r.kv_len + 7) / 8);
  AttentionParams p;
  p.mask = AttentionMask::custom;
  p.mask_indptr = indptr.data();
  p.mask_bytes = indptr.back() / (random_int(0, 3) > 0 ? 1 : 2);
  const auto mask = random_bytes(p.mask_bytes);
  p.packed_mask = mask.get();
  std::vector<std::vector<bool>> expected;
  for (size_t i = 0; i < requests.size(); ++i) {
    for (int32_t q_idx = 0; q_idx < requests[i].q_len; ++q_idx) {
      expected.emplace_back();
      for (int32_t token = 0; token < requests[i].kv_len; ++token) {
        const int32_t at = q_idx * requests[i].kv_len + token, byte = indptr[i] + at / 8;
        expected.back().push_back(byte < p.mask_bytes && (mask[byte] >> at % 8 & 1) != 0);
      }
    }
  }
  check_rows(number, "all tokens", p, requests, expected);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  for (int number = 0; number < std::atoi(argv[1]); ++number) {
    generator.seed(static_cast<uint32_t>(std::atoll(argv[2])) + static_cast<uint32_t>(number));
    test_drafts(number);
    test_all_tokens(number);
  }
  std::printf("all bits are right\n");
  return 0;
}
