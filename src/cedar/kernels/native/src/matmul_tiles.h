// The matrix-tile path of matmul.cpp (AMX-BF16).
//
// Weight rows are the left operand, as they lie in memory: 16 rows x 32 inputs are one tile. The
// activations are the right operand, prepared as [block of 32 inputs][pair of inputs][column]. For every
// output the hardware sums the even and the odd inputs of a block apart, in ascending order, then
// adds both to the accumulator; blocks ascend. So tile shapes and loop order do not show in the bits.
//
// At most 16 columns: weights stream once through a small buffer, 64 rows at a time (decode is bound
// by memory). More: a slab of rows x inputs is unpacked into the second-level cache and used for all
// columns, two tiles by two.
#pragma once

#include "matmul.h"
#include "matmul_pairs.h"
#include "thread_pool.h"
#include "weight_blocks.h"

namespace cedar {
namespace CEDAR_ISA {
namespace tiles {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileValues = kTileRows * kBlock;  // bfloat16 values of a weight tile, 1 KB
constexpr int64_t kTileSums = kTileRows * kPanel;    // float32 values of an output tile, 1 KB
constexpr int64_t kSlabBlocks = 8;                   // blocks of inputs in one unpacked slab

// ---- operand -----------------------------------------------------------------------------------

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

// One panel of up to 16 rows, zeros in the missing ones.
inline void prepare_panel(const Rows& rows, bool quantise, int64_t first, uint32_t* out) {
  const int64_t columns = panel_columns(rows.n);
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
    prepare_panel(rows, quantise, i, reinterpret_cast<uint32_t*>(panel));
  }
}

// ---- tile registers ----------------------------------------------------------------------------

// gcc's tile loads do not tell the compiler that they read memory.
CEDAR_INLINE void finish_stores() { __asm__ volatile("" ::: "memory"); }

// Registers 0..3 sums, 4..5 weights, 6..7 activations.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Holds the tile registers, shaped for `columns` columns, while it lives.
class TileScope {
 public:
  explicit TileScope(int64_t columns) {
    TileConfig config;
    for (int t = 0; t < 8; ++t) {
      config.rows[t] = 16;
      const bool weights = t == 4 || t == 5;
      config.row_bytes[t] = static_cast<uint16_t>(weights ? 64 : 4 * columns);
    }
    finish_stores();
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// ---- weight tiles ------------------------------------------------------------------------------

// 16 weight rows being read; rows past the weight's end count as zeros.
struct RowGroup {
  const Weight* weight;
  int64_t first;
  int64_t count;   // rows that exist
  bool plain;      // scales allow the short way
  int16_t* adds;   // [row][block] exponents of packed kinds
};

inline RowGroup open_group(const Weight& weight, int64_t first, int64_t end, int16_t* adds) {
  RowGroup group = {&weight, first, end - first < kTileRows ? end - first : kTileRows, true, adds};
  if (weight.kind == kBfloat16Weight) return group;
  const int64_t blocks = blocks_of(weight.in);
  for (int64_t r = 0; r < group.count; ++r) {
    group.plain &=
        expand_scales(weight.kind, row_scales(weight, first + r), blocks, adds + r * blocks);
  }
  return group;
}

// Whether a block can be loaded as a tile straight from the weight's memory.
inline bool is_tile(const RowGroup& group, int64_t block) {
  return group.weight->kind == kBfloat16Weight && group.count == kTileRows &&
         (block + 1) * kBlock <= group.weight->in;
}

template <int kind>
CEDAR_INLINE void unpack_plain(const RowGroup& group, int64_t block, uint16_t* tile) {
  const int64_t blocks = blocks_of(group.weight->in), stride = row_bytes(*group.weight);
  const uint8_t* values = row_values(*group.weight, group.first) + block * (kind == kFp8Weight ? 32 : 16);
  for (int64_t r = 0; r < kTileRows; ++r) {
    const int16_t add = group.adds[r * blocks + block];
    const __m512i row = kind == kFp8Weight ? fp8_block(values + r * stride, add)
                                           : fp4_block(values + r * stride, add);
    _mm512_store_si512(tile + r * kBlock, row);
  }
}

inline void unpack_any(const RowGroup& group, int64_t block, uint16_t* tile) {
  const Weight& weight = *group.weight;
  for (int64_t r = 0; r < kTileRows; ++r) {
    __m512i row = _mm512_setzero_si512();
    if (r < group.count) {
      const uint8_t* values = row_values(weight, group.first + r);
      row = weight.kind == kBfloat16Weight
                ? bf16_block(values, weight.in, block)
                : exact_block(weight.kind, values, row_scales(weight, group.first + r), block);
    }
    _mm512_store_si512(tile + r * kBlock, row);
  }
}

CEDAR_INLINE void unpack(const RowGroup& group, int64_t block, uint16_t* tile) {
  const bool whole = group.plain && group.count == kTileRows;
  if (whole && group.weight->kind == kFp4Weight) {
    unpack_plain<kFp4Weight>(group, block, tile);
  } else if (whole && group.weight->kind == kFp8Weight) {
    unpack_plain<kFp8Weight>(group, block, tile);
  } else {
    unpack_any(group, block, tile);
  }
}

// ---- output ------------------------------------------------------------------------------------

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

// ---- at most 16 columns ------------------------------------------------------------------------

constexpr int kStreamTiles = 4;  // weight tiles in flight, one accumulator each

// The next rows of the same weight, so that memory works ahead of the products.
CEDAR_INLINE void prefetch_next(const RowGroup& group, int64_t block, int64_t ahead) {
  const int64_t stride = row_bytes(*group.weight), step = stride / blocks_of(group.weight->in);
  const int64_t offset = block * step;
  if (step == 0 || offset % 64 >= step) return;  // this line was asked for already
  const uint8_t* values = row_values(*group.weight, group.first + ahead) + offset;
  for (int64_t r = 0; r < kTileRows; ++r) {
    _mm_prefetch(reinterpret_cast<const char*>(values + r * stride), _MM_HINT_T1);
  }
}

// Block of 16 weight rows into tile register 4, from memory or from where it was unpacked.
CEDAR_INLINE void load_weight_tile(const RowGroup& group, int64_t block, const uint16_t* unpacked) {
  if (is_tile(group, block)) {
    const uint8_t* values = row_values(*group.weight, group.first) + block * 64;
    _tile_loadd(4, values, row_bytes(*group.weight));
  } else {
    _tile_loadd(4, unpacked, 64);
  }
}

// Unpacks block b of all groups.
CEDAR_INLINE void unpack_groups(const RowGroup* groups, int count, int64_t b, uint16_t* buffer) {
  for (int t = 0; t < count; ++t) {
    if (!is_tile(groups[t], b)) unpack(groups[t], b, buffer + t * kTileValues);
  }
}

// Up to 64 rows, all columns of one panel.
inline void stream_rows(const RowGroup* groups, int count, const uint32_t* panel, int64_t columns,
                        bool more, uint16_t* buffer, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t blocks = blocks_of(groups[0].weight->in);
  constexpr int64_t kHalf = kStreamTiles * kTileValues;
  unpack_groups(groups, count, 0, buffer);
  for (int64_t b = 0; b < blocks; ++b) {
    // One block ahead: a tile load waits for stores that have not reached the cache.
    if (b + 1 < blocks) unpack_groups(groups, count, b + 1, buffer + (b + 1) % 2 * kHalf);
    if (more) {
      for (int t = 0; t < count; ++t) prefetch_next(groups[t], b, kStreamTiles * kTileRows);
    }
    finish_stores();
    const uint16_t* tile = buffer + b % 2 * kHalf;
    _tile_loadd(6, panel + b * 16 * columns, 4 * columns);
    load_weight_tile(groups[0], b, tile);
    _tile_dpbf16ps(0, 4, 6);
    if (count > 1) {
      load_weight_tile(groups[1], b, tile + kTileValues);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (count > 2) {
      load_weight_tile(groups[2], b, tile + 2 * kTileValues);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (count > 3) {
      load_weight_tile(groups[3], b, tile + 3 * kTileValues);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  const int64_t step = kTileRows * columns;
  _tile_stored(0, sums, 4 * columns);
  _tile_stored(1, sums + step, 4 * columns);
  _tile_stored(2, sums + 2 * step, 4 * columns);
  _tile_stored(3, sums + 3 * step, 4 * columns);
}

inline void multiply_few(const Weight& weight, int64_t first_row, int64_t rows,
                         const uint32_t* panel, int64_t tile_columns, int64_t columns, float* out,
                         int64_t stride) {
  const TileScope scope(tile_columns);
  const int64_t blocks = blocks_of(weight.in), end = first_row + rows;
  constexpr int64_t kStep = kStreamTiles * kTileRows;
  int16_t* adds = scratch_array<int16_t>(kMatmulSlot, kStep * blocks);
  uint16_t* buffer = scratch_array<uint16_t>(kMatmulSlot + 1, 2 * kStreamTiles * kTileValues);
  float* sums = scratch_array<float>(kMatmulSlot + 2, kStreamTiles * kTileSums);
  for (int64_t r = first_row; r < end; r += kStep) {
    RowGroup groups[kStreamTiles];
    int count = 0;
    for (int64_t g = r; g < end && count < kStreamTiles; g += kTileRows, ++count) {
      groups[count] = open_group(weight, g, end, adds + count * kTileRows * blocks);
    }
    const bool more = r + 2 * kStep <= end;
    stream_rows(groups, count, panel, tile_columns, more, buffer, sums);
    for (int t = 0; t < count; ++t) {
      write_sums(sums + t * kTileRows * tile_columns, groups[t].count, columns, tile_columns,
                 out + (groups[t].first - first_row), stride);
    }
  }
}

// ---- more columns ------------------------------------------------------------------------------

// Two row tiles by two panels over one slab; sums continue from `sums` unless `start`.
inline void multiply_square(const uint16_t* const* weights, const uint32_t* const* panels,
                            float* const* sums, int64_t blocks, bool start) {
  finish_stores();
  if (start) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums[0], 64);
    _tile_loadd(1, sums[1], 64);
    _tile_loadd(2, sums[2], 64);
    _tile_loadd(3, sums[3], 64);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    _tile_loadd(4, weights[0] + b * kTileValues, 64);
    _tile_loadd(6, panels[0] + b * kTileSums, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panels[1] + b * kTileSums, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, weights[1] + b * kTileValues, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

struct Slab {
  int64_t row_tiles, panels;
  uint16_t* weights;  // [row tile][block of the slab]
  float* sums;        // [panel][row tile]
};

// All products of one slab: blocks [first, first + count) of the inputs.
inline void multiply_slab(const Slab& slab, const Operand& operand, int64_t first_panel,
                          int64_t first, int64_t count) {
  const int64_t panel_step = panel_values(operand.n, operand.width) / 2;  // in pairs
  const uint32_t* data = static_cast<const uint32_t*>(operand.data) + first * kTileSums;
  for (int64_t p = 0; p < slab.panels; p += 2) {
    // A missing second panel or row tile repeats the first into a spare output.
    const int64_t p1 = p + 1 < slab.panels ? p + 1 : p;
    const uint32_t* panels[2] = {data + (first_panel + p) * panel_step,
                                 data + (first_panel + p1) * panel_step};
    for (int64_t t = 0; t < slab.row_tiles; t += 2) {
      const int64_t t1 = t + 1 < slab.row_tiles ? t + 1 : t;
      const uint16_t* weights[2] = {slab.weights + t * kSlabBlocks * kTileValues,
                                    slab.weights + t1 * kSlabBlocks * kTileValues};
      float* spare = slab.sums + slab.panels * slab.row_tiles * kTileSums;
      const auto at = [&](int64_t panel, int64_t tile) {
        return slab.sums + (panel * slab.row_tiles + tile) * kTileSums;
      };
      float* sums[4] = {at(p, t), p1 > p ? at(p1, t) : spare, t1 > t ? at(p, t1) : spare + kTileSums,
                        p1 > p && t1 > t ? at(p1, t1) : spare + 2 * kTileSums};
      multiply_square(weights, panels, sums, count, first == 0);
    }
  }
}

inline void unpack_slab(const Weight& weight, const int16_t* adds, const bool* plain,
                        int64_t first_row, int64_t rows, int64_t first, int64_t count,
                        uint16_t* out) {
  const int64_t blocks = blocks_of(weight.in);
  for (int64_t t = 0; t * kTileRows < rows; ++t) {
    const int64_t left = rows - t * kTileRows;
    const RowGroup group = {&weight, first_row + t * kTileRows,
                            left < kTileRows ? left : kTileRows, plain[t],
                            const_cast<int16_t*>(adds) + t * kTileRows * blocks};
    for (int64_t b = 0; b < count; ++b) {
      unpack(group, first + b, out + (t * kSlabBlocks + b) * kTileValues);
    }
  }
}

inline void multiply_many(const Weight& weight, int64_t first_row, int64_t rows,
                          const Operand& operand, int64_t first_column, int64_t columns, float* out,
                          int64_t stride) {
  const TileScope scope(kPanel);
  const int64_t blocks = blocks_of(weight.in);
  Slab slab = {(rows + kTileRows - 1) / kTileRows, (columns + kPanel - 1) / kPanel, nullptr, nullptr};
  int16_t* adds = scratch_array<int16_t>(kMatmulSlot, slab.row_tiles * kTileRows * blocks);
  slab.weights = scratch_array<uint16_t>(kMatmulSlot + 1, slab.row_tiles * kSlabBlocks * kTileValues);
  slab.sums = scratch_array<float>(kMatmulSlot + 2, (slab.row_tiles * slab.panels + 3) * kTileSums);
  bool* plain = scratch_array<bool>(kMatmulSlot + 3, slab.row_tiles);
  for (int64_t t = 0; t < slab.row_tiles; ++t) {
    plain[t] = open_group(weight, first_row + t * kTileRows, first_row + rows,
                          adds + t * kTileRows * blocks).plain;
  }
  for (int64_t b = 0; b < blocks; b += kSlabBlocks) {
    const int64_t count = blocks - b < kSlabBlocks ? blocks - b : kSlabBlocks;
    unpack_slab(weight, adds, plain, first_row, rows, b, count, slab.weights);
    multiply_slab(slab, operand, first_column / kPanel, b, count);
  }
  for (int64_t p = 0; p < slab.panels; ++p) {
    for (int64_t t = 0; t < slab.row_tiles; ++t) {
      const int64_t row_count = rows - t * kTileRows, column_count = columns - p * kPanel;
      write_sums(slab.sums + (p * slab.row_tiles + t) * kTileSums,
                 row_count < kTileRows ? row_count : kTileRows,
                 column_count < kPanel ? column_count : kPanel, kPanel,
                 out + p * kPanel * stride + t * kTileRows, stride);
    }
  }
}

inline void multiply(const Weight& weight, int64_t first_row, int64_t rows, const Operand& operand,
                     int64_t first_column, int64_t columns, float* out, int64_t stride) {
  if (columns > kPanel) {
    multiply_many(weight, first_row, rows, operand, first_column, columns, out, stride);
    return;
  }
  const int64_t tile_columns = panel_columns(operand.n);
  const uint32_t* panel = static_cast<const uint32_t*>(operand.data) +
                          first_column / kPanel * panel_values(operand.n, operand.width) / 2;
  multiply_few(weight, first_row, rows, panel, tile_columns, columns, out, stride);
}

}  // namespace tiles
}  // namespace CEDAR_ISA
}  // namespace cedar
