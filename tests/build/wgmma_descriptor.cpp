// SPDX-License-Identifier: Apache-2.0
// Tests the descriptors of operands of wgmma against what the PTX ISA says of them: the bits of
// each field, and where the hardware then reads each element. The operands are those of attention:
// what TMA writes as one box (panel after panel), and as boxes of eight rows (atom after atom).
// Prints the first wrong field or address and returns 1.
//
// Source   PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix
//          Descriptor Format".
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "precast/core/sm90/warpgroup.cuh"

using precast::wgmma_descriptor;

namespace {

// The fields, by their bits in the PTX ISA. Offsets and addresses are in units of 16 bytes.
struct Fields {
  uint32_t start, leading_offset, stride_offset, base_offset, swizzle;
  uint64_t others;  // the bits that belong to no field

  explicit Fields(uint64_t descriptor)
      : start(bits(descriptor, 0, 13)),
        leading_offset(bits(descriptor, 16, 29)),
        stride_offset(bits(descriptor, 32, 45)),
        base_offset(bits(descriptor, 49, 51)),
        swizzle(bits(descriptor, 62, 63)) {
    others = descriptor;
    const int fields[][2] = {{0, 13}, {16, 29}, {32, 45}, {49, 51}, {62, 63}};
    for (const auto& field : fields) {
      for (int bit = field[0]; bit <= field[1]; ++bit) others &= ~(1ull << bit);
    }
  }

  static uint32_t bits(uint64_t word, int first, int last) {
    return static_cast<uint32_t>(word >> first & ((1ull << (last - first + 1)) - 1));
  }
};

constexpr uint32_t kAtomBytes = 1024;  // 8 rows of 128 bytes
constexpr int kPanelBytes = 128;       // a row of a panel
constexpr int kStepBytes = 32;         // columns of A and rows of B that one wgmma reads

// Swizzling by 128 bytes: the 16-byte column of an atom is XORed with its row. Atoms start at
// multiples of 1024 bytes, so bits of the address tell both. By 64 bytes, it is XORed with the pair
// of rows; atoms start at multiples of 512 bytes.
uint32_t swizzled(uint32_t address, int width = 128) {
  return address ^ (address >> 7 & (width == 128 ? 7 : 3)) << 4;
}

// Where TMA writes the element at byte `column` of a row of a tensor in panels of `width` bytes, of
// which it copies `box_rows` rows of all panels at once.
uint32_t written(uint32_t base, int row, int column, int box_rows, int panels, int width = 128) {
  const int box = row / box_rows, row_in_box = row % box_rows;
  const int panel = column / width, in_panel = column % width;
  const int before = (box * panels + panel) * box_rows + row_in_box;
  return swizzled(base + before * width + in_panel, width);
}

// Where wgmma reads element (row, k) of an operand whose k are contiguous, in `size` bytes each.
// One step of k is 32 bytes, so that it never leaves a panel, and the leading offset does not
// matter.
uint32_t read_k_major(const Fields& f, int row, int k, int size) {
  const int width = f.swizzle == 1 ? 128 : 64;
  return swizzled(f.start * 16 + row / 8 * f.stride_offset * 16 + row % 8 * width + k * size,
                  width);
}

// Where wgmma reads element (k, n) of an operand of 16 bits whose n are contiguous: an atom has 8 k
// and 64 n. Operands of 8 bits have no such order.
uint32_t read_n_major(const Fields& f, int k, int n) {
  return swizzled(f.start * 16 + n / 64 * f.leading_offset * 16 + k / 8 * f.stride_offset * 16 +
                  k % 8 * 128 + n % 64 * 2);
}

void require_equal(const char* what, uint64_t got, uint64_t expected) {
  if (got == expected) return;
  std::printf("%s: got %#llx, expected %#llx\n", what, static_cast<unsigned long long>(got),
              static_cast<unsigned long long>(expected));
  std::exit(1);
}

void check_fields(uint64_t descriptor, uint32_t address, uint32_t stride, uint32_t leading,
                  int width = 128) {
  const Fields f(descriptor);
  require_equal("start address", f.start, address / 16);
  require_equal("leading byte offset", f.leading_offset, leading / 16);
  require_equal("stride byte offset", f.stride_offset, stride / 16);
  require_equal("base offset", f.base_offset, 0);
  require_equal("swizzle mode", f.swizzle, width == 128 ? 1 : 2);
  require_equal("bits of no field", f.others, 0);
}

// Q, K, or V of 8 bits: `rows` rows of `panels` panels of `width` bytes, contiguous along k.
void check_k_major(uint32_t base, int rows, int box_rows, int panels, int size, int width = 128) {
  const int in_panel = width / size, step_k = kStepBytes / size;
  const bool one_box = box_rows == rows;
  const uint32_t atom = 8 * width, step = one_box ? atom : panels * atom;
  const uint32_t panel_step = one_box ? rows * width : atom;
  const uint64_t first = wgmma_descriptor(base, step, 16, width);
  check_fields(first, base, step, 16, width);
  for (int k0 = 0; k0 < panels * in_panel; k0 += step_k) {
    const Fields f(first + (k0 / in_panel * panel_step + k0 % in_panel * size) / 16);
    for (int row = 0; row < rows; ++row) {
      for (int k = 0; k < step_k; ++k) {
        require_equal("element of K", read_k_major(f, row, k, size),
                      written(base, row, (k0 + k) * size, box_rows, panels, width));
      }
    }
  }
}

// V of 16 bits: `rows` tokens of `panels` panels, contiguous along n.
void check_n_major(uint32_t base, int rows, int box_rows, int panels) {
  constexpr int kStepK = kStepBytes / 2;
  const bool one_box = box_rows == rows;
  const uint32_t step = one_box ? kAtomBytes : panels * kAtomBytes;
  const uint32_t panel_step = one_box ? rows * kPanelBytes : kAtomBytes;
  const uint64_t first = wgmma_descriptor(base, step, panel_step);
  check_fields(first, base, step, panel_step);
  for (int k0 = 0; k0 < rows; k0 += kStepK) {
    const Fields f(first + k0 / 8 * step / 16);
    for (int k = 0; k < kStepK; ++k) {
      for (int n = 0; n < panels * 64; ++n) {
        require_equal("element of V", read_n_major(f, k, n),
                      written(base, k0 + k, 2 * n, box_rows, panels));
      }
    }
  }
}

}  // namespace

int main() {
  constexpr uint32_t kShared = 227 * 1024;
  for (uint32_t base : {0u, 1024u, 65536u, 131072u, 131072u + 1024u}) {
    for (int rows : {8, 16, 32, 64, 80, 128, 192, 256}) {
      for (int panels : {1, 2, 3, 4}) {
        if (base + rows * panels * kPanelBytes > kShared) continue;
        for (int box_rows : {8, rows}) {
          check_k_major(base, rows, box_rows, panels, 2);
          check_k_major(base, rows, box_rows, panels, 1);
          check_k_major(base, rows, box_rows, panels, 1, 64);
          if (rows % 16 == 0) check_n_major(base, rows, box_rows, panels);
        }
      }
    }
  }
  std::puts("all descriptors are right");
}
