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

// Selected rows of one query, copied as they are stored. Every pass over the columns reads a slice of
// 128 elements of all rows, so a slice of a row is one line, and slices follow each other.
//
// Unpacked values never leave the first cache: writing them out and reading them back costs more
// than unpacking again, once for the logits and once per two blocks of heads for the mixing.
struct SelectedRows {
  static constexpr int kSliceBytes = 64;  // 128 elements

  uint8_t* values;  // [slices][count][kSliceBytes]
  uint8_t* scales;  // [count][scale_bytes]
  int64_t count;    // a multiple of kBlock
  int dim, scale_bytes;

  static size_t value_size(int64_t count, int dim) {
    return static_cast<size_t>((dim + 127) / 128 * count * kSliceBytes);
  }

  void copy(const uint8_t* row, int64_t to) {
    const int value_bytes = dim / 2;
    for (int at = 0, slice = 0; at < value_bytes; at += kSliceBytes, ++slice) {
      const int left = value_bytes - at;
      const __mmask64 in = left >= kSliceBytes ? ~0ull : (1ull << left) - 1;
      _mm512_store_si512(values + (slice * count + to) * kSliceBytes,
                         _mm512_maskz_loadu_epi8(in, row + at));
    }
    std::memcpy(scales + to * scale_bytes, row + value_bytes, static_cast<size_t>(scale_bytes));
  }

  // Block b (32 elements) of rows from `first` on: where its packed values and scales are.
  CEDAR_INLINE const uint8_t* packed(int64_t first, int b) const {
    return values + ((b >> 2) * count + first) * kSliceBytes + (b & 3) * 16;
  }
};

// Asks for the rows of the next query while the matrix unit works on this one.
struct RowPrefetch {
  const uint8_t* const* rows = nullptr;
  int64_t count = 0, next = 0;
  int dim = 0;

  CEDAR_INLINE void some(int64_t rows_now) {
    for (; rows_now > 0 && next < count; --rows_now, ++next) prefetch_main_row(rows[next], dim);
  }
};

struct EntryConstants {
  __m512i shifts, groups;
  EntryConstants()
      : shifts(_mm512_load_si512(kEntryOrder.shifts)), groups(_mm512_load_si512(kEntryOrder.groups)) {}
};

// 16 selected rows from `first` on as entry-row tiles, [block][16 rows][32 values].
inline void unpack_entry_tiles(const SelectedRows& rows, int64_t first, uint16_t* tiles) {
  const EntryConstants constants;
  for (int b = 0; b < rows.dim / 32; ++b) {
    const uint8_t* packed = rows.packed(first, b);
    const uint8_t* scales = rows.scales + first * rows.scale_bytes + 2 * b;
    for (int i = 0; i < 16; ++i, tiles += 32) {
      _mm512_store_si512(tiles, main_block(packed, scales, 0, constants.shifts, constants.groups));
      packed += SelectedRows::kSliceBytes;
      scales += rows.scale_bytes;
    }
  }
}

// Block b of 32 selected rows from `first` on as two pair-row tiles: 16 pairs, two column blocks.
CEDAR_INLINE void unpack_pair_tiles(const SelectedRows& rows, int64_t first, int b,
                                    const EntryConstants& constants, uint16_t* tiles) {
  const uint8_t* packed = rows.packed(first, b);
  const uint8_t* scales = rows.scales + first * rows.scale_bytes + 2 * b;
  for (int i = 0; i < 16; ++i) {
    const __m512i x = main_block(packed, scales, 0, constants.shifts, constants.groups);
    const __m512i y = main_block(packed + SelectedRows::kSliceBytes, scales + rows.scale_bytes, 0,
                                 constants.shifts, constants.groups);
    store_pair(x, y, tiles + i * kPairValues, kTileValues);
    packed += 2 * SelectedRows::kSliceBytes;
    scales += 2 * rows.scale_bytes;
  }
}

