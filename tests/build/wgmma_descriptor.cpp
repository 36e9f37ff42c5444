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

constexpr int kAtomRows = 8;
constexpr int kStepBytes = 32;  // columns of A and rows of B that one wgmma reads

// An operand in shared memory: `panels` panels, which have rows of `panel_bytes` bytes.
struct Panels {
  int count, panel_bytes;

  uint32_t atom_bytes() const { return kAtomRows * panel_bytes; }
  // Swizzling by 128 bytes: the 16-byte column of an atom is XORed with its row. Atoms start at
  // multiples of 1024 bytes, so bits of the address tell both. Swizzling by 64 and 32 bytes: of the
  // same bits, the lower two and the lowest one are XORed with the columns of a row.
  uint32_t swizzled(uint32_t address) const {
    return address ^ (address >> 7 & (panel_bytes / 16 - 1)) << 4;
  }
};

// Where TMA writes the element at byte `column` of a row of a tensor in panels, of which it copies
// `box_rows` rows of all panels at once.
uint32_t written(const Panels& p, uint32_t base, int row, int column, int box_rows) {
  const int box = row / box_rows, row_in_box = row % box_rows;
  const int panel = column / p.panel_bytes, in_panel = column % p.panel_bytes;
  const int before = (box * p.count + panel) * box_rows + row_in_box;
  return p.swizzled(base + before * p.panel_bytes + in_panel);
}

// Where wgmma reads element (row, k) of an operand whose k are contiguous, in `size` bytes each.
// One step of k is 32 bytes, so that it never leaves a panel, and the leading offset does not
// matter.
uint32_t read_k_major(const Panels& p, const Fields& f, int row, int k, int size) {
  return p.swizzled(f.start * 16 + row / 8 * f.stride_offset * 16 + row % 8 * p.panel_bytes +
                    k * size);
}

// Where wgmma reads element (k, n) of an operand of 16 bits whose n are contiguous: an atom has 8 k
// and 64 n, or 32 or 16. Operands of 8 bits have no such order.
uint32_t read_n_major(const Panels& p, const Fields& f, int k, int n) {
  const int in_panel = p.panel_bytes / 2;
  return p.swizzled(f.start * 16 + n / in_panel * f.leading_offset * 16 +
                    k / 8 * f.stride_offset * 16 + k % 8 * p.panel_bytes + n % in_panel * 2);
}

void require_equal(const char* what, uint64_t got, uint64_t expected) {
  if (got == expected) return;
  std::printf("%s: got %#llx, expected %#llx\n", what, static_cast<unsigned long long>(got),
              static_cast<unsigned long long>(expected));
  std::exit(1);
}

void check_fields(const Panels& p, uint64_t descriptor, uint32_t address, uint32_t stride,
                  uint32_t leading) {
  const Fields f(descriptor);
  require_equal("start address", f.start, address / 16);
  require_equal("leading byte offset", f.leading_offset, leading / 16);
  require_equal("stride byte offset", f.stride_offset, stride / 16);
  require_equal("base offset", f.base_offset, 0);
  require_equal("swizzle mode", f.swizzle, p.panel_bytes == 128 ? 1 : p.panel_bytes == 64 ? 2 : 3);
  require_equal("bits of no field", f.others, 0);
}

// Q, K, or V of 8 bits: `rows` rows of panels that are contiguous along k.
void check_k_major(const Panels& p, uint32_t base, int rows, int box_rows, int size) {
  const int in_panel = p.panel_bytes / size, step_k = kStepBytes / size;
  const bool one_box = box_rows == rows;
  const uint32_t step = p.atom_bytes() * (one_box ? 1 : p.count);
  const uint32_t panel_step = one_box ? rows * p.panel_bytes : p.atom_bytes();
  const uint64_t first = wgmma_descriptor(base, step, 16, p.panel_bytes);
  check_fields(p, first, base, step, 16);
  for (int k0 = 0; k0 < p.count * in_panel; k0 += step_k) {
    const Fields f(first + (k0 / in_panel * panel_step + k0 % in_panel * size) / 16);
    for (int row = 0; row < rows; ++row) {
      for (int k = 0; k < step_k; ++k) {
        require_equal("element of K", read_k_major(p, f, row, k, size),
                      written(p, base, row, (k0 + k) * size, box_rows));
      }
    }
  }
}

// V of 16 bits: `rows` tokens of panels that are contiguous along n.
void check_n_major(const Panels& p, uint32_t base, int rows, int box_rows) {
  constexpr int kStepK = kStepBytes / 2;
  const bool one_box = box_rows == rows;
  const uint32_t step = p.atom_bytes() * (one_box ? 1 : p.count);
  const uint32_t panel_step = one_box ? rows * p.panel_bytes : p.atom_bytes();
  const uint64_t first = wgmma_descriptor(base, step, panel_step, p.panel_bytes);
  check_fields(p, first, base, step, panel_step);
  for (int k0 = 0; k0 < rows; k0 += kStepK) {
    const Fields f(first + k0 / 8 * step / 16);
    for (int k = 0; k < kStepK; ++k) {
      for (int n = 0; n < p.count * p.panel_bytes / 2; ++n) {
        require_equal("element of V", read_n_major(p, f, k, n),
                      written(p, base, k0 + k, 2 * n, box_rows));
      }
    }
  }
}

}  // namespace

int main() {
  constexpr uint32_t kShared = 227 * 1024;
  for (uint32_t base : {0u, 1024u, 65536u, 131072u, 131072u + 1024u}) {
    for (int rows : {8, 16, 32, 64, 80, 128, 192, 256}) {
      for (const Panels& p : {Panels{1, 128}, Panels{2, 128}, Panels{3, 128}, Panels{4, 128},
                              Panels{1, 64}, Panels{3, 64}, Panels{3, 32}}) {
        if (base + rows * p.count * p.panel_bytes > kShared) continue;
        for (int box_rows : {8, rows}) {
          check_k_major(p, base, rows, box_rows, 2);
          check_k_major(p, base, rows, box_rows, 1);
          if (rows % 16 == 0) check_n_major(p, base, rows, box_rows);
        }
      }
    }
  }
  // The descriptor of an operand without other words is that of panels of 128 bytes.
  require_equal("default", wgmma_descriptor(1024, 1024), wgmma_descriptor(1024, 1024, 16, 128));
  std::puts("all descriptors are right");
}
