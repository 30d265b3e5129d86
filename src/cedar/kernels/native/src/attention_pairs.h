// Sparse attention in bfloat16: logits and mixing as dot products of bfloat16 pairs with float32
// sums, on vectors or (attention_tiles.h) on matrix tiles.
//
// Per query: all logits, then the softmax, then the mixing; weights are rounded to bfloat16
// before they weigh the values, the denominator sums the unrounded ones, the output is rounded once.
// Entries are numbered from the query's own first one and padded to 32 per part (window, selected),
// so its arithmetic does not depend on the tile it is in.
#pragma once

#include <algorithm>

#include "attention_bf16_rows.h"
#include "thread_pool.h"
#ifdef __AMX_BF16__
#include "attention_tiles.h"
#endif

namespace cedar {
namespace CEDAR_ISA {

constexpr int kBlock = 32;  // entries

enum PairSlot {
  kEntriesSlot = 1, kPairsSlot, kBlockSlot, kSelectedSlot, kQuerySlot, kLogitsSlot, kWeightsSlot,
  kListSlot
};

CEDAR_INLINE int64_t padded_entries(int64_t count) { return (count + kBlock - 1) / kBlock * kBlock; }

// Sums of 16 vectors, one per lane.
CEDAR_INLINE __m512 sum_each(const __m512* v) {
  __m512 a[8], b[4], c[2];
  const auto fold = [](__m512 x, __m512 y, auto low, auto high) { return _mm512_add_ps(low(x, y), high(x, y)); };
  // Lane l of the result must be vector l: fold 128-bit lanes last.
  for (int i = 0; i < 8; ++i) {
    a[i] = fold(v[2 * i], v[2 * i + 1],
                [](__m512 x, __m512 y) { return _mm512_unpacklo_ps(x, y); },
                [](__m512 x, __m512 y) { return _mm512_unpackhi_ps(x, y); });
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; ++i) {
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88),
                       _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

CEDAR_INLINE __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Logits of kBlock entry rows on vectors: z[h * stride + e], scaled. Heads are padded to fours.
inline void vector_logits(const uint16_t* q, const uint16_t* rows, int heads, int dim, float scale,
                          float* z, int64_t stride) {
  for (int h = 0; h < heads; h += 4) {
    for (int e = 0; e < kBlock; e += 4) {
      __m512 sums[16];
      for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
      for (int b = 0; b < dim; b += 32) {
        __m512i x[4];
        for (int j = 0; j < 4; ++j) x[j] = _mm512_load_si512(rows + (e + j) * dim + b);
        for (int i = 0; i < 4; ++i) {
          const __m512i y = _mm512_load_si512(q + (h + i) * dim + b);
          for (int j = 0; j < 4; ++j) sums[4 * i + j] = dot_pairs(sums[4 * i + j], y, x[j]);
        }
      }
      const __m512 all = _mm512_mul_ps(sum_each(sums), _mm512_set1_ps(scale));
      _mm_storeu_ps(z + h * stride + e, _mm512_castps512_ps128(all));
      _mm_storeu_ps(z + (h + 1) * stride + e, _mm512_extractf32x4_ps(all, 1));
      _mm_storeu_ps(z + (h + 2) * stride + e, _mm512_extractf32x4_ps(all, 2));
      _mm_storeu_ps(z + (h + 3) * stride + e, _mm512_extractf32x4_ps(all, 3));
    }
  }
}

// Pair rows of one part of a query's entries: block c of 16 columns, pair i, is at
// base + c * column_stride + (i / 16) * block_stride + (i % 16) * row_stride.
struct PairPart {
  const uint16_t* base;
  int64_t column_stride, block_stride, row_stride;
  int blocks;  // of kBlock entries
};

// Sums of weights times values for kHeads heads and two column blocks, added to `sums`.
template <int kHeads>
CEDAR_INLINE void vector_mix(const uint16_t* weights, int64_t stride, const PairPart& part,
                             int column, __m512 sums[kHeads][2]) {
  for (int block = 0; block < part.blocks; ++block) {
    const uint16_t* x = part.base + column * part.column_stride + block * part.block_stride;
    const uint16_t* y = x + part.column_stride;
    for (int i = 0; i < kBlock / 2; ++i) {
      const __m512i a = _mm512_load_si512(x + i * part.row_stride);
      const __m512i b = _mm512_load_si512(y + i * part.row_stride);
      for (int h = 0; h < kHeads; ++h) {
        int32_t pair;
        std::memcpy(&pair, weights + h * stride + block * kBlock + 2 * i, 4);
        const __m512i w = _mm512_set1_epi32(pair);
        sums[h][0] = dot_pairs(sums[h][0], w, a);
        sums[h][1] = dot_pairs(sums[h][1], w, b);
      }
    }
  }
}

template <int kHeads>
inline void vector_mix_heads(const uint16_t* weights, int64_t stride, const PairPart* parts,
                             int part_count, const float* factors, int dim, uint16_t* out) {
  for (int column = 0; column < dim / kPairColumns; column += 2) {
    __m512 sums[kHeads][2];
    for (int h = 0; h < kHeads; ++h) sums[h][0] = sums[h][1] = _mm512_setzero_ps();
    const uint16_t* w = weights;
    for (int p = 0; p < part_count; ++p) {
      vector_mix<kHeads>(w, stride, parts[p], column, sums);
      w += parts[p].blocks * kBlock;
    }
    for (int h = 0; h < kHeads; ++h) {
      const F32 factor = F32::set(factors[h]);
      uint16_t* to = out + h * dim + column * kPairColumns;
      (F32{sums[h][0]} * factor).store_bf16(to);
      (F32{sums[h][1]} * factor).store_bf16(to + kPairColumns);
    }
  }
}

// out[h][:] = factor_h * sum over the parts' entries of weight * value, all heads.
inline void vector_mix_all(const uint16_t* weights, int64_t stride, const PairPart* parts,
                           int part_count, const float* factors, int heads, int dim, uint16_t* out) {
  int h = 0;
  const auto some = [&](auto function) {
    function(weights + h * stride, stride, parts, part_count, factors + h, dim,
             out + static_cast<int64_t>(h) * dim);
  };
  for (; h + 8 <= heads; h += 8) some(vector_mix_heads<8>);
  for (; h + 4 <= heads; h += 4) some(vector_mix_heads<4>);
  for (; h < heads; ++h) some(vector_mix_heads<1>);
}

// 2^t to about 3e-7 relative, below 2^-149 gives 0.
CEDAR_INLINE __m512 exp2(__m512 t) {
  t = _mm512_max_ps(t, _mm512_set1_ps(-160.f));
  // The fraction above the floor, which scalef takes out of t by itself.
  const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.8775767e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.9893397e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5826318e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4015361e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9315308e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9999994e-1f));
  return _mm512_scalef_ps(p, t);
}

// Softmax of one head: logits z[0..count), count a multiple of 32, unused entries -infinity. Writes
// rounded weights relative to the largest and returns 1 / denominator.
inline float softmax_head(const float* z, int64_t count, float sink, uint16_t* weights) {
  __m512 top_v = _mm512_loadu_ps(z);
  for (int64_t e = 16; e < count; e += 16) top_v = _mm512_max_ps(top_v, _mm512_loadu_ps(z + e));
  const float top = _mm512_reduce_max_ps(top_v);
  constexpr float kLog2E = 1.44269504088896341f;
  const __m512 log2e = _mm512_set1_ps(kLog2E);
  const __m512 subtract = _mm512_set1_ps(top);
  __m512 totals[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t e = 0; e < count; e += 32) {
    const __m512 a =
        exp2(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(z + e), subtract), log2e));
    const __m512 b =
        exp2(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(z + e + 16), subtract), log2e));
    totals[0] = _mm512_add_ps(totals[0], a);
    totals[1] = _mm512_add_ps(totals[1], b);
    _mm512_storeu_si512(weights + e, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
  }
  float of_sink[F32::kLanes];
  exp(F32::set(sink - top)).store(of_sink);
  return 1.f / (_mm512_reduce_add_ps(_mm512_add_ps(totals[0], totals[1])) + of_sink[0]);
}

