// The bfloat16 dot-product path of matmul.cpp, for AVX512-BF16 without matrix tiles.
//
// One accumulator per output: lane l sums input pairs l, l + 16, ... in ascending order, then the
// lanes are added as a tree. Few columns read packed weights straight from memory; many columns
// unpack a strip of weight rows first. Both feed the same accumulators the same values.
#pragma once

#include "matmul.h"
#include "thread_pool.h"
#include "weight_blocks.h"

namespace cedar {
namespace CEDAR_ISA {
namespace pairs {

constexpr int kRows = 4;           // weight rows of one register block
constexpr int kMostColumns = 4;    // operand rows of one register block

inline int64_t padded(int64_t width) { return blocks_of(width) * kBlock; }

inline size_t operand_bytes(int64_t n, int64_t width) {
  return static_cast<size_t>(n * padded(width)) * sizeof(uint16_t);
}

// 32 activations of one row as bfloat16, zeros beyond the row's end.
inline __m512i activation_block(const Rows& rows, bool quantise, int64_t row, int64_t block) {
  const int64_t source = (rows.index == nullptr ? row : rows.index[row]) * rows.stride;
  if (!quantise) {
    const uint16_t* x = static_cast<const uint16_t*>(rows.x) + source;
    return bf16_block(reinterpret_cast<const uint8_t*>(x), rows.width, block);
  }
  alignas(64) float group[kBlock];
  load_values<kBlock>(rows.x, rows.dtype, source + block * kBlock, group);
  round_act_group(group);
  alignas(64) uint16_t halves[kBlock];
  store_exact<kBlock>(group, halves, kBfloat16, 0);
  return _mm512_load_si512(halves);
}

inline void prepare(const Rows& rows, bool quantise, int64_t first, int64_t last, uint16_t* data) {
  const int64_t stride = padded(rows.width);
  for (int64_t i = first; i < last; ++i) {
    for (int64_t b = 0; b < blocks_of(rows.width); ++b) {
      _mm512_store_si512(data + i * stride + b * kBlock,
                         activation_block(rows, quantise, i, b));
    }
  }
}

// Adds lanes of a[i] and a[i + half] in pairs, into a[i].
template <int half>
CEDAR_INLINE void fold_lanes(__m512* a) {
  for (int i = 0; i < half; ++i) {
    const __m512 x = a[i], y = a[i + half];
    __m512 low, high;
    if (half == 8) {
      low = _mm512_shuffle_f32x4(x, y, 0x44), high = _mm512_shuffle_f32x4(x, y, 0xee);
    } else if (half == 4) {
      low = _mm512_shuffle_f32x4(x, y, 0x88), high = _mm512_shuffle_f32x4(x, y, 0xdd);
    } else if (half == 2) {
      low = _mm512_shuffle_ps(x, y, 0x44), high = _mm512_shuffle_ps(x, y, 0xee);
    } else {
      low = _mm512_shuffle_ps(x, y, 0x88), high = _mm512_shuffle_ps(x, y, 0xdd);
    }
    a[i] = _mm512_add_ps(low, high);
  }
}

// Lane i of the result is the sum of the lanes of a[i]; the same tree for every lane.
CEDAR_INLINE __m512 sum_lanes(__m512* a) {
  fold_lanes<8>(a);
  fold_lanes<4>(a);
  fold_lanes<2>(a);
  fold_lanes<1>(a);
  // The shuffles have interleaved the results.
  const __m512i order =
      _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_ps(order, a[0]);
}

// Where one weight row's blocks come from.
struct Source {
  const uint8_t* values;
  const uint8_t* scales;  // packed kinds
};

template <int kind>
CEDAR_INLINE __m512i load_block(const Source& source, int64_t block) {
  if (kind == kFp4Weight) return fp4_block(source.values + block * 16, source.scales[block]);
  if (kind == kFp8Weight) return fp8_block(source.values + block * 32, source.scales[block]);
  return _mm512_loadu_si512(source.values + block * 64);
}

// kRows x T outputs: out[t * stride + r].
template <int kind, int T>
CEDAR_INLINE void dot(const Source* w, int rows, const uint16_t* x, int64_t x_stride,
                      int64_t blocks, float* out, int64_t stride) {
  __m512 acc[16];
  for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
  for (int64_t b = 0; b < blocks; ++b) {
    __m512bh column[T];
    for (int t = 0; t < T; ++t) {
      column[t] = (__m512bh)_mm512_load_si512(x + t * x_stride + b * kBlock);
    }
    for (int r = 0; r < kRows; ++r) {
      const __m512bh row = (__m512bh)load_block<kind>(w[r], b);
      for (int t = 0; t < T; ++t) {
        acc[t * kRows + r] = _mm512_dpbf16_ps(acc[t * kRows + r], row, column[t]);
      }
    }
  }
  alignas(64) float sums[16];
  _mm512_store_ps(sums, sum_lanes(acc));
  for (int t = 0; t < T; ++t) {
    for (int r = 0; r < rows; ++r) out[t * stride + r] = sums[t * kRows + r];
  }
}

template <int kind>
inline void dot_columns(const Source* w, int rows, const Operand& operand, int64_t first_column,
                        int64_t columns, float* out, int64_t stride) {
  const int64_t x_stride = padded(operand.width), blocks = blocks_of(operand.width);
  const uint16_t* x = static_cast<const uint16_t*>(operand.data) + first_column * x_stride;
  int64_t c = 0;
  for (; c + 4 <= columns; c += 4) {
    dot<kind, 4>(w, rows, x + c * x_stride, x_stride, blocks, out + c * stride, stride);
  }
  x += c * x_stride;
  out += c * stride;
  switch (columns - c) {
    case 3: dot<kind, 3>(w, rows, x, x_stride, blocks, out, stride); break;
    case 2: dot<kind, 2>(w, rows, x, x_stride, blocks, out, stride); break;
    case 1: dot<kind, 1>(w, rows, x, x_stride, blocks, out, stride); break;
    default: break;
  }
}

// One weight row as plain bfloat16 blocks.
template <int kind>
inline void unpack_row(const Weight& weight, const Source& source, uint16_t* out) {
  for (int64_t b = 0; b < blocks_of(weight.in); ++b) {
    const __m512i block = kind == kBfloat16Weight ? bf16_block(source.values, weight.in, b)
                                                  : load_block<kind>(source, b);
    _mm512_store_si512(out + b * kBlock, block);
  }
}

template <int kind>
inline void multiply_kind(const Weight& weight, int64_t first_row, int64_t rows,
                          const Operand& operand, int64_t first_column, int64_t columns, float* out,
                          int64_t stride) {
  const int64_t padded_width = padded(weight.in);
  uint16_t* strip = scratch_array<uint16_t>(kMatmulSlot, kRows * padded_width);
  const bool direct =
      kind == kBfloat16Weight ? weight.in % kBlock == 0 : columns <= kMostColumns;
  for (int64_t r = 0; r < rows; r += kRows) {
    const int count = static_cast<int>(rows - r < kRows ? rows - r : kRows);
    Source source[kRows];
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first_row + r + (i < count ? i : 0);  // a missing row is computed twice
      source[i] = {row_values(weight, row), row_scales(weight, row)};
      if (direct) continue;
      unpack_row<kind>(weight, source[i], strip + i * padded_width);
      source[i].values = reinterpret_cast<const uint8_t*>(strip + i * padded_width);
    }
    if (direct) {
      dot_columns<kind>(source, count, operand, first_column, columns, out + r, stride);
    } else {
      dot_columns<kBfloat16Weight>(source, count, operand, first_column, columns, out + r, stride);
    }
  }
}

inline void multiply(const Weight& weight, int64_t first_row, int64_t rows, const Operand& operand,
                     int64_t first_column, int64_t columns, float* out, int64_t stride) {
  const auto run = weight.kind == kFp4Weight   ? multiply_kind<kFp4Weight>
                   : weight.kind == kFp8Weight ? multiply_kind<kFp8Weight>
                                               : multiply_kind<kBfloat16Weight>;
  run(weight, first_row, rows, operand, first_column, columns, out, stride);
}

}  // namespace pairs
}  // namespace CEDAR_ISA
}  // namespace cedar
