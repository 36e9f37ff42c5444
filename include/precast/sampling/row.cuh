// SPDX-License-Identifier: Apache-2.0
// A row of probabilities or logits that stays on chip while a cluster of CTAs samples from it.
//
// Every sum has one order, whatever the number of warps and CTAs: a lane's elements of a slab one
// by one, the lanes as a butterfly, the slabs of a group one by one, the groups one by one. Each
// CTA of a cluster has one of the 8 groups, or more.
//
// On chip  the row is read once and lies as fp32 in the shared memory of the cluster's CTAs. A lane
//          reads and writes its own elements alone, so that no pass needs a barrier.
// Walked   rows that do not fit, or that little is read of but once: a pass reads the slabs that it
//          wants again, from L2.
#pragma once

#include "precast/sampling/weights.cuh"

namespace precast {

#if defined(__CUDACC__)

// The row as one warp sees it. A CTA has the slabs from `first` on; a warp of it has the first plus
// its number, and on in steps of the CTA's warps.
//
// Why loops over the elements are short ones: a CTA lives for microseconds, in which instructions
// that are run once cost more than their time.
template <typename T, bool kOnChip, typename Edit = NoEdit>
struct Row {
  const RowSource& p;
  Edit edit;
  const T* data;  // the row
  float* copy;    // the lane's first elements of the warp's first slab; walked, of the one there is
  int first;
  int count;  // slabs of the CTA; none if not positive
  Weighing weighing;

  // `memory`: of the CTA's part of the row, on chip.
  __device__ __forceinline__ Row(const RowSource& source, const Edit& edits, float* memory)
      : p(source), edit(edits), weighing{} {
    const int most = groups_of_cta() * p.slabs_of_group;
    first = cluster_rank() * most;
    count = min(most, p.slabs - first);
    copy = memory + threadIdx.x / kWarpSize * kSlab + threadIdx.x % kWarpSize * 4;
  }

  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize; }
  static __device__ __forceinline__ int warps() { return blockDim.x / kWarpSize; }

  // From one slab of the warp to the next.
  static __device__ __forceinline__ int step() { return blockDim.x * kPerLane; }

  __device__ __forceinline__ float missing() const {
    return weighing.logits ? -__int_as_float(0x7f800000) : 0.0f;
  }

  static constexpr bool kCopies = kOnChip && kArchHasBulkCopy;

  // Elements of 16 bits are copied to the second half of their slab's place, and spread from there.
  static constexpr int kCopyAt = sizeof(T) == 4 ? 0 : kSlab / 2;

  // Brings the row on chip: starts to, and waits. `copied` is the warp's own, and initialised.
  __device__ __forceinline__ void fetch(uint64_t* copied) {
    if constexpr (!kOnChip) return;
    if (kCopies && p.aligned) {
      if (threadIdx.x % kWarpSize == 0 && warp() < count) {
        uint32_t bytes = 0;
#pragma unroll 1
        for (int i = warp(); i < count; i += warps()) bytes += bytes_of(first + i);
        expect_bytes(copied, bytes);
        float* to = copy;
#pragma unroll 1
        for (int i = warp(); i < count; i += warps(), to += step()) {
          start_bulk_copy(to + kCopyAt, data + (first + i) * kSlab, bytes_of(first + i), copied);
        }
      }
    } else {
      read();
    }
  }

  __device__ __forceinline__ void arrive(uint64_t* copied) {
    if (!kCopies || !p.aligned) return;
    if (warp() < count) wait_for_bytes(copied, 0);
    if constexpr (sizeof(T) == 2) spread();
    const bool edits = Edit::kChanges && edit.is_active();
    if (!edits && (first + count) * kSlab <= p.vocab) return;
    float* at = copy;
#pragma unroll 1
    for (int i = warp(); i < count; i += warps(), at += step()) {
      const int left = p.vocab - (first + i) * kSlab - threadIdx.x % kWarpSize * 4;
      if (left < kSlab) {
#pragma unroll 1
        for (int j = 0; j < kPerLane; ++j) {
          const int to = j / 4 * 4 * kWarpSize + j % 4;
          if (to >= left) at[to] = missing();
        }
      }
      if (edits) edit_copy(edit, first + i, at);
    }
  }

