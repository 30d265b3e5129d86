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

constexpr int kHeadBlock = 16;
constexpr int kTileValues = 512;  // bfloat16 values of a full tile

// Tiles 0..3: sums; 4, 5: left factors; 6, 7: right factors.
inline TileShapes attention_tile_shapes() {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) shapes.set(t, 16, 64);
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
inline void entry_row_logits(const uint16_t* q, const uint16_t* rows, int heads, int dim, float scale,
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

// Logits of 16 entries, waiting to be turned around.
struct alignas(64) PendingLogits {
  float sums[4][256];  // per block of heads

  void store(int heads, float scale, float* z, int64_t stride) const {
    for (int h = 0; h < heads; h += kHeadBlock) {
      store_logits(sums[h / kHeadBlock], nullptr, heads - h, scale, z + h * stride, stride);
    }
  }
};

// Unpacks 16 compressed rows to pair rows, 8 per column block, and multiplies them with kBlocks blocks
// of heads on the way: entry rows only ever exist as two small tiles.
template <int kBlocks>
inline void unpack_and_multiply(const uint16_t* q, const uint8_t* const* rows, int dim, uint16_t* pairs,
                                int64_t column_stride, PendingLogits& out) {
  alignas(64) uint16_t tiles[2][kTileValues];
  const int steps = dim / 32;
  const __m512i shifts = _mm512_load_si512(kEntryOrder.shifts);
  const __m512i groups = _mm512_load_si512(kEntryOrder.groups);
  const int64_t block_values = static_cast<int64_t>(kHeadBlock) * dim;
  _tile_zero(0);
  if (kBlocks > 1) _tile_zero(1);
  if (kBlocks > 2) _tile_zero(2);
  if (kBlocks > 3) _tile_zero(3);
  // A tile is multiplied a step after it was stored: a tile load waits until the stores are through.
  for (int b = 0; b <= steps; ++b) {
    if (b < steps) {
      uint16_t* tile = tiles[b & 1];
      uint16_t* to = pairs + 2 * b * column_stride;
      for (int i = 0; i < 16; i += 2) {
        const __m512i x = main_block(rows[i], rows[i] + dim / 2, b, shifts, groups);
        const __m512i y = main_block(rows[i + 1], rows[i + 1] + dim / 2, b, shifts, groups);
        _mm512_store_si512(tile + i * 32, x);
        _mm512_store_si512(tile + i * 32 + 32, y);
        store_pair(x, y, to + i / 2 * kPairValues, column_stride);
      }
    }
    if (b == 0) continue;
    const uint16_t* tile = tiles[(b - 1) & 1];
    const uint16_t* right = q + static_cast<int64_t>(b - 1) * kTileValues;
    compiler_fence(tile);
    _tile_loadd(4, tile, 64);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kBlocks > 1) {
      _tile_loadd(7, right + block_values, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kBlocks > 2) {
      _tile_loadd(6, right + 2 * block_values, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (kBlocks > 3) {
      _tile_loadd(7, right + 3 * block_values, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, out.sums[0], 64);
  if (kBlocks > 1) _tile_stored(1, out.sums[1], 64);
  if (kBlocks > 2) _tile_stored(2, out.sums[2], 64);
  if (kBlocks > 3) _tile_stored(3, out.sums[3], 64);
}

// Heads that go through at once.
constexpr int kTileHeads = 4 * kHeadBlock;

// `count` selected rows, a multiple of 32: logits to z[h * stride + e], pair rows to `pairs`, where column
// block c of 32 entries is at c * column_stride and the next 32 are block_stride further.
inline void selected_tile_logits(const uint16_t* q, const uint8_t* const* rows, int64_t count, int heads,
                                 int dim, float scale, uint16_t* pairs, int64_t column_stride,
                                 int64_t block_stride, float* z, int64_t stride) {
  PendingLogits pending[2];
  for (int64_t e = 0; e < count; e += 16) {
    uint16_t* to = pairs + e / 32 * block_stride + (e & 16) / 2 * kPairValues;
    PendingLogits& mine = pending[(e >> 4) & 1];
    switch ((heads + kHeadBlock - 1) / kHeadBlock) {
      case 1: unpack_and_multiply<1>(q, rows + e, dim, to, column_stride, mine); break;
      case 2: unpack_and_multiply<2>(q, rows + e, dim, to, column_stride, mine); break;
      case 3: unpack_and_multiply<3>(q, rows + e, dim, to, column_stride, mine); break;
      default: unpack_and_multiply<4>(q, rows + e, dim, to, column_stride, mine); break;
    }
    // These results are still on their way; meanwhile, the ones before them.
    if (e > 0) pending[((e >> 4) - 1) & 1].store(heads, scale, z + e - 16, stride);
  }
  if (count > 0) pending[((count >> 4) - 1) & 1].store(heads, scale, z + count - 16, stride);
}

// 16 columns of finished sums, `heads` rows, to the output.
CEDAR_INLINE void store_mix(const float* sums, const float* factors, int heads, int dim, uint16_t* out) {
  for (int h = 0; h < heads; ++h) {
    const __m512 x = _mm512_mul_ps(to_natural_columns(_mm512_load_ps(sums + h * 16)),
                                   _mm512_set1_ps(factors[h]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + static_cast<int64_t>(h) * dim),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
}

// Multiplies one block of weights with tiles of values at x: kHeadBlocks x kColumns sums.
template <int kHeadBlocks, int kColumns>
CEDAR_INLINE void multiply_weights(const uint16_t* weights, int64_t stride, const uint16_t* x,
                                   int64_t column_stride, int64_t row_bytes) {
  _tile_loadd(4, weights, 2 * stride);
  if (kHeadBlocks == 2) _tile_loadd(5, weights + kHeadBlock * stride, 2 * stride);
  _tile_loadd(6, x, row_bytes);
  _tile_dpbf16ps(0, 4, 6);
  if (kHeadBlocks == 2) _tile_dpbf16ps(2, 5, 6);
  _tile_loadd(7, x + column_stride, row_bytes);
  _tile_dpbf16ps(1, 4, 7);
  if (kHeadBlocks == 2) _tile_dpbf16ps(3, 5, 7);
  if (kColumns == 4) {
    _tile_loadd(6, x + 2 * column_stride, row_bytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, x + 3 * column_stride, row_bytes);
    _tile_dpbf16ps(3, 4, 7);
  }
}

CEDAR_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

template <int kHeadBlocks, int kColumns>
CEDAR_INLINE void mix_part(const uint16_t* weights, int64_t stride, const PairPart& part, int column) {
  const uint16_t* x = part.base + column * part.column_stride;
  compiler_fence(x);
  for (int64_t block = 0; block < part.blocks; ++block) {
    multiply_weights<kHeadBlocks, kColumns>(weights, stride, x, part.column_stride,
                                            2 * part.row_stride);
    weights += 32;
    x += part.block_stride;
  }
}

// 16 columns of finished sums of `heads` heads, from tile `index`, times their factors.
CEDAR_INLINE void finish_sums(int index, const float* factors, int heads, int dim, uint16_t* out) {
  alignas(64) float sums[256];
  switch (index) {
    case 0: _tile_stored(0, sums, 64); break;
    case 1: _tile_stored(1, sums, 64); break;
    case 2: _tile_stored(2, sums, 64); break;
    default: _tile_stored(3, sums, 64); break;
  }
  store_mix(sums, factors, heads, dim, out);
}

template <int kHeadBlocks, int kColumns>
CEDAR_INLINE void finish_columns(const float* factors, int heads, int dim, uint16_t* out) {
  for (int i = 0; i < kColumns; ++i) {
    finish_sums(i, factors, std::min(heads, kHeadBlock), dim, out + i * kPairColumns);
  }
  if (kHeadBlocks == 2) {
    uint16_t* below = out + static_cast<int64_t>(kHeadBlock) * dim;
    for (int i = 0; i < kColumns; ++i) {
      finish_sums(2 + i, factors + kHeadBlock, heads - kHeadBlock, dim, below + i * kPairColumns);
    }
  }
}

// What the mixing of one query needs.
struct TileMix {
  const uint16_t* weights;  // [heads, padded to whole blocks][stride]; window entries, then selected
  int64_t stride;
  PairPart window, selected;
  const float* factors;  // [heads]
  int heads, dim;
  uint16_t* out;           // everything, or the window part
  uint16_t* out_selected;  // the selected part, or null
};

// Up to kHeadBlocks blocks of heads from head h on, column blocks from `column` on.
template <int kHeadBlocks, int kColumns>
CEDAR_INLINE void mix_columns(const TileMix& mix, int h, int column) {
  const uint16_t* weights = mix.weights + h * mix.stride;
  const int heads = mix.heads - h;
  const int64_t at = static_cast<int64_t>(h) * mix.dim + column * kPairColumns;
  zero_sums();
  mix_part<kHeadBlocks, kColumns>(weights, mix.stride, mix.window, column);
  if (mix.out_selected != nullptr) {
    finish_columns<kHeadBlocks, kColumns>(mix.factors + h, heads, mix.dim, mix.out + at);
    zero_sums();
  }
  mix_part<kHeadBlocks, kColumns>(weights + mix.window.blocks * 32, mix.stride, mix.selected, column);
  uint16_t* out = mix.out_selected != nullptr ? mix.out_selected : mix.out;
  finish_columns<kHeadBlocks, kColumns>(mix.factors + h, heads, mix.dim, out + at);
}

// out[h][:] = factor_h * sum over entries of weight * value, all heads.
inline void tile_mix(const TileMix& mix) {
  const int columns = mix.dim / kPairColumns;
  for (int h = 0; h < mix.heads; h += 2 * kHeadBlock) {
    if (h + kHeadBlock < mix.heads) {
      for (int c = 0; c < columns; c += 2) mix_columns<2, 2>(mix, h, c);
      continue;
    }
    int c = 0;
    for (; c + 4 <= columns; c += 4) mix_columns<1, 4>(mix, h, c);
    if (c < columns) mix_columns<1, 2>(mix, h, c);
  }
}

}  // namespace CEDAR_ISA
}  // namespace cedar