// Logits of 16 entries given as tiles, all heads: z[h * stride + e], scaled.
inline void entry_tile_logits(const uint16_t* q, const uint16_t* tiles, int heads, int dim, float scale,
                              float* z, int64_t stride) {
  alignas(64) float sums[2][256];
  const int steps = dim / 32;
  compiler_fence(tiles);
  for (int h = 0; h < heads; h += 2 * kHeadBlock) {
    const uint16_t* right = q + static_cast<int64_t>(h) * dim;
    const bool two = h + kHeadBlock < heads;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
      const uint16_t* next = right + kHeadBlock * dim;
      for (int k = 0; k < steps; ++k) {
        _tile_loadd(4, tiles + k * kTileValues, 64);
        _tile_loadd(6, right + k * kTileValues, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, next + k * kTileValues, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_stored(1, sums[1], 64);
    } else {
      for (int k = 0; k < steps; ++k) {
        _tile_loadd(4, tiles + k * kTileValues, 64);
        _tile_loadd(6, right + k * kTileValues, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
    }
    _tile_stored(0, sums[0], 64);
    store_logits(sums[0], nullptr, heads - h, scale, z + h * stride, stride);
    if (two) {
      store_logits(sums[1], nullptr, heads - h - kHeadBlock, scale, z + (h + kHeadBlock) * stride,
                   stride);
    }
  }
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

// Window entries in pair rows: column block c at base + c * column_stride, two pair rows further from
// one pair of entries to the next.
struct WindowPairs {
  const uint16_t* base;
  int64_t column_stride;
  int64_t blocks;  // of 32 entries
};

CEDAR_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

template <int kHeadBlocks, int kColumns>
CEDAR_INLINE void mix_window(const uint16_t* weights, int64_t stride, const WindowPairs& window,
                             int column) {
  const uint16_t* x = window.base + column * window.column_stride;
  compiler_fence(x);
  for (int64_t block = 0; block < window.blocks; ++block) {
    multiply_weights<kHeadBlocks, kColumns>(weights, stride, x, window.column_stride,
                                            4 * kPairValues);
    weights += 32;
    x += 32 * kPairValues;
  }
}

template <int kHeadBlocks, int kColumns>
CEDAR_INLINE void mix_selected(const uint16_t* weights, int64_t stride, const SelectedRows& rows,
                               int column, RowPrefetch& upcoming, int64_t rows_now) {
  alignas(64) uint16_t tiles[kColumns * kTileValues];
  const EntryConstants constants;
  for (int64_t first = 0; first < rows.count; first += 32) {
    upcoming.some(rows_now);
    unpack_pair_tiles(rows, first, column / 2, constants, tiles);
    if (kColumns == 4) {
      unpack_pair_tiles(rows, first, column / 2 + 1, constants, tiles + 2 * kTileValues);
    }
    compiler_fence(tiles);
    multiply_weights<kHeadBlocks, kColumns>(weights + first, stride, tiles, kTileValues, 64);
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
  WindowPairs window;
  SelectedRows selected;
  const float* factors;  // [heads]
  int heads, dim;
  uint16_t* out;           // everything, or the window part
  uint16_t* out_selected;  // the selected part, or null
};

// Up to kHeadBlocks blocks of heads from head h on, column blocks from `column` on.
template <int kHeadBlocks, int kColumns>
CEDAR_INLINE void mix_columns(const TileMix& mix, int h, int column, RowPrefetch& upcoming,
                              int64_t rows_now) {
  const uint16_t* weights = mix.weights + h * mix.stride;
  const int heads = mix.heads - h;
  const int64_t at = static_cast<int64_t>(h) * mix.dim + column * kPairColumns;
  zero_sums();
  mix_window<kHeadBlocks, kColumns>(weights, mix.stride, mix.window, column);
  if (mix.out_selected != nullptr) {
    finish_columns<kHeadBlocks, kColumns>(mix.factors + h, heads, mix.dim, mix.out + at);
    zero_sums();
  }
  mix_selected<kHeadBlocks, kColumns>(weights + mix.window.blocks * 32, mix.stride, mix.selected,
                                      column, upcoming, rows_now);
  uint16_t* out = mix.out_selected != nullptr ? mix.out_selected : mix.out;
  finish_columns<kHeadBlocks, kColumns>(mix.factors + h, heads, mix.dim, out + at);
}

// out[h][:] = factor_h * sum over entries of weight * value, all heads.
inline void tile_mix(const TileMix& mix, RowPrefetch& upcoming) {
  const int columns = mix.dim / kPairColumns;
  // Blocks of 32 selected rows in the whole of the mixing, to spread the prefetches.
  const int64_t passes = static_cast<int64_t>((mix.heads + 31) / 32) *
                         (mix.heads > kHeadBlock ? columns / 2 : (columns + 3) / 4);
  const int64_t blocks = std::max<int64_t>(1, passes * (mix.selected.count / 32));
  const int64_t rows_now = (upcoming.count + blocks - 1) / blocks;
  for (int h = 0; h < mix.heads; h += 2 * kHeadBlock) {
    if (h + kHeadBlock < mix.heads) {
      for (int c = 0; c < columns; c += 2) mix_columns<2, 2>(mix, h, c, upcoming, rows_now);
      continue;
    }
    int c = 0;
    for (; c + 4 <= columns; c += 4) mix_columns<1, 4>(mix, h, c, upcoming, rows_now);
    if (c < columns) mix_columns<1, 2>(mix, h, c, upcoming, rows_now);
  }
}

}  // namespace CEDAR_ISA
}  // namespace cedar