  __device__ __forceinline__ void spread() const {
    float* at = copy;
#pragma unroll 1
    for (int i = warp(); i < count; i += warps(), at += step()) {
      const float* slab = at - threadIdx.x % kWarpSize * 4;
      const uint2* from = reinterpret_cast<const uint2*>(slab + kCopyAt) + threadIdx.x % kWarpSize;
      uint2 raw[kPerLane / 4];
#pragma unroll
      for (int j = 0; j < kPerLane / 4; ++j) raw[j] = from[j * kWarpSize];
      __syncwarp();  // what follows is written over what others read
#pragma unroll
      for (int j = 0; j < kPerLane / 4; ++j) {
        float y[4];
        unpack_four<T>(raw[j], y);
        *four_of(at, j) = make_float4(y[0], y[1], y[2], y[3]);
      }
    }
  }

  // All at once, by loads of the threads.
  __device__ __forceinline__ void read() {
    float* at = copy;
#pragma unroll 1
    for (int i = warp(); i < count; i += warps(), at += step()) {
      stage(p, data, edit, first + i, missing(), at);
    }
  }

  // Brings the lane's elements of a slab to shared memory, and edits them. Why not inline: it is
  // long, and wanted in every pass.
  static __device__ __noinline__ void stage(const RowSource& p, const T* data, Edit edit, int slab,
                                            float missing, float* at) {
    float y[kPerLane];
    load_slab(data, p, slab, missing, y);
    if (Edit::kChanges && edit.is_active()) edit(slab, y);
    store_copy(at, y);
  }

  static __device__ __noinline__ void edit_copy(Edit edit, int slab, float* at) {
    float y[kPerLane];
    load_copy(at, y);
    edit(slab, y);
    store_copy(at, y);
  }

  __device__ __forceinline__ uint32_t bytes_of(int slab) const {
    const int left = p.vocab - slab * kSlab;
    return (left < kSlab ? left : kSlab) * sizeof(T);
  }

  static __device__ __forceinline__ float4* four_of(float* at, int j) {
    return reinterpret_cast<float4*>(at + j * 4 * kWarpSize);
  }

  static __device__ __forceinline__ void load_copy(float* at, float (&y)[kPerLane]) {
#pragma unroll
    for (int j = 0; j < kPerLane / 4; ++j) {
      const float4 v = *four_of(at, j);
      y[4 * j] = v.x;
      y[4 * j + 1] = v.y;
      y[4 * j + 2] = v.z;
      y[4 * j + 3] = v.w;
    }
  }

  static __device__ __forceinline__ void store_copy(float* at, const float (&y)[kPerLane]) {
#pragma unroll
    for (int j = 0; j < kPerLane / 4; ++j) {
      *four_of(at, j) = make_float4(y[4 * j], y[4 * j + 1], y[4 * j + 2], y[4 * j + 3]);
    }
  }

  // Whether a slab that is read again goes by shared memory.
  __device__ __forceinline__ bool is_staged(int slab) const {
    return !p.aligned || (slab + 1) * kSlab > p.vocab || (Edit::kChanges && edit.is_active());
  }