class PairAttention {
 public:
  explicit PairAttention(const SparseAttentionCall& call)
      : call_(call),
        dim_(call.dim),
        heads_(call.heads),
        padded_heads_((call.heads + 15) / 16 * 16) {}

  void run(const WindowTile& tile) {
    unpack_window(tile);
    block_ = scratch_array<uint16_t>(kBlockSlot, static_cast<size_t>(kBlock) * static_cast<size_t>(dim_));
    rows_ = scratch_array<const uint8_t*>(kListSlot, static_cast<size_t>(call_.topk) + 1);
#ifdef __AMX_BF16__
    const TileScope scope(attention_tile_shapes(heads_));
#endif
    for (int n = tile.first; n < tile.first + tile.count; ++n) attend(tile, n);
  }

 private:
  // Window rows of the tile, and kBlock rows of zeros behind them for blocks that reach over the end.
  void unpack_window(const WindowTile& tile) {
    const int64_t padded = tile.rows + kBlock;
    const size_t values = static_cast<size_t>((padded + 1) * dim_);
    entries_ = scratch_array<uint16_t>(kEntriesSlot, values);
    pairs_ = scratch_array<uint16_t>(kPairsSlot, 2 * values);
    column_stride_ = padded * kPairValues;
    if (tile.rows == 0) return;
    const int64_t base = call_.window_base[tile.first];
    for (int i = 0; i < tile.rows; ++i) {
      unpack_window_row(window_row(call_, base, tile.lo + i), dim_, entries_ + i * dim_);
    }
    std::memset(entries_ + static_cast<int64_t>(tile.rows) * dim_, 0,
                sizeof(uint16_t) * static_cast<size_t>((kBlock + 1) * dim_));
    // A pair row for every two neighbours, because windows begin at odd positions, too.
    for (int64_t i = 0; i < padded; ++i) {
      pair_rows(entries_ + i * dim_, entries_ + (i + 1) * dim_, dim_, pairs_ + i * kPairValues,
                column_stride_);
    }
  }

