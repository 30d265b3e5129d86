// Logits and mixing of bfloat16 sparse attention on matrix tiles (AMX). Included by the amx variant.
//
// Logits come as 16 entries (rows) times 16 heads (columns), so that entries are used as they are
// unpacked; they are turned around on the way out. Mixing takes 16 heads (rows) of weights times 32
// entries times 16 elements (columns).
#pragma once

#include <algorithm>

#include "amx_tiles.h"
#include "attention_bf16_rows.h"

namespace cedar {
namespace CEDAR_ISA {

struct PairPart;

constexpr int kHeadBlock = 16;
constexpr int kTileValues = 512;  // bfloat16 values of a full tile

// Tiles 0..3: sums; 4, 5: left factors; 6, 7: right factors.
inline TileShapes attention_tile_shapes(int) {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) shapes.set(t, 16, 64);
  return shapes;
}

// The same with no more rows of weights and sums than there are heads: fewer rows take less time.
inline TileShapes mix_tile_shapes(int heads) {
  TileShapes shapes = attention_tile_shapes(heads);
  for (int t = 0; t < 6; ++t) shapes.set(t, heads < kHeadBlock ? heads : kHeadBlock, 64);
  return shapes;
}

// 16 x 16 transpose of 32-bit values, in registers.
CEDAR_INLINE void transpose(__m512i* x) {
  __m512i a[16], b[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i p = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
    const __m512i q = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i r = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i s = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    x[j] = _mm512_shuffle_i32x4(p, r, 0x88);
    x[8 + j] = _mm512_shuffle_i32x4(p, r, 0xdd);
    x[4 + j] = _mm512_shuffle_i32x4(q, s, 0x88);
    x[12 + j] = _mm512_shuffle_i32x4(q, s, 0xdd);
  }
}

// Queries as right factors: [head block][32 elements] tiles of 16 rows (element pairs) x 16 heads.
inline void load_query_tiles(const uint16_t* q, int heads, int dim, uint16_t* out) {
  for (int first = 0; first < heads; first += kHeadBlock) {
    for (int b = 0; b < dim; b += 32, out += kTileValues) {
      __m512i x[16];
      for (int h = 0; h < kHeadBlock; ++h) {
        x[h] = first + h < heads
                   ? to_entry_order(_mm512_loadu_si512(q + static_cast<int64_t>(first + h) * dim + b))
                   : _mm512_setzero_si512();
      }
      transpose(x);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, x[i]);
    }
  }
}

// 16 entries x 16 heads, and the other half of the sums if there is one, to z[h * stride + e].
CEDAR_INLINE void store_logits(const float* sums, const float* more, int heads, float scale, float* z,
                               int64_t stride) {
  __m512i x[16];
  for (int e = 0; e < 16; ++e) {
    __m512 v = _mm512_load_ps(sums + e * 16);
    if (more != nullptr) v = _mm512_add_ps(v, _mm512_load_ps(more + e * 16));
    x[e] = _mm512_castps_si512(_mm512_mul_ps(v, _mm512_set1_ps(scale)));
  }
  transpose(x);
  for (int h = 0; h < 16; ++h) {
    if (h < heads) _mm512_storeu_si512(z + h * stride, x[h]);
  }
}

