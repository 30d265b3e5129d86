// Sparse attention in float32: entries in blocks, running maximum and sum per head.
//
// Used for float32 everywhere, and for bfloat16 (as float32 inside) where the variant has no
// bfloat16 dot product. A query's result depends on its own entries and their order only.
#pragma once

#include "attention_rows.h"
#include "thread_pool.h"

namespace cedar {
namespace CEDAR_ISA {

constexpr int kFloatBlock = 32;  // entries per block

enum FloatSlot { kFloatWindowSlot = 1, kFloatBlockSlot, kFloatQuerySlot, kFloatSumSlot, kFloatListSlot };

// kHeads x kEntries dot products over `dim`.
template <int kHeads, int kEntries>
CEDAR_INLINE void float_dots(const float* q, const float* rows, int dim, float scale, float* z) {
  F32 sums[kHeads][kEntries];
  for (int h = 0; h < kHeads; ++h) {
    for (int e = 0; e < kEntries; ++e) sums[h][e] = F32::zero();
  }
  for (int i = 0; i < dim; i += F32::kLanes) {
    F32 v[kEntries];
    for (int e = 0; e < kEntries; ++e) v[e] = F32::load(rows + e * dim + i);
    for (int h = 0; h < kHeads; ++h) {
      const F32 x = F32::load(q + h * dim + i);
      for (int e = 0; e < kEntries; ++e) sums[h][e] = fma(x, v[e], sums[h][e]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int e = 0; e < kEntries; ++e) z[h * kFloatBlock + e] = sums[h][e].sum() * scale;
  }
}

template <int kHeads>
CEDAR_INLINE void float_logits(const float* q, const float* rows, int count, int dim, float scale,
                               float* z) {
  int e = 0;
  for (; e + 4 <= count; e += 4) float_dots<kHeads, 4>(q, rows + e * dim, dim, scale, z + e);
  for (; e < count; ++e) float_dots<kHeads, 1>(q, rows + e * dim, dim, scale, z + e);
}

// sums[h][:] += sum over entries of p[h][e] * rows[e][:], in the order of the entries.
template <int kHeads, int kVectors>
CEDAR_INLINE void float_mix(const float* p, const float* rows, int count, int dim, float* sums) {
  F32 a[kHeads][kVectors];
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) a[h][v] = F32::load(sums + h * dim + v * F32::kLanes);
  }
  for (int e = 0; e < count; ++e) {
    F32 x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = F32::load(rows + e * dim + v * F32::kLanes);
    for (int h = 0; h < kHeads; ++h) {
      const F32 weight = F32::set(p[h * kFloatBlock + e]);
      for (int v = 0; v < kVectors; ++v) a[h][v] = fma(weight, x[v], a[h][v]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) a[h][v].store(sums + h * dim + v * F32::kLanes);
  }
}

// Running softmax of one query, all heads.
struct FloatSums {
  float* highest;  // [heads], starts at the sink
  float* total;    // [heads], relative to `highest`
  float* window;   // [heads][dim], relative to `highest`
  float* selected; // the same sums, or a second set if the parts are wanted apart
};

// Turns logits of one head into weights relative to the new maximum.
inline void float_softmax(float* z, int count, int dim, int head, const FloatSums& sums) {
  float highest = sums.highest[head];
  for (int e = 0; e < count; ++e) highest = z[e] > highest ? z[e] : highest;
  if (highest > sums.highest[head]) {
    float factor[F32::kLanes];
    exp(F32::set(sums.highest[head] - highest)).store(factor);
    sums.highest[head] = highest;
    sums.total[head] *= factor[0];
    for (float* part : {sums.window, sums.selected}) {
      float* row = part + static_cast<int64_t>(head) * dim;
      for (int i = 0; i < dim; i += F32::kLanes) {
        (F32::load(row + i) * F32::set(factor[0])).store(row + i);
      }
      if (sums.window == sums.selected) break;
    }
  }
  for (int e = count; e % F32::kLanes != 0; ++e) z[e] = -__builtin_inff();
  F32 total = F32::zero();
  for (int e = 0; e < count; e += F32::kLanes) {
    const F32 weight = exp(F32::load(z + e) - F32::set(highest));
    weight.store(z + e);
    total = total + weight;
  }
  sums.total[head] += total.sum();
}

// Takes in up to kFloatBlock rows.
inline void float_block(const float* q, const float* rows, int count, int heads, int dim,
                        float scale, float* part, const FloatSums& sums) {
  alignas(64) float z[4 * kFloatBlock];
  for (int h = 0; h < heads;) {
    const int together = heads - h >= 2 ? 2 : 1;
    const float* head_q = q + static_cast<int64_t>(h) * dim;
    if (together == 2) {
      float_logits<2>(head_q, rows, count, dim, scale, z);
    } else {
      float_logits<1>(head_q, rows, count, dim, scale, z);
    }
    for (int i = 0; i < together; ++i) float_softmax(z + i * kFloatBlock, count, dim, h + i, sums);
    float* out = part + static_cast<int64_t>(h) * dim;
    for (int i = 0; i < dim; i += 4 * F32::kLanes) {
      const int left = (dim - i) / F32::kLanes;
      if (together == 2 && left >= 4) {
        float_mix<2, 4>(z, rows + i, count, dim, out + i);
      } else {
        for (int v = 0; v < (left < 4 ? left : 4); ++v) {
          const int at = i + v * F32::kLanes;
          for (int j = 0; j < together; ++j) {
            float_mix<1, 1>(z + j * kFloatBlock, rows + at, count, dim, out + j * dim + at);
          }
        }
      }
    }
    h += together;
  }
}

class FloatAttention {
 public:
  explicit FloatAttention(const SparseAttentionCall& call)
      : call_(call), dim_(call.dim), values_(static_cast<int64_t>(call.heads) * call.dim) {}

