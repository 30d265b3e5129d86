// Weight rows as left operands of matrix tiles. Used by matmul_tiles.h.
#pragma once

#include "tile_panels.h"
#include "weight_blocks.h"

namespace cedar {
namespace CEDAR_ISA {
namespace tiles {

// 16 weight rows being read, from a multiple of 16 on; rows past the end count as zeros.
struct RowGroup {
  const Weight* weight;
  int64_t first;
  int64_t count;  // rows that exist
};

// Whether a block can be loaded as a tile straight from the weight's memory.
inline bool is_tile(const RowGroup& group, int64_t block) {
  return group.weight->kind == kBfloat16Weight && group.count == kTileRows &&
         (block + 1) * kBlock <= group.weight->in;
}

// Row after row, because rows lie so far apart that few of their cache lines fit side by side.
template <int64_t count>
CEDAR_INLINE void unpack_fp4(const RowGroup& group, int64_t first, uint16_t* tiles) {
  const int64_t blocks = blocks_of(group.weight->in);
  const uint8_t* values = row_values(*group.weight, group.first) + first * (kBlock / 2);
  const uint8_t* scales = row_scales(*group.weight, group.first) + first;
  for (int64_t r = 0; r < kTileRows; ++r) {
    for (int64_t b = 0; b < count; ++b) {
      _mm512_store_si512(tiles + b * kTileValues, fp4_block(values + b * (kBlock / 2), scales[b]));
    }
    values += blocks * (kBlock / 2);
    scales += blocks;
    tiles += kBlock;
  }
}

// As if every value were normal; returns whether that was so.
template <int64_t count>
CEDAR_INLINE bool unpack_fp8(const RowGroup& group, int64_t first, uint16_t* tiles) {
  const uint8_t* values = row_values(*group.weight, group.first) + first * kBlock;
  const uint8_t* scales = row_scales(*group.weight, group.first) + first;
  __m512i rebias[count];
  bool plain = true;
  for (int64_t b = 0; b < count; ++b) {
    rebias[b] = _mm512_set1_epi16(fp8_rebias(scales[b]));
    plain = plain && fp8_is_plain(scales[b]);
  }
  __m512i lowest = _mm512_set1_epi16(-1), highest = _mm512_setzero_si512();
  for (int64_t r = 0; r < kTileRows; ++r, values += group.weight->in, tiles += kBlock) {
    for (int64_t b = 0; b < count; ++b) {
      const uint8_t* from = values + b * kBlock;
      const __m512i placed =
          fp8_placed(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      const __m512i unsigned_twice = _mm512_add_epi16(placed, placed);
      lowest = _mm512_min_epu16(lowest, unsigned_twice);
      highest = _mm512_max_epu16(highest, unsigned_twice);
      _mm512_store_si512(tiles + b * kTileValues, _mm512_add_epi16(placed, rebias[b]));
    }
  }
  // Magnitude codes 8..126, moved up by five bits.
  return plain && _mm512_cmplt_epu16_mask(lowest, _mm512_set1_epi16(8 << 5)) == 0 &&
         _mm512_cmpgt_epu16_mask(highest, _mm512_set1_epi16(126 << 5)) == 0;
}

// Any kind, any values, missing rows and short last blocks.
inline void unpack_any(const RowGroup& group, int64_t block, uint16_t* tile) {
  const Weight& weight = *group.weight;
  for (int64_t r = 0; r < kTileRows; ++r) {
    __m512i row = _mm512_setzero_si512();
    if (r < group.count) {
      const uint8_t* values = row_values(weight, group.first + r);
      const uint8_t* scales = row_scales(weight, group.first + r);
      if (weight.kind == kBfloat16Weight) {
        row = bf16_block(values, weight.in, block);
      } else if (weight.kind == kFp8Weight) {
        row = fp8_block(values + block * kBlock, scales[block]);
      } else {
        row = fp4_block(values + block * (kBlock / 2), scales[block]);
      }
    }
    _mm512_store_si512(tile + r * kBlock, row);
  }
}

// Blocks [first, first + count) to consecutive tiles.
inline void unpack(const RowGroup& group, int64_t first, int64_t count, uint16_t* tiles) {
  int64_t b = 0;
  if (group.count == kTileRows && group.weight->kind == kFp4Weight) {
    for (; b + 4 <= count; b += 4) unpack_fp4<4>(group, first + b, tiles + b * kTileValues);
  } else if (group.count == kTileRows && group.weight->kind == kFp8Weight) {
    for (; b + 2 <= count; b += 2) {
      if (unpack_fp8<2>(group, first + b, tiles + b * kTileValues)) continue;
      unpack_any(group, first + b, tiles + b * kTileValues);
      unpack_any(group, first + b + 1, tiles + (b + 1) * kTileValues);
    }
  }
  for (; b < count; ++b) unpack_any(group, first + b, tiles + b * kTileValues);
}

}  // namespace tiles
}  // namespace CEDAR_ISA
}  // namespace cedar
