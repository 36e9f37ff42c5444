// SPDX-License-Identifier: Apache-2.0
// Tiles of 128 rows of 256 bytes, from random places of a pool to shared memory, in the layout that
// wgmma reads. Four stages are in flight, and nothing else runs on the SM.
//
//   box     one TMA copy a tile
//   atoms   16 TMA copies of eight rows, each by another lane: pages of any multiple of 8 tokens
//   rows    cp.async of 16 bytes, each row from a place of its own: pages of one token
#include "micro.cuh"
#include "precast/core/cp_async.cuh"

namespace micro {
namespace {

enum class Copy { box, atoms, rows };
constexpr int kStages = 4, kAtomRows = 8, kAtoms = kTileRows / kAtomRows;
constexpr int kShared = kStages * kTileBytes + kStages * 8;

struct CopyParams {
  TensorMap map;
  const unsigned char* pool;  // [rows, kRowBytes]
  uint32_t rows;
  int tiles;
  long long* clocks;  // [ctas, 1]
};

template <Copy kCopy, int kWarps>
__device__ __forceinline__ void copy_tile(const CopyParams& p, int tile, uint32_t target,
                                          uint64_t* full) {
  constexpr int kWarpRows = kTileRows / kWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t draw = tile * kTileRows;
  if constexpr (kCopy == Copy::box) {
    if (lane == 0) {
      const uint32_t row = random_place(draw, p.rows / kTileRows) * kTileRows;
      mbarrier_arrive_expect_tx(full, kTileBytes);
      copy_box(target, &p.map, full, 0, static_cast<int>(row), 0, 0);
    }
  } else if constexpr (kCopy == Copy::atoms) {
    constexpr int kWarpAtoms = kAtoms / kWarps, kAtomBytes = kAtomRows * kRowBytes;
    const int atom = warp * kWarpAtoms + lane;
    const uint32_t row = random_place(draw + atom, p.rows / kAtomRows) * kAtomRows;
    if (lane == 0) mbarrier_arrive_expect_tx(full, kWarpAtoms * kAtomBytes);
    __syncwarp();
    if (lane < kWarpAtoms) {
      copy_box(target + atom * kAtomBytes, &p.map, full, 0, static_cast<int>(row), 0, 0);
    }
  } else {
    constexpr int kChunks = kRowBytes / 16;
#pragma unroll
    for (int first = 0; first < kWarpRows; first += 32) {
      const int own_row = warp * kWarpRows + first + lane;
      const uint32_t own = random_place(draw + own_row, p.rows);
#pragma unroll
      for (int step = 0; step < kChunks; ++step) {
        const int place = step * 32 + lane, chunk = place % kChunks;
        const int row = warp * kWarpRows + first + place / kChunks;
        const uint64_t source = __shfl_sync(0xffffffffu, own, place / kChunks);
        cp_async(target + chunk / 8 * (kTileRows * kPanelBytes) + row * kPanelBytes +
                     (chunk % 8 ^ row % 8) * 16,
                 p.pool + source * kRowBytes + chunk * 16);
      }
    }
    cp_async_arrive(full);
  }
}

template <Copy kCopy, int kWarps>
__global__ __launch_bounds__(kWarps * 32) void CopyKernel(const __grid_constant__ CopyParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + kStages * kTileBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], kCopy == Copy::rows ? kWarps * 32 : kWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const long long begin = clock64();
  for (int tile = 0; tile < p.tiles + kStages; ++tile) {
    const int stage = tile % kStages, round = tile / kStages;
    if (round > 0) mbarrier_wait_parity(&full[stage], (round - 1) % 2, "a tile");
    if (tile < p.tiles) {
      copy_tile<kCopy, kWarps>(p, tile, shared_address(smem) + stage * kTileBytes, &full[stage]);
    }
  }
  if (threadIdx.x == 0) p.clocks[blockIdx.x] = clock64() - begin;
}

template <Copy kCopy>
auto kernel_of(int64_t warps) {
  void (*kernel)(CopyParams) = CopyKernel<kCopy, 1>;
  if constexpr (kCopy != Copy::box) {
    if (warps == 2) kernel = CopyKernel<kCopy, 2>;
    if (warps == 4) kernel = CopyKernel<kCopy, 4>;
  }
  return kernel;
}

// pool [rows, 256] in bytes, clocks [ctas, 1]; box_rows: 128 for boxes, 8 for atoms, 1 for rows.
void copy_rate(TensorView pool, TensorView clocks, int64_t box_rows, int64_t warps, int64_t tiles) {
  CopyParams params = {};
  params.map = pool_map(pool, static_cast<int>(box_rows));
  params.pool = static_cast<const unsigned char*>(pool.data_ptr());
  params.rows = static_cast<uint32_t>(pool.size(0));
  params.tiles = static_cast<int>(tiles);
  params.clocks = clocks_of(clocks);
  const auto kernel = box_rows == kTileRows   ? kernel_of<Copy::box>(warps)
                      : box_rows == kAtomRows ? kernel_of<Copy::atoms>(warps)
                                              : kernel_of<Copy::rows>(warps);
  launch_on_all(kernel, static_cast<int>(warps) * 32, kShared, clocks, params);
}

}  // namespace
}  // namespace micro

TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_rate, micro::copy_rate);