  void attend(const WindowTile& tile, int n) {
    const int64_t lo = call_.window_lo[n];
    const int64_t near = std::max<int64_t>(0, call_.window_hi[n] - lo + 1);
    const int far = selected_rows(call_, n, rows_);
    const int64_t values = static_cast<int64_t>(heads_) * dim_;
    uint16_t* out = static_cast<uint16_t*>(call_.out) + n * values;
    uint16_t* out_selected =
        call_.out_selected == nullptr ? nullptr : static_cast<uint16_t*>(call_.out_selected) + n * values;
    if (near + far == 0) {
      std::memset(out, 0, sizeof(uint16_t) * static_cast<size_t>(values));
      if (out_selected != nullptr) std::memset(out_selected, 0, sizeof(uint16_t) * static_cast<size_t>(values));
      return;
    }
    const int64_t near_padded = padded_entries(near), far_padded = padded_entries(far);
    const int64_t stride = near_padded + far_padded;
    float* z = scratch_array<float>(kLogitsSlot, static_cast<size_t>(padded_heads_ * stride));
    uint16_t* weights =
        scratch_array<uint16_t>(kWeightsSlot, static_cast<size_t>(padded_heads_ * stride));

    const bool other = call_.q_selected != nullptr;
    load_queries(static_cast<const uint16_t*>(call_.q) + n * values);
    for (int64_t e = 0; e < near; e += kBlock) {
      logits(entries_ + (lo - tile.lo + e) * dim_, z + e, stride);
    }
    if (other && far > 0) load_queries(static_cast<const uint16_t*>(call_.q_selected) + n * values);
    uint16_t* selected = scratch_array<uint16_t>(
        kSelectedSlot, static_cast<size_t>(far_padded) * static_cast<size_t>(dim_) + 1);
    for (int e = 0; e < far; e += kBlock) {
      unpack_selected(e, std::min(kBlock, far - e), selected + static_cast<int64_t>(e) * dim_);
      logits(block_, z + near_padded + e, stride);
    }

    float factors[kMostHeads];
    for (int h = 0; h < heads_; ++h) {
      float* row = z + h * stride;
      for (int64_t e = near; e < near_padded; ++e) row[e] = -__builtin_inff();
      for (int64_t e = near_padded + far; e < stride; ++e) row[e] = -__builtin_inff();
      factors[h] = softmax_head(row, stride, call_.sink[h], weights + h * stride);
    }
    for (int64_t h = heads_; h < padded_heads_; ++h) {
      std::memset(weights + h * stride, 0, sizeof(uint16_t) * static_cast<size_t>(stride));
    }

    const PairPart parts[2] = {
        {pairs_ + (lo - tile.lo) * kPairValues, column_stride_, kBlock * kPairValues, 2 * kPairValues,
         static_cast<int>(near_padded / kBlock)},
        {selected, kBlock / 2 * kPairValues, kBlock * dim_, kPairValues,
         static_cast<int>(far_padded / kBlock)}};
    if (out_selected == nullptr) {
      mix(weights, stride, parts, 2, factors, out);
    } else {
      mix(weights, stride, parts, 1, factors, out);
      mix(weights + near_padded, stride, parts + 1, 1, factors, out_selected);
    }
  }

