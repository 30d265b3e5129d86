// The matrix-tile path of matmul.cpp (AMX-BF16).
//
// Weight rows are the left operand, as they lie in memory: 16 rows x 32 inputs are one tile. The
// activations are the right operand, prepared as [block of 32 inputs][pair of inputs][column]. For every
// output the hardware sums the even and the odd inputs of a block apart, in ascending order, then
// adds both to the accumulator; blocks ascend. So tile shapes and loop order do not show in the bits.
//
// At most 16 columns: weights stream once through a small buffer, 32 rows at a time (decode is bound
// by memory). More: a slab of rows x inputs is unpacked into the second-level cache and used for all
// columns, two tiles by two.
#pragma once

#include "amx_tiles.h"
#include "matmul.h"
#include "thread_pool.h"
#include "tile_panels.h"
#include "tile_weights.h"

namespace cedar {
namespace CEDAR_ISA {
namespace tiles {

constexpr int64_t kSlabBlocks = 8;  // blocks of inputs in one unpacked slab

// Registers 0..3 sums, 4..5 weights, 6..7 activations.
inline TileShapes tile_shapes(int64_t columns) {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) {
    const bool weights = t == 4 || t == 5;
    shapes.set(t, 16, weights ? 64 : 4 * static_cast<int>(columns));
  }
  return shapes;
}

// ---- at most 16 columns ------------------------------------------------------------------------

constexpr int kStreamTiles = 2;  // weight tiles in flight, one accumulator each
constexpr int64_t kStreamRows = kStreamTiles * kTileRows;
constexpr int64_t kMostSpan = 4;  // blocks unpacked at a time

// Blocks of one weight row in a cache line.
inline int64_t span_of(int32_t kind) {
  return kind == kFp4Weight ? 4 : kind == kFp8Weight ? 2 : 1;
}

// Asks for the rows after these, in the order they lie in memory and as fast as they are used:
// memory sees one ascending stream instead of 32.
struct Prefetch {
  const char* next;
  const char* end;
  int64_t lines;  // per step

  Prefetch(const Weight& weight, int64_t first_row, int64_t rows, int64_t steps)
      : next(reinterpret_cast<const char*>(row_values(weight, first_row))),
        end(next + rows * row_bytes(weight)),
        lines((rows * row_bytes(weight) / 64 + steps - 1) / steps) {}