  void run(const WindowTile& tile) {
    const size_t dim = static_cast<size_t>(dim_);
    window_ = scratch_array<float>(kFloatWindowSlot, dim * static_cast<size_t>(tile.rows + 1));
    block_ = scratch_array<float>(kFloatBlockSlot, dim * kFloatBlock);
    rows_ = scratch_array<const uint8_t*>(kFloatListSlot, static_cast<size_t>(call_.topk) + 1);
    const int64_t base = tile.count > 0 ? call_.window_base[tile.first] : 0;
    for (int i = 0; i < tile.rows; ++i) {
      window_row_to_floats(window_row(call_, base, tile.lo + i), dim_, window_ + i * dim_);
    }
    for (int n = tile.first; n < tile.first + tile.count; ++n) attend(tile, n);
  }

 private:
  void attend(const WindowTile& tile, int n) {
    const FloatSums sums = start();
    const float* q = queries(call_.q, n, 0);
    const int64_t lo = call_.window_lo[n], hi = call_.window_hi[n];
    for (int64_t p = lo; p <= hi; p += kFloatBlock) {
      const int count = static_cast<int>(hi - p + 1 < kFloatBlock ? hi - p + 1 : kFloatBlock);
      float_block(q, window_ + (p - tile.lo) * dim_, count, call_.heads, dim_, call_.scale,
                  sums.window, sums);
    }
    const int selected = selected_rows(call_, n, rows_);
    if (selected > 0 && call_.q_selected != nullptr) q = queries(call_.q_selected, n, 1);
    for (int at = 0; at < selected; at += kFloatBlock) {
      const int count = selected - at < kFloatBlock ? selected - at : kFloatBlock;
      for (int i = 0; i < count; ++i) main_row_to_floats(rows_[at + i], dim_, block_ + i * dim_);
      float_block(q, block_, count, call_.heads, dim_, call_.scale, sums.selected, sums);
    }
    const bool empty = lo > hi && selected == 0;
    write(sums.window, sums.total, empty, n, call_.out);
    if (call_.out_selected != nullptr) {
      write(sums.selected, sums.total, empty, n, call_.out_selected);
    }
  }

  FloatSums start() {
    const size_t heads = static_cast<size_t>(call_.heads), values = static_cast<size_t>(values_);
    const bool apart = call_.out_selected != nullptr;
    float* memory = scratch_array<float>(kFloatSumSlot, 2 * heads + (apart ? 2 : 1) * values);
    FloatSums sums{memory, memory + heads, memory + 2 * heads, memory + 2 * heads};
    if (apart) sums.selected += values;
    std::memset(sums.window, 0, sizeof(float) * (apart ? 2 : 1) * values);
    for (int h = 0; h < call_.heads; ++h) {
      sums.highest[h] = call_.sink[h];
      sums.total[h] = call_.sink[h] > -__builtin_inff() ? 1.f : 0.f;
    }
    return sums;
  }

  // Heads of query n as floats; `which` keeps the two query sets apart.
  const float* queries(const void* all, int n, int which) {
    if (call_.dtype == kFloat32) return static_cast<const float*>(all) + n * values_;
    float* out = scratch_array<float>(kFloatQuerySlot, 2 * static_cast<size_t>(values_)) +
                 which * values_;
    const uint16_t* in = static_cast<const uint16_t*>(all) + n * values_;
    for (int64_t i = 0; i < values_; i += F32::kLanes) F32::load_bf16(in + i).store(out + i);
    return out;
  }

  void write(const float* sums, const float* total, bool empty, int n, void* all) {
    for (int h = 0; h < call_.heads; ++h) {
      const F32 factor = F32::set(empty ? 0.f : 1.f / total[h]);
      const float* in = sums + static_cast<int64_t>(h) * dim_;
      const int64_t at = n * values_ + static_cast<int64_t>(h) * dim_;
      for (int i = 0; i < dim_; i += F32::kLanes) {
        const F32 x = F32::load(in + i) * factor;
        if (call_.dtype == kFloat32) {
          x.store(static_cast<float*>(all) + at + i);
        } else {
          x.store_bf16(static_cast<uint16_t*>(all) + at + i);
        }
      }
    }
  }

  const SparseAttentionCall& call_;
  const int dim_;
  const int64_t values_;  // of one query
  float* window_ = nullptr;
  float* block_ = nullptr;
  const uint8_t** rows_ = nullptr;
};

}  // namespace CEDAR_ISA
}  // namespace cedar
