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


// Lines of memory to ask for, one for every line unpacked: later rows in the order they lie in memory.
// So memory sees one slow ascending stream, and never more requests than it can hold.
struct Ahead {
  const char* at;
  int64_t step;  // 64, or 0 when there is nothing to ask for

  CEDAR_INLINE void next() {
    _mm_prefetch(at, _MM_HINT_T1);
    at += step;
  }
};

// What a cache line of packed weights holds, and how many such rows are unpacked between two products.
template <int kind>
struct Line {
  static constexpr int64_t kBlocks = kind == kFp4Weight ? 4 : 2;
  static constexpr int64_t kBlockBytes = 64 / kBlocks;
  static constexpr int64_t kRows = kTileRows / kBlocks;
};

// Which byte of a cache line goes to both halves of every 32-bit lane, for each of its four FP4 blocks.
struct Fp4Spread {
  alignas(64) uint8_t bytes[4][64];

  constexpr Fp4Spread() : bytes() {
    for (int block = 0; block < 4; ++block) {
      for (int i = 0; i < 64; ++i) bytes[block][i] = static_cast<uint8_t>(16 * block + i / 4);
    }
  }
};

inline constexpr Fp4Spread kFp4Spread;

// Lines of packed rows [first_row, first_row + rows) from block `first` on, as consecutive tiles. Row
// after row, because rows lie so far apart that few of their cache lines fit side by side. A line is
// loaded once and spread in registers: its blocks go to tiles whose stores may look, by their lower 12
// address bits, like stores to the line itself, and each load after them would wait.
template <int64_t rows>
CEDAR_INLINE void unpack_fp4(const Weight& weight, int64_t first_row, int64_t first,
                             uint16_t* tiles, Ahead& ahead) {
  const uint8_t* values = row_values(weight, first_row) + first * Line<kFp4Weight>::kBlockBytes;
  const uint8_t* scales = row_scales(weight, first_row) + first;
  const int64_t value_stride = weight.in / 2, scale_stride = weight.in / kBlock;
  const __m512i high_nibbles = _mm512_set1_epi32(4 << 16);  // the upper half moves down by a nibble
  for (int64_t r = 0; r < rows; ++r) {
    ahead.next();
    const __m512i line = _mm512_loadu_si512(values);
    for (int64_t b = 0; b < 4; ++b) {
      const __m512i spread = _mm512_load_si512(kFp4Spread.bytes[b]);
      const __m512i codes = _mm512_srlv_epi16(_mm512_permutexvar_epi8(spread, line), high_nibbles);
      _mm512_store_si512(tiles + b * kTileValues, fp4_values(codes, scales[b]));
    }
    values += value_stride;
    scales += scale_stride;
    tiles += kBlock;
  }
}

// The same, as if every value were normal; then those rows that were not, once more.
template <int64_t rows>
CEDAR_INLINE void unpack_fp8(const Weight& weight, int64_t first_row, int64_t first,
                             uint16_t* tiles, Ahead& ahead) {
  const uint8_t* values = row_values(weight, first_row) + first * kBlock;
  const uint8_t* scales = row_scales(weight, first_row) + first;
  const __m512i rebias[2] = {_mm512_set1_epi16(fp8_rebias(scales[0])),
                             _mm512_set1_epi16(fp8_rebias(scales[1]))};
  __m512i lowest = _mm512_set1_epi16(-1), highest = _mm512_setzero_si512();
  for (int64_t r = 0; r < rows; ++r) {
    ahead.next();
    for (int64_t b = 0; b < 2; ++b) {
      const uint8_t* from = values + r * weight.in + b * kBlock;
      const __m512i placed =
          fp8_placed(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      const __m512i unsigned_twice = _mm512_add_epi16(placed, placed);
      lowest = _mm512_min_epu16(lowest, unsigned_twice);
      highest = _mm512_max_epu16(highest, unsigned_twice);
      _mm512_store_si512(tiles + b * kTileValues + r * kBlock,
                         _mm512_add_epi16(placed, rebias[b]));
    }
  }
  // Magnitude codes 8..126, moved up by five bits.
  const __mmask32 odd_ones = _mm512_cmplt_epu16_mask(lowest, _mm512_set1_epi16(8 << 5)) |
                             _mm512_cmpgt_epu16_mask(highest, _mm512_set1_epi16(126 << 5));
  if (__builtin_expect(odd_ones != 0 || !fp8_is_plain(scales[0]) || !fp8_is_plain(scales[1]), 0)) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t b = 0; b < 2; ++b) {
        _mm512_store_si512(tiles + b * kTileValues + r * kBlock,
                           fp8_block(values + r * weight.in + b * kBlock, scales[b]));
      }
    }
  }
}

template <int kind, int64_t rows>
CEDAR_INLINE void unpack_lines(const Weight& weight, int64_t first_row, int64_t first,
                               uint16_t* tiles, Ahead& ahead) {
  if (kind == kFp4Weight) {
    unpack_fp4<rows>(weight, first_row, first, tiles, ahead);
  } else {
    unpack_fp8<rows>(weight, first_row, first, tiles, ahead);
  }
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

template <int kind>
inline void unpack_kind(const RowGroup& group, int64_t first, int64_t count, uint16_t* tiles) {
  int64_t b = 0;
  if (group.count == kTileRows) {
    Ahead nothing = {reinterpret_cast<const char*>(row_values(*group.weight, group.first)), 0};
    for (; b + Line<kind>::kBlocks <= count; b += Line<kind>::kBlocks) {
      unpack_lines<kind, kTileRows>(*group.weight, group.first, first + b, tiles + b * kTileValues,
                                    nothing);
    }
  }
  for (; b < count; ++b) unpack_any(group, first + b, tiles + b * kTileValues);
}

// Blocks [first, first + count) to consecutive tiles.
inline void unpack(const RowGroup& group, int64_t first, int64_t count, uint16_t* tiles) {
  switch (group.weight->kind) {
    case kFp4Weight: return unpack_kind<kFp4Weight>(group, first, count, tiles);
    case kFp8Weight: return unpack_kind<kFp8Weight>(group, first, count, tiles);
    default: break;
  }
  for (int64_t b = 0; b < count; ++b) unpack_any(group, first + b, tiles + b * kTileValues);
}

}  // namespace tiles
}  // namespace CEDAR_ISA
}  // namespace cedar
