// Activations as right operands of matrix tiles, and sums out of tiles. Used by matmul_tiles.h and
// moe_tiles.h.
#pragma once

#include "amx_tiles.h"
#include "matmul.h"
#include "matmul_pairs.h"
#include "weight_blocks.h"

namespace cedar {
namespace CEDAR_ISA {
namespace tiles {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileValues = kTileRows * kBlock;  // bfloat16 values of a weight tile, 1 KB
constexpr int64_t kTileSums = kTileRows * kPanel;    // float32 values of an output tile, 1 KB

// Registers 0..3 sums, 4..5 weights, 6..7 activations.
inline TileShapes tile_shapes(int64_t columns) {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) {
    const bool weights = t == 4 || t == 5;
    shapes.set(t, 16, weights ? 64 : 4 * static_cast<int>(columns));
  }
  return shapes;
}

// Columns of a panel: all of them when they fit in one panel, so that decode reads no padding.
inline int64_t panel_columns(int64_t n) { return n < kPanel ? n : kPanel; }

inline int64_t panel_values(int64_t n, int64_t width) {
  return blocks_of(width) * kBlock * panel_columns(n);
}

inline size_t operand_bytes(int64_t n, int64_t width) {
  const int64_t panels = (n + kPanel - 1) / kPanel;
  return static_cast<size_t>(panels * panel_values(n, width)) * sizeof(uint16_t);
}

// In place, [row][16 lanes] -> [lane][16 rows].
CEDAR_INLINE void transpose(__m512i (&a)[16]) {
  __m512i b[16];
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
}

// One panel of up to 16 rows, zeros in the missing ones, `columns` of them stored.
inline void prepare_panel(const Rows& rows, bool quantise, int64_t first, int64_t columns,
                          uint32_t* out) {
  const int64_t count = rows.n - first < columns ? rows.n - first : columns;
  for (int64_t b = 0; b < blocks_of(rows.width); ++b) {
    __m512i a[16];
    for (int64_t c = 0; c < 16; ++c) {
      a[c] = c < count ? pairs::activation_block(rows, quantise, first + c, b)
                       : _mm512_setzero_si512();
    }
    if (columns == 1) {
      _mm512_store_si512(out + b * 16, a[0]);
      continue;
    }
    transpose(a);
    const __mmask16 mask = static_cast<__mmask16>((1u << columns) - 1u);
    for (int64_t p = 0; p < 16; ++p) {
      _mm512_mask_storeu_epi32(out + (b * 16 + p) * columns, mask, a[p]);
    }
  }
}

inline void prepare(const Rows& rows, bool quantise, int64_t first, int64_t last, uint16_t* data) {
  for (int64_t i = first; i < last; i += kPanel) {
    uint16_t* panel = data + i / kPanel * panel_values(rows.n, rows.width);
    prepare_panel(rows, quantise, i, panel_columns(rows.n), reinterpret_cast<uint32_t*>(panel));
  }
}

// Output tile [row][column] to out[column * stride + row].
inline void write_sums(const float* sums, int64_t rows, int64_t columns, int64_t tile_columns,
                       float* out, int64_t stride) {
  __m512i a[16];
  const __mmask16 mask = static_cast<__mmask16>((1u << tile_columns) - 1u);
  for (int64_t r = 0; r < kTileRows; ++r) {
    a[r] = _mm512_maskz_loadu_epi32(mask, sums + r * tile_columns);
  }
  transpose(a);
  const __mmask16 row_mask = static_cast<__mmask16>((1u << rows) - 1u);
  for (int64_t c = 0; c < columns; ++c) {
    _mm512_mask_storeu_epi32(out + c * stride, row_mask, a[c]);
  }
}

}  // namespace tiles
}  // namespace CEDAR_ISA
}  // namespace cedar
