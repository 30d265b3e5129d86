// Weight rows as left operands of matrix tiles. Used by matmul_tiles.h.
#pragma once

#include "tile_panels.h"
#include "weight_blocks.h"

namespace cedar {
namespace CEDAR_ISA {
namespace tiles {

// 16 weight rows being read; rows past the weight's end count as zeros.
struct RowGroup {
  const Weight* weight;
  int64_t first;
  int64_t count;        // rows that exist
  bool plain;           // scales allow the short way
  const int16_t* adds;  // [row][block] exponents of packed kinds
};

// `adds` has room for 16 rows.
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

// Row after row, because rows lie so far apart that few of their cache lines fit side by side.
template <int kind>
CEDAR_INLINE void unpack_plain(const RowGroup& group, int64_t first, int64_t count,
                               uint16_t* tiles) {
  constexpr int64_t kBytes = kind == kFp8Weight ? kBlock : kBlock / 2;
  const int64_t blocks = blocks_of(group.weight->in), stride = blocks * kBytes;
  const uint8_t* values = row_values(*group.weight, group.first) + first * kBytes;
  const int16_t* adds = group.adds + first;
  for (int64_t r = 0; r < kTileRows; ++r, values += stride, adds += blocks, tiles += kBlock) {
    for (int64_t b = 0; b < count; ++b) {
      const __m512i block = kind == kFp8Weight ? fp8_block(values + b * kBytes, adds[b])
                                               : fp4_block(values + b * kBytes, adds[b]);
      _mm512_store_si512(tiles + b * kTileValues, block);
    }
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

// Blocks [first, first + count) to consecutive tiles.
inline void unpack(const RowGroup& group, int64_t first, int64_t count, uint16_t* tiles) {
  const bool whole = group.plain && group.count == kTileRows;
  if (whole && group.weight->kind == kFp4Weight) {
    if (count == 4) return unpack_plain<kFp4Weight>(group, first, 4, tiles);
    return unpack_plain<kFp4Weight>(group, first, count, tiles);
  }
  if (whole && group.weight->kind == kFp8Weight) {
    if (count == 2) return unpack_plain<kFp8Weight>(group, first, 2, tiles);
    return unpack_plain<kFp8Weight>(group, first, count, tiles);
  }
  for (int64_t b = 0; b < count; ++b) unpack_any(group, first + b, tiles + b * kTileValues);
}

}  // namespace tiles
}  // namespace CEDAR_ISA
}  // namespace cedar