  // What the elements of a slab are: logits until they are weighed, then weights, uncut.
  __device__ __forceinline__ void load(int slab, float* at, float (&y)[kPerLane]) const {
    if constexpr (kOnChip) {
      load_copy(at, y);
    } else {
      if (is_staged(slab)) {
        stage(p, data, edit, slab, missing(), copy);
        load_copy(copy, y);
      } else {
        load_whole_slab(data, slab, y);
      }
      if (weighing.weighed) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) y[i] = weight_of_logit(y[i], weighing);
      }
    }
  }

  // Calls f(i, y) for each slab `first + i` of the warp.
  template <typename F>
  __device__ __forceinline__ void each_slab(const F& f) {
    float* at = copy;
#pragma unroll 1
    for (int i = warp(); i < count; i += warps(), at += step()) {
      float y[kPerLane];
      load(first + i, at, y);
      f(i, y);
    }
  }

  // Folds each slab of the warp: calls fold.add(y) for the lane's elements, in order, on a copy of
  // `fold`, and done(i, copy, k, other, both), where `other` is that of a second slab k, if there
  // are both: for the latency. Slabs that are not wanted(i) are taken for empty. `kWeighs`: logits
  // of which the maximum is known become weights.
  template <bool kWeighs, typename Fold, typename Wanted, typename Done>
  __device__ __forceinline__ void fold_slabs(const Fold& fold, const Wanted& wanted,
                                             const Done& done) {
    if constexpr (!kOnChip) {
#pragma unroll 1
      for (int i = warp(); i < count; i += warps()) {
        Fold own = fold;
        if (wanted(i)) {
          float y[kPerLane];
          load(first + i, copy, y);
#pragma unroll
          for (int j = 0; j < kPerLane; ++j) own.add(y[j]);
        }
        done(i, own, i, own, false);
      }
    } else if (kWeighs && weighing.weighed && !weighing.stored) {
      float* at = copy;
#pragma unroll 1
      for (int i = warp(); i < count; i += warps(), at += step()) {
        Fold own = fold;
#pragma unroll 1
        for (int half = 0; half < kPerLane / 4; half += 4) {
          float4 y[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) y[j] = *four_of(at, half + j);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            y[j] = weights_of_logits(y[j], weighing);
            *four_of(at, half + j) = y[j];
            add_four(own, y[j]);
          }
        }
        done(i, own, i, own, false);
      }
      weighing.stored = true;
    } else {
      float* at = copy;
#pragma unroll 1
      for (int i = warp(); i < count; i += 2 * warps(), at += 2 * step()) {
        const int k = i + warps();
        const bool both = k < count, wants_one = wanted(i), wants_other = both && wanted(k);
        Fold one = fold, other = fold;
        if (wants_one && wants_other) {
#pragma unroll 1
          for (int half = 0; half < kPerLane / 4; half += 4) {
            float4 y[4], z[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              y[j] = *four_of(at, half + j);
              z[j] = *four_of(at + step(), half + j);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              add_four(one, y[j]);
              add_four(other, z[j]);
            }
          }
        } else if (wants_one || wants_other) {
          Fold own = fold;
          fold_copy(wants_one ? at : at + step(), own);
          (wants_one ? one : other) = own;
        }
        done(i, one, k, other, both);
      }
    }
  }

  template <typename Fold>
  static __device__ __forceinline__ void fold_copy(float* at, Fold& fold) {
#pragma unroll 1
    for (int half = 0; half < kPerLane / 4; half += 4) {
      float4 y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = *four_of(at, half + j);
#pragma unroll
      for (int j = 0; j < 4; ++j) add_four(fold, y[j]);
    }
  }

  template <typename Fold>
  static __device__ __forceinline__ void add_four(Fold& fold, float4 y) {
    fold.add(y.x);
    fold.add(y.y);
    fold.add(y.z);
    fold.add(y.w);
  }

  // Folds the lane's elements of slab `first + i`, of the warp, behind a pass over all.
  template <typename Fold>
  __device__ __forceinline__ void fold_slab(int i, Fold& fold) const {
    float* at = copy + (i - warp()) * kSlab;
    if constexpr (kOnChip) {
      fold_copy(at, fold);
    } else {
      float y[kPerLane];
      load(first + i, at, y);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) fold.add(y[j]);
    }
  }

  // Whether the warp has the slab `first + i`.
  __device__ __forceinline__ bool has(int i) const {
    int visited = warp();
    while (visited < i) visited += warps();
    return visited == i;
  }

  // What `lane`'s j-th element of slab `first + i` weighs, cut; behind fold_slab() of it.
  __device__ __forceinline__ float weight(int i, int lane, int j) const {
    const int place = place_in_slab(lane, j);
    const float* slab = copy - static_cast<int>(threadIdx.x % kWarpSize) * 4;
    float y;
    if constexpr (kOnChip) {
      y = slab[(i - warp()) * kSlab + place];
    } else {
      if (is_staged(first + i)) {
        __syncwarp();
        y = slab[place];
      } else {
        y = load_number(data + (first + i) * kSlab + place);
      }
      if (weighing.weighed) y = weight_of_logit(y, weighing);
    }
    return y < weighing.floor ? 0.0f : y;
  }

  __device__ __forceinline__ void start(bool logits) {
    weighing = {logits, false, false, 0.0f, 0.0f, 0.0f};
  }

  __device__ __forceinline__ void weigh(float max, float factor) {
    weighing.weighed = true;
    weighing.max = max;
    weighing.factor = factor;
  }

  // Cuts what weighs less than `floor`.
  __device__ __forceinline__ void cut(float floor) {
    weighing.floor = fmaxf(weighing.floor, floor);
  }
};

#endif  // __CUDACC__

}  // namespace precast