  // Up to kBlock selected rows: entry rows to block_, pair rows to `pairs`, zeros behind the last.
  void unpack_selected(int from, int count, uint16_t* pairs) {
    constexpr int64_t kColumn = kBlock / 2 * kPairValues;
    int i = 0;
    for (; i + 2 <= count; i += 2) {
      unpack_main_pair(rows_[from + i], rows_[from + i + 1], dim_, block_ + i * dim_,
                       pairs + i / 2 * kPairValues, kColumn);
    }
    if (i == kBlock) return;
    std::memset(block_ + i * dim_, 0, sizeof(uint16_t) * static_cast<size_t>((kBlock - i) * dim_));
    if (i < count) {
      uint16_t* entry = block_ + i * dim_;
      unpack_main_pair(rows_[from + i], rows_[from + i], dim_, entry, pairs + i / 2 * kPairValues,
                       kColumn);
      std::memset(entry + dim_, 0, sizeof(uint16_t) * static_cast<size_t>(dim_));
    }
    for (; i < kBlock; i += 2) {
      pair_rows(block_ + i * dim_, block_ + (i + 1) * dim_, dim_, pairs + i / 2 * kPairValues, kColumn);
    }
  }

  void load_queries(const uint16_t* q) {
    const size_t size = static_cast<size_t>(padded_heads_) * static_cast<size_t>(dim_);
    queries_ = scratch_array<uint16_t>(kQuerySlot, size);
#ifdef __AMX_BF16__
    load_query_tiles(q, heads_, dim_, queries_);
#else
    for (int h = 0; h < heads_; ++h) {
      for (int b = 0; b < dim_; b += 32) {
        _mm512_store_si512(queries_ + h * dim_ + b,
                           to_entry_order(_mm512_loadu_si512(q + h * dim_ + b)));
      }
    }
    std::memset(queries_ + heads_ * dim_, 0,
                sizeof(uint16_t) * static_cast<size_t>((padded_heads_ - heads_) * dim_));
#endif
  }

  void logits(const uint16_t* rows, float* z, int64_t stride) {
#ifdef __AMX_BF16__
    tile_logits(queries_, rows, heads_, dim_, call_.scale, z, stride);
#else
    vector_logits(queries_, rows, heads_, dim_, call_.scale, z, stride);
#endif
  }

  void mix(const uint16_t* weights, int64_t stride, const PairPart* parts, int count,
           const float* factors, uint16_t* out) {
#ifdef __AMX_BF16__
    tile_mix(weights, stride, parts, count, factors, heads_, dim_, out);
#else
    vector_mix_all(weights, stride, parts, count, factors, heads_, dim_, out);
#endif
  }

  const SparseAttentionCall& call_;
  const int dim_, heads_;
  const int64_t padded_heads_;
  uint16_t* entries_ = nullptr;   // window entry rows
  uint16_t* pairs_ = nullptr;     // window pair rows, [column block][row]
  int64_t column_stride_ = 0;
  uint16_t* block_ = nullptr;     // entry rows of kBlock selected rows
  uint16_t* queries_ = nullptr;
  const uint8_t** rows_ = nullptr;
};

}  // namespace CEDAR_ISA
}  // namespace cedar
