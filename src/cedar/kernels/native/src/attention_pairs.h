// Sparse attention in bfloat16: logits and mixing as dot products of bfloat16 pairs with float32
// sums, on vectors or (attention_tiles.h) on matrix tiles.
//
// Up to eight heads on matrix tiles go another way (attention_narrow.h).
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
#include "attention_narrow.h"
#include "attention_tiles.h"
#else
#include "attention_vectors.h"
#endif

namespace cedar {
namespace CEDAR_ISA {

enum PairSlot {
  kEntriesSlot = 1, kPairsSlot, kBlockSlot, kSelectedSlot, kQuerySlot, kLogitsSlot, kWeightsSlot,
  kListSlot
};

CEDAR_INLINE int64_t padded_entries(int64_t count) { return (count + kBlock - 1) / kBlock * kBlock; }

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
  // For heads [first_head, first_head + heads) of the call.
  PairAttention(const SparseAttentionCall& call, int first_head, int heads)
      : call_(call),
        dim_(call.dim),
        first_head_(first_head),
        heads_(heads),
        padded_heads_((heads + 15) / 16 * 16) {}

  void run(const WindowTile& tile) {
    unpack_window(tile);
    prepare_list();
#ifdef __AMX_BF16__
    const TileScope scope(is_narrow() ? narrow::tile_shapes() : attention_tile_shapes());
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

  // Memory for the list of selected rows, and a row of zeros that fills it up to whole blocks.
  void prepare_list() {
    const size_t row_bytes = static_cast<size_t>(dim_ / 2 + dim_ / kMainGroup);
    const size_t pointers = static_cast<size_t>(padded_entries(call_.topk));
    uint8_t* memory = static_cast<uint8_t*>(
        scratch(kListSlot, pointers * sizeof(const uint8_t*) + row_bytes));
    rows_ = reinterpret_cast<const uint8_t**>(memory);
    no_row_ = reinterpret_cast<const uint8_t*>(rows_ + pointers);
    std::memset(const_cast<uint8_t*>(no_row_), 0, row_bytes);
  }

  void attend(const WindowTile& tile, int n) {
    const int64_t far = selected_rows(call_, n, rows_);
    for (int64_t e = far; e < padded_entries(far); ++e) rows_[e] = no_row_;
    const int64_t lo = call_.window_lo[n];
    const int64_t near = std::max<int64_t>(0, call_.window_hi[n] - lo + 1);
    const Entries entries{near, padded_entries(near), far, padded_entries(far),
                          near > 0 ? lo - tile.lo : 0};
    if (near + far == 0) {
      for (void* out : {call_.out, call_.out_selected}) {
        if (out != nullptr) std::memset(part_of(out, n), 0, 2 * static_cast<size_t>(values()));
      }
      return;
    }
    const size_t size = static_cast<size_t>(padded_heads_ * entries.stride());
    float* z = scratch_array<float>(kLogitsSlot, size);
    uint16_t* weights = scratch_array<uint16_t>(kWeightsSlot, size);
    float factors[kMostHeads];

#ifdef __AMX_BF16__
    if (is_narrow()) {
      attend_narrow(entries, z, weights, n);
      return;
    }
#endif
    load_queries(part_of(call_.q, n));
    for (int64_t e = 0; e < near; e += kBlock) {
      window_logits(entries_ + (entries.first + e) * dim_, z + e, entries.stride());
    }
    if (call_.q_selected != nullptr && far > 0) load_queries(part_of(call_.q_selected, n));
    selected_logits(entries.far_padded, z + entries.near_padded, entries.stride());
    softmax(entries, z, weights, factors);
    mix(entries, weights, factors, n);
  }

  void softmax(const Entries& entries, float* z, uint16_t* weights, float* factors) {
    const int64_t stride = entries.stride();
    for (int h = 0; h < heads_; ++h, z += stride, weights += stride) {
      for (int64_t e = entries.near; e < entries.near_padded; ++e) z[e] = -__builtin_inff();
      for (int64_t e = entries.near_padded + entries.far; e < stride; ++e) z[e] = -__builtin_inff();
      factors[h] = softmax_head(z, stride, call_.sink[first_head_ + h], weights);
    }
    std::memset(weights, 0, sizeof(uint16_t) * static_cast<size_t>((padded_heads_ - heads_) * stride));
  }

  int64_t values() const { return static_cast<int64_t>(heads_) * dim_; }
  // The heads of query n in an array [N, heads, dim].
  const uint16_t* part_of(const void* all, int n) const {
    return static_cast<const uint16_t*>(all) +
           (static_cast<int64_t>(n) * call_.heads + first_head_) * dim_;
  }
  uint16_t* part_of(void* all, int n) const {
    return const_cast<uint16_t*>(part_of(static_cast<const void*>(all), n));
  }

#ifdef __AMX_BF16__

  // Logits there are scaled after unused ones became minus infinity, hence only by a positive scale.
  bool is_narrow() const { return heads_ <= narrow::kHeads && call_.scale > 0; }

  void attend_narrow(const Entries& entries, float* z, uint16_t* weights, int n) {
    queries_ = scratch_array<uint16_t>(kQuerySlot, static_cast<size_t>(2 * kHeadBlock * dim_));
    selected_ = selected_memory(entries.far_padded);
    narrow::load_queries(part_of(call_.q, n), heads_, dim_, queries_);
    narrow::part_logits(queries_, window_part(entries), dim_, z);
    narrow::leave_out(entries.near, entries.near_padded, z);
    if (call_.q_selected != nullptr && entries.far > 0) {
      narrow::load_queries(part_of(call_.q_selected, n), heads_, dim_, queries_);
    }
    float* far = z + entries.near_padded * narrow::kHeads;
    for (int64_t e = 0; e < entries.far_padded; e += kBlock) {
      narrow::unpack_and_multiply(queries_, rows_ + e, dim_, selected_ + e / kBlock * block_stride(),
                                  far + e * narrow::kHeads);
    }
    narrow::leave_out(entries.far, entries.far_padded, far);
    float factors[narrow::kHeads];
    narrow::softmax(z, entries.stride() / kBlock, call_.scale, call_.sink + first_head_, heads_, weights,
                    factors);
    uint16_t* out_selected = call_.out_selected != nullptr ? part_of(call_.out_selected, n) : nullptr;
    narrow::mix_all({weights, entries.stride(), window_part(entries), selected_part(entries), factors,
                     heads_, dim_, part_of(call_.out, n), out_selected});
  }

  void load_queries(const uint16_t* q) {
    queries_ = scratch_array<uint16_t>(kQuerySlot, static_cast<size_t>(padded_heads_ * dim_));
    load_query_tiles(q, heads_, dim_, queries_);
  }

  void window_logits(const uint16_t* rows, float* z, int64_t stride) {
    entry_row_logits(queries_, rows, heads_, dim_, call_.scale, z, stride);
  }

  void selected_logits(int64_t count, float* z, int64_t stride) {
    selected_ = selected_memory(count);
    selected_tile_logits(queries_, rows_, count, heads_, dim_, call_.scale, selected_, kColumn,
                         block_stride(), z, stride);
  }

  void mix(const Entries& entries, const uint16_t* weights, const float* factors, int n) {
    uint16_t* out_selected = call_.out_selected != nullptr ? part_of(call_.out_selected, n) : nullptr;
    tile_mix({weights, entries.stride(), window_part(entries), selected_part(entries), factors, heads_,
              dim_, part_of(call_.out, n), out_selected});
  }

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

  void selected_logits(int64_t count, float* z, int64_t stride) {
    uint16_t* block = scratch_array<uint16_t>(kBlockSlot, static_cast<size_t>(kBlock * dim_));
    selected_ = selected_memory(count);
    for (int64_t e = 0; e < count; e += kBlock) {
      uint16_t* pairs = selected_ + e / kBlock * block_stride();
      for (int i = 0; i < kBlock; i += 2) {
        for (int64_t next = e + i + kAhead; next < e + i + kAhead + 2; ++next) {
          if (next < count) prefetch_main_row(rows_[next], dim_);
        }
        unpack_main_pair(rows_[e + i], rows_[e + i + 1], dim_, block + i * dim_,
                         pairs + i / 2 * kPairValues, kColumn);
      }
      vector_logits(queries_, block, heads_, dim_, call_.scale, z + e, stride);
    }
  }

  void mix(const Entries& entries, const uint16_t* weights, const float* factors, int n) {
    const PairPart parts[2] = {window_part(entries), selected_part(entries)};
    const bool apart = call_.out_selected != nullptr;
    vector_mix_all(weights, entries.stride(), parts, apart ? 1 : 2, factors, heads_, dim_,
                   part_of(call_.out, n));
    if (apart) {
      vector_mix_all(weights + entries.near_padded, entries.stride(), parts + 1, 1, factors, heads_,
                     dim_, part_of(call_.out_selected, n));
    }
  }

#endif

  PairPart window_part(const Entries& entries) const {
    return {pairs_ + entries.first * kPairValues, column_stride_, kBlock * kPairValues,
            2 * kPairValues, entries.near_padded / kBlock};
  }
  PairPart selected_part(const Entries& entries) const {
    return {selected_, kColumn, block_stride(), kPairValues, entries.far_padded / kBlock};
  }
  int64_t block_stride() const { return kColumn * (dim_ / kPairColumns); }
  uint16_t* selected_memory(int64_t count) const {
    return scratch_array<uint16_t>(kSelectedSlot,
                                   static_cast<size_t>(count / kBlock * block_stride()) + 1);
  }

  const SparseAttentionCall& call_;
  const int dim_, first_head_, heads_;
  const int64_t padded_heads_;
  uint16_t* entries_ = nullptr;  // window entry rows
  uint16_t* pairs_ = nullptr;    // window pair rows, [column block][row]
  int64_t column_stride_ = 0;
  uint16_t* queries_ = nullptr;
  uint16_t* selected_ = nullptr;  // pair rows of the selected rows, [block][column block]
  const uint8_t** rows_ = nullptr;   // selected rows of the query
  const uint8_t* no_row_ = nullptr;  // zeros
};

}  // namespace CEDAR_ISA
}  // namespace cedar
