// Sparse attention in bfloat16: logits and mixing as dot products of bfloat16 pairs with float32
// sums, on vectors or (attention_tiles.h) on matrix tiles.
//
// Per query: all logits, then the softmax, then the mixing; weights are rounded to bfloat16
// before they weigh the values, the denominator sums the unrounded ones, the output is rounded once.
// Entries are numbered from the query's own first one and padded to 32 per part (window, selected),
// so its arithmetic does not depend on the tile it is in.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "attention_bf16_rows.h"
#include "thread_pool.h"
#ifdef __AMX_BF16__
#include "attention_tiles.h"
#endif

namespace cedar {
namespace CEDAR_ISA {

constexpr int kBlock = 32;  // entries
constexpr int kAhead = 8;   // rows to fetch ahead
// Values from one column block of selected pair rows to the next: a line more than it holds, or all
// blocks would fall into the same few sets of the cache.
constexpr int64_t kColumn = (kBlock / 2 + 1) * kPairValues;

enum PairSlot {
  kEntriesSlot = 1, kPairsSlot, kBlockSlot, kSelectedSlot, kQuerySlot, kLogitsSlot, kWeightsSlot,
  kListSlot
};

CEDAR_INLINE int64_t padded_entries(int64_t count) { return (count + kBlock - 1) / kBlock * kBlock; }

#ifndef __AMX_BF16__

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
      (F32{to_natural_columns(sums[h][0])} * factor).store_bf16(to);
      (F32{to_natural_columns(sums[h][1])} * factor).store_bf16(to + kPairColumns);
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

#endif

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
    prepare_lists();
#ifdef __AMX_BF16__
    const TileScope scope(attention_tile_shapes());
#endif
    for (int n = tile.first; n < tile.first + tile.count; ++n) attend(tile, n);
  }

 private:
  // The entries of one query: window, then selected, each padded to whole blocks.
  struct Entries {
    int64_t near, near_padded, far, far_padded;
    int64_t first;  // row of the tile's window rows
    int64_t stride() const { return near_padded + far_padded; }
  };

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

  // Memory for the lists of selected rows of a query and the next, and a row of zeros that fills
  // them up to whole blocks.
  void prepare_lists() {
    const size_t row_bytes = static_cast<size_t>(dim_ / 2 + dim_ / kMainGroup);
    const size_t pointers = static_cast<size_t>(padded_entries(call_.topk));
    uint8_t* memory = static_cast<uint8_t*>(
        scratch(kListSlot, 2 * pointers * sizeof(const uint8_t*) + row_bytes));
    lists_[0].rows = reinterpret_cast<const uint8_t**>(memory);
    lists_[1].rows = lists_[0].rows + pointers;
    no_row_ = reinterpret_cast<const uint8_t*>(lists_[1].rows + pointers);
    std::memset(const_cast<uint8_t*>(no_row_), 0, row_bytes);
  }

  struct List {
    const uint8_t** rows = nullptr;
    int64_t count = 0;
    int query = -1;
  };

  const List& selected_list(int n) {
    List& list = lists_[n & 1];
    if (list.query != n) {
      list.query = n;
      list.count = selected_rows(call_, n, list.rows);
      for (int64_t e = list.count; e < padded_entries(list.count); ++e) list.rows[e] = no_row_;
    }
    return list;
  }

  void attend(const WindowTile& tile, int n) {
    const List& list = selected_list(n);
    const int64_t lo = call_.window_lo[n];
    const int64_t near = std::max<int64_t>(0, call_.window_hi[n] - lo + 1);
    const Entries entries{near, padded_entries(near), list.count, padded_entries(list.count),
                          near > 0 ? lo - tile.lo : 0};
    if (near + list.count == 0) {
      for (void* out : {call_.out, call_.out_selected}) {
        if (out != nullptr) std::memset(part_of(out, n), 0, 2 * static_cast<size_t>(values()));
      }
      return;
    }
    const size_t size = static_cast<size_t>(padded_heads_ * entries.stride());
    float* z = scratch_array<float>(kLogitsSlot, size);
    uint16_t* weights = scratch_array<uint16_t>(kWeightsSlot, size);
    float factors[kMostHeads];

    load_queries(part_of(call_.q, n));
    for (int64_t e = 0; e < near; e += kBlock) {
      window_logits(entries_ + (entries.first + e) * dim_, z + e, entries.stride());
    }
    if (call_.q_selected != nullptr && list.count > 0) load_queries(part_of(call_.q_selected, n));
    selected_logits(list, z + entries.near_padded, entries.stride());
    softmax(entries, z, weights, factors);
    const bool more = n + 1 < tile.first + tile.count;
    mix(entries, weights, factors, n, more ? &selected_list(n + 1) : nullptr);
  }

  void softmax(const Entries& entries, float* z, uint16_t* weights, float* factors) {
    const int64_t stride = entries.stride();
    for (int h = 0; h < heads_; ++h, z += stride, weights += stride) {
      for (int64_t e = entries.near; e < entries.near_padded; ++e) z[e] = -__builtin_inff();
      for (int64_t e = entries.near_padded + entries.far; e < stride; ++e) z[e] = -__builtin_inff();
      factors[h] = softmax_head(z, stride, call_.sink[h], weights);
    }
    std::memset(weights, 0, sizeof(uint16_t) * static_cast<size_t>((padded_heads_ - heads_) * stride));
  }

  int64_t values() const { return static_cast<int64_t>(heads_) * dim_; }
  const uint16_t* part_of(const void* all, int n) const {
    return static_cast<const uint16_t*>(all) + n * values();
  }
  uint16_t* part_of(void* all, int n) const { return static_cast<uint16_t*>(all) + n * values(); }

#ifdef __AMX_BF16__