  CEDAR_INLINE void step() {
    for (int64_t i = 0; i < lines && next < end; ++i, next += 64) {
      _mm_prefetch(next, _MM_HINT_T1);
    }
  }
};

// Block of 16 weight rows into tile register 4, from memory or from where it was unpacked.
CEDAR_INLINE void load_weight_tile(const RowGroup& group, int64_t block, const uint16_t* unpacked) {
  if (is_tile(group, block)) {
    const uint8_t* values = row_values(*group.weight, group.first) + block * 64;
    _tile_loadd(4, values, row_bytes(*group.weight));
  } else {
    _tile_loadd(4, unpacked, 64);
  }
}

// Unpacks a span of blocks of all groups, as [group][block of the span].
CEDAR_INLINE void unpack_groups(const RowGroup* groups, int count, int64_t first, int64_t span,
                                uint16_t* buffer) {
  for (int t = 0; t < count; ++t) {
    if (!is_tile(groups[t], first)) unpack(groups[t], first, span, buffer + t * span * kTileValues);
  }
}

// Up to 32 rows, all columns of one panel.
inline void stream_rows(const RowGroup* groups, int count, const uint32_t* panel, int64_t columns,
                        Prefetch prefetch, uint16_t* buffer, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  const int64_t blocks = blocks_of(groups[0].weight->in), span = span_of(groups[0].weight->kind);
  const auto length = [&](int64_t b) { return blocks - b < span ? blocks - b : span; };
  uint16_t* halves[2] = {buffer, buffer + kStreamTiles * kMostSpan * kTileValues};
  unpack_groups(groups, count, 0, length(0), halves[0]);
  for (int64_t b = 0; b < blocks; b += span) {
    // One span ahead: a tile load waits for stores that have not reached the cache.
    if (b + span < blocks) unpack_groups(groups, count, b + span, length(b + span), halves[1]);
    compiler_fence(buffer);
    const int64_t now = length(b);
    for (int64_t i = 0; i < now; ++i) {
      prefetch.step();
      _tile_loadd(6, panel + (b + i) * 16 * columns, 4 * columns);
      load_weight_tile(groups[0], b + i, halves[0] + i * kTileValues);
      _tile_dpbf16ps(0, 4, 6);
      if (count > 1) {
        load_weight_tile(groups[1], b + i, halves[0] + (now + i) * kTileValues);
        _tile_dpbf16ps(1, 4, 6);
      }
    }
    uint16_t* const done = halves[0];
    halves[0] = halves[1];
    halves[1] = done;
  }
  _tile_stored(0, sums, 4 * columns);
  _tile_stored(1, sums + kTileRows * columns, 4 * columns);
  compiler_fence(sums);
}

inline void multiply_few(const Weight& weight, int64_t first_row, int64_t rows,
                         const uint32_t* panel, int64_t tile_columns, int64_t columns, float* out,
                         int64_t stride) {
  const TileScope scope(tile_shapes(tile_columns));
  const int64_t blocks = blocks_of(weight.in), end = first_row + rows;
  uint16_t* buffer =
      scratch_array<uint16_t>(kMatmulSlot, 2 * kStreamTiles * kMostSpan * kTileValues);
  float* sums = scratch_array<float>(kMatmulSlot + 1, kStreamTiles * kTileSums);
  Prefetch(weight, first_row, rows < kStreamRows ? rows : kStreamRows, 1).step();
  for (int64_t r = first_row; r < end; r += kStreamRows) {
    RowGroup groups[kStreamTiles];
    int count = 0;
    for (int64_t g = r; g < end && count < kStreamTiles; g += kTileRows, ++count) {
      groups[count] = {&weight, g, end - g < kTileRows ? end - g : kTileRows};
    }
    const int64_t next = r + kStreamRows < end ? r + kStreamRows : end;
    const int64_t ahead = end - next < kStreamRows ? end - next : kStreamRows;
    stream_rows(groups, count, panel, tile_columns, Prefetch(weight, next, ahead, blocks), buffer,
                sums);
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
  compiler_fence(sums);
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

// Blocks [first, first + count) of all rows, as [row tile][block of the slab].
inline void unpack_slab(const Weight& weight, int64_t first_row, int64_t rows, int64_t first,
                        int64_t count, uint16_t* out) {
  for (int64_t r = 0; r < rows; r += kTileRows, out += kSlabBlocks * kTileValues) {
    unpack({&weight, first_row + r, rows - r < kTileRows ? rows - r : kTileRows}, first, count, out);
  }
}

inline void multiply_many(const Weight& weight, int64_t first_row, int64_t rows,
                          const Operand& operand, int64_t first_column, int64_t columns, float* out,
                          int64_t stride) {
  const TileScope scope(tile_shapes(kPanel));
  const int64_t blocks = blocks_of(weight.in);
  Slab slab = {(rows + kTileRows - 1) / kTileRows, (columns + kPanel - 1) / kPanel, nullptr, nullptr};
  slab.weights = scratch_array<uint16_t>(kMatmulSlot, slab.row_tiles * kSlabBlocks * kTileValues);
  slab.sums = scratch_array<float>(kMatmulSlot + 1, (slab.row_tiles * slab.panels + 3) * kTileSums);
  for (int64_t b = 0; b < blocks; b += kSlabBlocks) {
    const int64_t count = blocks - b < kSlabBlocks ? blocks - b : kSlabBlocks;
    unpack_slab(weight, first_row, rows, b, count, slab.weights);
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
