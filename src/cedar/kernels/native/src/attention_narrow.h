// Bfloat16 sparse attention of up to eight heads on matrix tiles (AMX). Included by the amx variant.
//
// Eight heads fill half of a tile. Here the other half holds the same heads again: a pair row (two
// entries, element by element) meets queries with zeros between their elements, once for the first
// entry and once for the second. So logits come from the pair rows that mixing needs anyway, no entry
// rows are made, and the softmax finds full vectors: lane h is head h of the even entry, lane 8 + h
// head h of the odd one. Mixing takes tiles of eight rows of weights.
#pragma once

#include "amx_tiles.h"
#include "attention_tiles.h"

namespace cedar {
namespace CEDAR_ISA {
namespace narrow {

constexpr int kHeads = 8;
constexpr int kBlockLogits = 256;  // logits 16 pairs of entries x 16 lanes
constexpr int kBlockWeights = kHeads * kBlock;

// Tile 0: logits; 1..4: mixed sums; 5: weights; 6, 7: pair rows and queries.
inline TileShapes tile_shapes() {
  TileShapes shapes;
  for (int t : {0, 6, 7}) shapes.set(t, 16, 64);
  for (int t = 1; t < 6; ++t) shapes.set(t, kHeads, 64);
  return shapes;
}

// Queries as right factors: per column block a tile of 16 elements x (8 heads, 0), (0, 8 heads).
inline void load_queries(const uint16_t* q, int heads, int dim, uint16_t* out) {
  for (int c = 0; c < dim; c += kPairColumns, out += kTileValues) {
    __m512i x[16];
    for (int h = 0; h < kHeads; ++h) {
      x[h] = _mm512_setzero_si512();
      if (h < heads) {
        const __m512i natural = _mm512_cvtepu16_epi32(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + static_cast<int64_t>(h) * dim + c)));
        // A 4 x 4 transpose undoes itself: natural order to columns is the same as back.
        x[h] = _mm512_castps_si512(to_natural_columns(_mm512_castsi512_ps(natural)));
      }
      x[kHeads + h] = _mm512_slli_epi32(x[h], 16);
    }
    transpose(x);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, x[i]);
  }
}

// Adds the products of one column block to the logits in tile 0.
CEDAR_INLINE void multiply_column(const uint16_t* q, const uint16_t* pairs, int64_t row_bytes) {
  _tile_loadd(6, pairs, row_bytes);
  _tile_loadd(7, q, 64);
  _tile_dpbf16ps(0, 6, 7);
}

// Logits of all entries of a part that is unpacked.
inline void part_logits(const uint16_t* q, const PairPart& part, int dim, float* z) {
  compiler_fence(part.base);
  for (int64_t block = 0; block < part.blocks; ++block, z += kBlockLogits) {
    const uint16_t* x = part.base + block * part.block_stride;
    _tile_zero(0);
    for (int c = 0; c < dim / kPairColumns; ++c) {
      multiply_column(q + c * kTileValues, x + c * part.column_stride, 2 * part.row_stride);
    }
    _tile_stored(0, z, 64);
  }
  compiler_fence(z);
}

// Unpacks kBlock compressed rows to pair rows and multiplies them on the way.
inline void unpack_and_multiply(const uint16_t* q, const uint8_t* const* rows, int dim, uint16_t* pairs,
                                float* z) {
  const int steps = dim / 32;
  const __m512i shifts = _mm512_load_si512(kEntryOrder.shifts);
  const __m512i groups = _mm512_load_si512(kEntryOrder.groups);
  _tile_zero(0);
  // Rows are multiplied a step after they were stored: a tile load waits until the stores are through.
  for (int b = 0; b <= steps; ++b) {
    if (b < steps) {
      uint16_t* to = pairs + 2 * b * kColumn;
      for (int i = 0; i < kBlock; i += 2) {
        const __m512i x = main_block(rows[i], rows[i] + dim / 2, b, shifts, groups);
        const __m512i y = main_block(rows[i + 1], rows[i + 1] + dim / 2, b, shifts, groups);
        store_pair(x, y, to + i / 2 * kPairValues, kColumn);
      }
    }
    if (b == 0) continue;
    compiler_fence(pairs);
    for (int c = 2 * b - 2; c < 2 * b; ++c) {
      multiply_column(q + c * kTileValues, pairs + c * kColumn, 2 * kPairValues);
    }
  }
  _tile_stored(0, z, 64);
  compiler_fence(z);
}

// 8 x 8 transpose of 64-bit values, in registers.
CEDAR_INLINE void transpose_quads(__m512i* x) {
  __m512i a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    b[i] = _mm512_shuffle_i64x2(a[i], a[2 + i], 0x88);
    b[2 + i] = _mm512_shuffle_i64x2(a[i], a[2 + i], 0xdd);
    b[4 + i] = _mm512_shuffle_i64x2(a[4 + i], a[6 + i], 0x88);
    b[6 + i] = _mm512_shuffle_i64x2(a[4 + i], a[6 + i], 0xdd);
  }
  for (int i = 0; i < 2; ++i) {
    x[i] = _mm512_shuffle_i64x2(b[i], b[4 + i], 0x88);
    x[4 + i] = _mm512_shuffle_i64x2(b[i], b[4 + i], 0xdd);
    x[2 + i] = _mm512_shuffle_i64x2(b[2 + i], b[6 + i], 0x88);
    x[6 + i] = _mm512_shuffle_i64x2(b[2 + i], b[6 + i], 0xdd);
  }
}