  void load_queries(const uint16_t* q) {
    queries_ = scratch_array<uint16_t>(kQuerySlot, static_cast<size_t>(padded_heads_ * dim_));
    load_query_tiles(q, heads_, dim_, queries_);
  }

  void window_logits(const uint16_t* rows, float* z, int64_t stride) {
    entry_row_logits(queries_, rows, heads_, dim_, call_.scale, z, stride);
  }

  // Copies the selected rows and computes their logits, 16 rows at a time.
  void selected_logits(const List& list, float* z, int64_t stride) {
    const int64_t count = padded_entries(list.count);
    const int scale_bytes = dim_ / kMainGroup;
    const size_t value_bytes = SelectedRows::value_size(count, dim_);
    uint8_t* memory = static_cast<uint8_t*>(
        scratch(kSelectedSlot, value_bytes + static_cast<size_t>(count * scale_bytes) + 1));
    selected_ = {memory, memory + value_bytes, count, dim_, scale_bytes};
    uint16_t* tiles = scratch_array<uint16_t>(kBlockSlot, static_cast<size_t>(16 * dim_));
    for (int64_t e = 0; e < count; e += 16) {
      for (int64_t i = e + 16; i < std::min(e + 32, count); ++i) prefetch_main_row(list.rows[i], dim_);
      for (int64_t i = e; i < e + 16; ++i) selected_.copy(list.rows[i], i);
      unpack_entry_tiles(selected_, e, tiles);
      entry_tile_logits(queries_, tiles, heads_, dim_, call_.scale, z + e, stride);
    }
  }

  void mix(const Entries& entries, const uint16_t* weights, const float* factors, int n,
           const List* upcoming) {
    const WindowPairs window{pairs_ + entries.first * kPairValues, column_stride_,
                             entries.near_padded / kBlock};
    RowPrefetch prefetch;
    if (upcoming != nullptr) prefetch = {upcoming->rows, upcoming->count, 0, dim_};
    tile_mix({weights, entries.stride(), window, selected_, factors, heads_, dim_,
              part_of(call_.out, n),
              call_.out_selected != nullptr ? part_of(call_.out_selected, n) : nullptr},
             prefetch);
  }

  SelectedRows selected_{};

#else

  void load_queries(const uint16_t* q) {
    queries_ = scratch_array<uint16_t>(kQuerySlot, static_cast<size_t>(padded_heads_ * dim_));
    for (int64_t i = 0; i < values(); i += 32) {
      _mm512_store_si512(queries_ + i, to_entry_order(_mm512_loadu_si512(q + i)));
    }
    std::memset(queries_ + values(), 0,
                sizeof(uint16_t) * static_cast<size_t>((padded_heads_ - heads_) * dim_));
  }

  void window_logits(const uint16_t* rows, float* z, int64_t stride) {
    vector_logits(queries_, rows, heads_, dim_, call_.scale, z, stride);
  }

  void selected_logits(const List& list, float* z, int64_t stride) {
    const int64_t count = padded_entries(list.count);
    uint16_t* block = scratch_array<uint16_t>(kBlockSlot, static_cast<size_t>(kBlock * dim_));
    selected_ = scratch_array<uint16_t>(
        kSelectedSlot, static_cast<size_t>(count / kBlock * block_stride()) + 1);
    for (int64_t e = 0; e < count; e += kBlock) {
      uint16_t* pairs = selected_ + e / kBlock * block_stride();
      for (int i = 0; i < kBlock; i += 2) {
        for (int64_t next = e + i + kAhead; next < e + i + kAhead + 2; ++next) {
          if (next < count) prefetch_main_row(list.rows[next], dim_);
        }
        unpack_main_pair(list.rows[e + i], list.rows[e + i + 1], dim_, block + i * dim_,
                         pairs + i / 2 * kPairValues, kColumn);
      }
      vector_logits(queries_, block, heads_, dim_, call_.scale, z + e, stride);
    }
  }

  void mix(const Entries& entries, const uint16_t* weights, const float* factors, int n,
           const List*) {
    const PairPart parts[2] = {
        {pairs_ + entries.first * kPairValues, column_stride_, kBlock * kPairValues, 2 * kPairValues,
         static_cast<int>(entries.near_padded / kBlock)},
        {selected_, kColumn, block_stride(), kPairValues,
         static_cast<int>(entries.far_padded / kBlock)}};
    const bool apart = call_.out_selected != nullptr;
    vector_mix_all(weights, entries.stride(), parts, apart ? 1 : 2, factors, heads_, dim_,
                   part_of(call_.out, n));
    if (apart) {
      vector_mix_all(weights + entries.near_padded, entries.stride(), parts + 1, 1, factors, heads_,
                     dim_, part_of(call_.out_selected, n));
    }
  }

  int64_t block_stride() const { return kColumn * (dim_ / kPairColumns); }

  uint16_t* selected_ = nullptr;  // pair rows of the selected rows

#endif

  const SparseAttentionCall& call_;
  const int dim_, heads_;
  const int64_t padded_heads_;
  uint16_t* entries_ = nullptr;  // window entry rows
  uint16_t* pairs_ = nullptr;    // window pair rows, [column block][row]
  int64_t column_stride_ = 0;
  uint16_t* queries_ = nullptr;
  List lists_[2];
  const uint8_t* no_row_ = nullptr;
};

}  // namespace CEDAR_ISA
}  // namespace cedar
