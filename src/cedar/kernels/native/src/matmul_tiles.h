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

#include "matmul.h"
#include "thread_pool.h"
#include "tile_panels.h"
#include "tile_weights.h"

namespace cedar {
namespace CEDAR_ISA {
namespace tiles {

constexpr int64_t kSlabBlocks = 8;  // blocks of inputs in one unpacked slab

// ---- at most 16 columns ------------------------------------------------------------------------

constexpr int64_t kStreamRows = 2 * kTileRows;  // two weight tiles in flight, an accumulator each

// 32 packed rows, all columns of one panel. Unpacks one line of inputs ahead of the products, because
// a tile load waits for stores that have not reached the cache, and in small steps between them,
// because unpacking and products use different parts of the core. `buffer` has 4 lines of tiles.
template <int kind>
inline void stream_lines(const Weight& weight, int64_t row, const uint32_t* panel, int64_t columns,
                         Ahead ahead, uint16_t* buffer) {
  constexpr int64_t kBlocks = Line<kind>::kBlocks, kRows = Line<kind>::kRows;
  const int64_t blocks = weight.in / kBlock;
  const auto tile = [&](int64_t line, int64_t group, int64_t block) {
    return buffer + ((line % 2 * 2 + group) * kBlocks + block) * kTileValues;
  };
  for (int64_t group = 0; group < 2; ++group) {
    unpack_lines<kind, kTileRows>(weight, row + group * kTileRows, 0, tile(0, group, 0), ahead);
  }
  for (int64_t line = 0; line * kBlocks < blocks; ++line) {
    const int64_t next = (line + 1) * kBlocks;
    const auto unpack_some = [&](int64_t r) {
      if (next >= blocks) return;
      uint16_t* to = tile(line + 1, r / kTileRows, 0) + r % kTileRows * kBlock;
      unpack_lines<kind, kRows>(weight, row + r, next, to, ahead);
    };
    for (int64_t b = 0; b < kBlocks; ++b) {
      unpack_some(2 * b * kRows);
      compiler_fence(buffer);
      _tile_loadd(6, panel + (line * kBlocks + b) * 16 * columns, 4 * columns);
      _tile_loadd(4, tile(line, 0, b), 64);
      _tile_dpbf16ps(0, 4, 6);
      unpack_some((2 * b + 1) * kRows);
      compiler_fence(buffer);
      _tile_loadd(5, tile(line, 1, b), 64);
      _tile_dpbf16ps(1, 5, 6);
    }
  }
}

// 32 bfloat16 rows whose blocks are whole: tiles straight from the weight.
inline void stream_tiles(const Weight& weight, int64_t row, const uint32_t* panel, int64_t columns,
                         Ahead ahead) {
  const uint8_t* first = row_values(weight, row);
  const uint8_t* second = row_values(weight, row + kTileRows);
  for (int64_t b = 0; b < weight.in / kBlock; ++b) {
    for (int64_t i = 0; i < kStreamRows; ++i) ahead.next();
    _tile_loadd(6, panel + b * 16 * columns, 4 * columns);
    _tile_loadd(4, first + b * 64, weight.in * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, second + b * 64, weight.in * 2);
    _tile_dpbf16ps(1, 5, 6);
  }
}

// Whatever the two above do not cover: the last rows and odd widths.
inline void stream_rest(const RowGroup* groups, const uint32_t* panel, int64_t columns,
                        uint16_t* buffer) {
  for (int64_t b = 0; b < blocks_of(groups[0].weight->in); ++b) {
    unpack_any(groups[0], b, buffer);
    unpack_any(groups[1], b, buffer + kTileValues);
    compiler_fence(buffer);
    _tile_loadd(6, panel + b * 16 * columns, 4 * columns);
    _tile_loadd(4, buffer, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, buffer + kTileValues, 64);
    _tile_dpbf16ps(1, 5, 6);
  }
}

// Rows [row, row + 32) as far as they are below `end`, all columns of one panel.
inline void stream_rows(const Weight& weight, int64_t row, int64_t end, const uint32_t* panel,
                        int64_t columns, uint16_t* buffer, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  const bool more = row + 2 * kStreamRows <= end;
  const uint8_t* next = row_values(weight, more ? row + kStreamRows : row);
  const Ahead ahead = {reinterpret_cast<const char*>(next), more ? 64 : 0};
  const int64_t line = 64 / Line<kFp4Weight>::kBlockBytes * kBlock;
  const bool whole = row + kStreamRows <= end && weight.in % line == 0;
  if (whole && weight.kind == kFp4Weight) {
    stream_lines<kFp4Weight>(weight, row, panel, columns, ahead, buffer);
  } else if (whole && weight.kind == kFp8Weight) {
    stream_lines<kFp8Weight>(weight, row, panel, columns, ahead, buffer);
  } else if (whole) {
    stream_tiles(weight, row, panel, columns, ahead);
  } else {
    const auto count = [&](int64_t first) {
      return end - first < 0 ? 0 : end - first < kTileRows ? end - first : kTileRows;
    };
    const RowGroup groups[2] = {{&weight, row, count(row)},
                                {&weight, row + kTileRows, count(row + kTileRows)}};
    stream_rest(groups, panel, columns, buffer);
  }
  _tile_stored(0, sums, 4 * columns);
  _tile_stored(1, sums + kTileRows * columns, 4 * columns);
  compiler_fence(sums);
}

inline void multiply_few(const Weight& weight, int64_t first_row, int64_t rows,
                         const uint32_t* panel, int64_t tile_columns, int64_t columns, float* out,
                         int64_t stride) {
  const TileScope scope(tile_shapes(tile_columns));
  uint16_t* buffer = scratch_array<uint16_t>(kMatmulSlot, 4 * Line<kFp4Weight>::kBlocks * kTileValues);
  float* sums = scratch_array<float>(kMatmulSlot + 1, 2 * kTileSums);
  const int64_t end = first_row + rows;
  Ahead start = {reinterpret_cast<const char*>(row_values(weight, first_row)), 64};
  for (int64_t i = rows < kStreamRows ? 0 : kStreamRows * row_bytes(weight) / 64; i > 0; --i) {
    start.next();
  }
  for (int64_t row = first_row; row < end; row += kStreamRows) {
    stream_rows(weight, row, end, panel, tile_columns, buffer, sums);
    for (int64_t r = row; r < end && r < row + kStreamRows; r += kTileRows) {
      write_sums(sums + (r - row) * tile_columns, end - r < kTileRows ? end - r : kTileRows, columns,
                 tile_columns, out + (r - first_row), stride);
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