// Entries [from, to) of the logits do not count.
inline void leave_out(int64_t from, int64_t to, float* z) {
  for (int64_t e = from; e < to; ++e) {
    _mm256_storeu_ps(z + e * kHeads, _mm256_set1_ps(-__builtin_inff()));
  }
}

// The lanes of even entries with those of odd ones.
CEDAR_INLINE __m512 other_half(__m512 x) { return _mm512_shuffle_f32x4(x, x, 0x4e); }

// Softmax of all heads over `blocks` blocks of unscaled logits. Writes rounded weights relative to the
// largest, [block][head][entry], and 1 / denominator of the heads.
inline void softmax(const float* z, int64_t blocks, float scale, const float* sink, int heads,
                    uint16_t* weights, float* factors) {
  alignas(64) static constexpr uint16_t kQuads[32] = {
      0, 8,  16, 24, 1, 9,  17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
      4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31};
  const __m512i quads = _mm512_load_si512(kQuads);
  const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
  const __m512 to_log2 = _mm512_mul_ps(_mm512_set1_ps(scale), log2e);
  __m512 tops[4];
  for (int i = 0; i < 4; ++i) tops[i] = _mm512_load_ps(z + i * 16);
  for (int64_t line = 4; line < blocks * 16; line += 4) {
    for (int i = 0; i < 4; ++i) tops[i] = _mm512_max_ps(tops[i], _mm512_load_ps(z + (line + i) * 16));
  }
  __m512 top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
  top = _mm512_mul_ps(_mm512_max_ps(top, other_half(top)), to_log2);
  __m512 totals[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t block = 0; block < blocks; ++block, z += kBlockLogits, weights += kBlockWeights) {
    __m512i x[8];
    for (int i = 0; i < 8; ++i) {
      const __m512 a = exp2(_mm512_fmsub_ps(_mm512_load_ps(z + i * 32), to_log2, top));
      const __m512 b = exp2(_mm512_fmsub_ps(_mm512_load_ps(z + i * 32 + 16), to_log2, top));
      totals[0] = _mm512_add_ps(totals[0], a);
      totals[1] = _mm512_add_ps(totals[1], b);
      x[i] = _mm512_permutexvar_epi16(quads, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
    }
    transpose_quads(x);
    for (int h = 0; h < kHeads; ++h) _mm512_store_si512(weights + h * kBlock, x[h]);
  }
  const __m512 total = _mm512_add_ps(totals[0], totals[1]);
  const __mmask16 mask = static_cast<__mmask16>((1u << heads) - 1u);
  const __m512 of_sink =
      exp2(_mm512_fmsub_ps(_mm512_maskz_loadu_ps(mask, sink), log2e, top));
  const __m512 denominator = _mm512_add_ps(_mm512_add_ps(total, other_half(total)), of_sink);
  _mm512_mask_storeu_ps(factors, mask, _mm512_div_ps(_mm512_set1_ps(1.f), denominator));
}

CEDAR_INLINE void zero_sums() {
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
}

template <int kColumns>
CEDAR_INLINE void mix_part(const uint16_t* weights, const PairPart& part, int column) {
  const uint16_t* x = part.base + column * part.column_stride;
  const int64_t row_bytes = 2 * part.row_stride;
  compiler_fence(x);
  for (int64_t block = 0; block < part.blocks; ++block) {
    _tile_loadd(5, weights, 64);
    _tile_loadd(6, x, row_bytes);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(7, x + part.column_stride, row_bytes);
    _tile_dpbf16ps(2, 5, 7);
    if (kColumns == 4) {
      _tile_loadd(6, x + 2 * part.column_stride, row_bytes);
      _tile_dpbf16ps(3, 5, 6);
      _tile_loadd(7, x + 3 * part.column_stride, row_bytes);
      _tile_dpbf16ps(4, 5, 7);
    }
    weights += kBlockWeights;
    x += part.block_stride;
  }
}

template <int kColumns>
CEDAR_INLINE void finish_columns(const TileMix& mix, uint16_t* out) {
  alignas(64) float sums[4][kHeads * kPairColumns];
  _tile_stored(1, sums[0], 64);
  _tile_stored(2, sums[1], 64);
  if (kColumns == 4) {
    _tile_stored(3, sums[2], 64);
    _tile_stored(4, sums[3], 64);
  }
  compiler_fence(sums);
  for (int i = 0; i < kColumns; ++i) {
    store_mix(sums[i], mix.factors, mix.heads, mix.dim, out + i * kPairColumns);
  }
}

template <int kColumns>
CEDAR_INLINE void mix_columns(const TileMix& mix, int column) {
  const int at = column * kPairColumns;
  zero_sums();
  mix_part<kColumns>(mix.weights, mix.window, column);
  if (mix.out_selected != nullptr) {
    finish_columns<kColumns>(mix, mix.out + at);
    zero_sums();
  }
  mix_part<kColumns>(mix.weights + mix.window.blocks * kBlockWeights, mix.selected, column);
  uint16_t* out = mix.out_selected != nullptr ? mix.out_selected : mix.out;
  finish_columns<kColumns>(mix, out + at);
}

// out[h][:] = factor_h * sum over entries of weight * value; weights as softmax() writes them.
inline void mix_all(const TileMix& mix) {
  const int columns = mix.dim / kPairColumns;
  int c = 0;
  for (; c + 4 <= columns; c += 4) mix_columns<4>(mix, c);
  if (c < columns) mix_columns<2>(mix, c);
}

}  // namespace narrow
}  // namespace CEDAR_ISA
}  // namespace cedar