// Logits of 32 entry rows, all heads: z[h * stride + e], scaled.
inline void tile_logits(const uint16_t* q, const uint16_t* rows, int heads, int dim, float scale,
                        float* z, int64_t stride) {
  alignas(64) float sums[4][256];
  const int steps = dim / 32, row_bytes = 2 * dim;
  const uint16_t* below = rows + 16 * dim;
  compiler_fence(rows);
  int h = 0;
  for (; h + kHeadBlock < heads; h += 2 * kHeadBlock) {
    const uint16_t* right = q + static_cast<int64_t>(h) * dim;
    const uint16_t* next = right + kHeadBlock * dim;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < steps; ++k) {
      _tile_loadd(4, rows + k * 32, row_bytes);
      _tile_loadd(6, right + k * kTileValues, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, below + k * 32, row_bytes);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(7, next + k * kTileValues, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    const int rest = heads - h - kHeadBlock;
    store_logits(sums[0], nullptr, kHeadBlock, scale, z + h * stride, stride);
    store_logits(sums[1], nullptr, kHeadBlock, scale, z + h * stride + 16, stride);
    float* behind = z + (h + kHeadBlock) * stride;
    store_logits(sums[2], nullptr, rest, scale, behind, stride);
    store_logits(sums[3], nullptr, rest, scale, behind + 16, stride);
  }
  if (h >= heads) return;
  // One block of heads: even and odd steps have their own sums, to have four chains in flight.
  const uint16_t* right = q + static_cast<int64_t>(h) * dim;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int k = 0;
  for (; k + 2 <= steps; k += 2) {
    _tile_loadd(4, rows + k * 32, row_bytes);
    _tile_loadd(6, right + k * kTileValues, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, below + k * 32, row_bytes);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, rows + k * 32 + 32, row_bytes);
    _tile_loadd(7, right + (k + 1) * kTileValues, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, below + k * 32 + 32, row_bytes);
    _tile_dpbf16ps(3, 5, 7);
  }
  if (k < steps) {
    _tile_loadd(4, rows + k * 32, row_bytes);
    _tile_loadd(6, right + k * kTileValues, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, below + k * 32, row_bytes);
    _tile_dpbf16ps(1, 5, 6);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  const bool halves = steps > 1;
  if (halves) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  store_logits(sums[0], halves ? sums[2] : nullptr, heads - h, scale, z + h * stride, stride);
  store_logits(sums[1], halves ? sums[3] : nullptr, heads - h, scale, z + h * stride + 16, stride);
}

// 16 columns of finished sums, `heads` rows, to the output.
CEDAR_INLINE void store_mix(const float* sums, const float* factors, int heads, int dim, uint16_t* out) {
  for (int h = 0; h < heads; ++h) {
    const __m512 x = _mm512_mul_ps(_mm512_load_ps(sums + h * 16), _mm512_set1_ps(factors[h]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + static_cast<int64_t>(h) * dim),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
}

// One block of heads and kColumns (2 or 4) column blocks.
template <int kColumns, class Part>
CEDAR_INLINE void tile_mix_columns(const uint16_t* weights, int64_t stride, const Part* parts,
                                   int part_count, int column) {
  _tile_zero(0);
  _tile_zero(1);
  if (kColumns == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int p = 0; p < part_count; ++p) {
    const Part& part = parts[p];
    const uint16_t* x = part.base + column * part.column_stride;
    const int64_t row_bytes = 2 * part.row_stride, next = part.column_stride;
    for (int block = 0; block < part.blocks; ++block) {
      _tile_loadd(4, weights, 2 * stride);
      _tile_loadd(6, x, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, x + next, row_bytes);
      _tile_dpbf16ps(1, 4, 7);
      if (kColumns == 4) {
        _tile_loadd(6, x + 2 * next, row_bytes);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, x + 3 * next, row_bytes);
        _tile_dpbf16ps(3, 4, 7);
      }
      weights += 32;
      x += part.block_stride;
    }
  }
}

// Two blocks of heads and two column blocks: every tile loaded is used twice.
template <class Part>
CEDAR_INLINE void tile_mix_square(const uint16_t* weights, int64_t stride, const Part* parts,
                                  int part_count, int column) {
  const uint16_t* below = weights + kHeadBlock * stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int p = 0; p < part_count; ++p) {
    const Part& part = parts[p];
    const uint16_t* x = part.base + column * part.column_stride;
    const int64_t row_bytes = 2 * part.row_stride;
    for (int block = 0; block < part.blocks; ++block) {
      _tile_loadd(4, weights, 2 * stride);
      _tile_loadd(6, x, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, x + part.column_stride, row_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, below, 2 * stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      weights += 32;
      below += 32;
      x += part.block_stride;
    }
  }
}

// out[h][:] = factor_h * sum over the parts' entries of weight * value, all heads. Rows of weights behind
// the last head, up to a whole block of heads, are zeros.
template <class Part>
inline void tile_mix(const uint16_t* weights, int64_t stride, const Part* parts, int part_count,
                     const float* factors, int heads, int dim, uint16_t* out) {
  alignas(64) float sums[4][256];
  const int columns = dim / kPairColumns;
  compiler_fence(weights);
  int h = 0;
  for (; h + kHeadBlock < heads; h += 2 * kHeadBlock) {
    const int rest = std::min(heads - h - kHeadBlock, kHeadBlock);
    for (int c = 0; c < columns; c += 2) {
      tile_mix_square(weights + h * stride, stride, parts, part_count, c);
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      uint16_t* to = out + static_cast<int64_t>(h) * dim + c * kPairColumns;
      store_mix(sums[0], factors + h, kHeadBlock, dim, to);
      store_mix(sums[1], factors + h, kHeadBlock, dim, to + kPairColumns);
      to += kHeadBlock * dim;
      store_mix(sums[2], factors + h + kHeadBlock, rest, dim, to);
      store_mix(sums[3], factors + h + kHeadBlock, rest, dim, to + kPairColumns);
    }
  }
  if (h >= heads) return;
  const int rest = heads - h;
  for (int c = 0; c < columns;) {
    const int together = c + 4 <= columns ? 4 : 2;
    if (together == 4) {
      tile_mix_columns<4>(weights + h * stride, stride, parts, part_count, c);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
    } else {
      tile_mix_columns<2>(weights + h * stride, stride, parts, part_count, c);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    for (int i = 0; i < together; ++i, ++c) {
      store_mix(sums[i], factors + h, rest, dim, out + static_cast<int64_t>(h) * dim + c * kPairColumns);
    }
  }
}

}  // namespace CEDAR_ISA
}  // namespace cedar
