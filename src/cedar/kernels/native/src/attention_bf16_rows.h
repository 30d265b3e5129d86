// Stored rows of sparse attention unpacked to bfloat16, exactly, for dot products of pairs.
//
// Two layouts. "Entry rows" hold one entry each, in a permuted order of elements that is cheap to make
// (below); they meet queries in the same order. "Pair rows" hold two neighbouring entries, element
// by element: 16 natural elements x 2 entries = 64 bytes; they meet pairs of weights.
//
// Order within 32 elements of an entry row, in quads of 4: A0 B0 A1 B1 A2 B2 A3 B3, where A is the
// first group of 16 and B the second, and quad j has the elements j, 4 + j, 8 + j, 12 + j of its group.
// Interleaving the words of two such rows, per 128 bits, gives A of both entries (low halves) and B
// (high halves); so the 16 columns of a pair row are those of a 4 x 4 matrix, transposed.
#pragma once

#include "attention_rows.h"

namespace cedar {
namespace CEDAR_ISA {

constexpr int kBlock = 32;        // entries that are padded to and multiplied together
constexpr int kPairColumns = 16;  // elements of a pair row
constexpr int kPairValues = 32;   // bfloat16 values of a pair row
// Values from one column block of selected pair rows to the next: a line more than it holds, or all
// blocks would fall into the same few sets of the cache.
constexpr int64_t kColumn = (kBlock / 2 + 1) * kPairValues;

// Pair rows of one part of a query's entries: those of column block c, blocks of 16, are at
// base + c * column_stride + block * block_stride; row_stride values from one to the next.
struct PairPart {
  const uint16_t* base;
  int64_t column_stride, block_stride, row_stride;
  int64_t blocks;  // of kBlock entries
};

// bfloat16 of value * 2^exponent, for 0 <= value < 256.
constexpr uint16_t small_bf16(int value, int exponent, bool negative) {
  if (value == 0) return negative ? 0x8000 : 0;
  int top = 0;
  while ((value >> (top + 1)) != 0) ++top;
  const int mantissa = (value << (7 - top)) & 0x7f;
  return static_cast<uint16_t>((negative ? 0x8000 : 0) | ((127 + exponent + top) << 7) | mantissa);
}

// Products of an E4M3 scale and the 16 E2M1 values: at most 4 + 3 bits, so exact.
struct alignas(64) ProductTable {
  uint16_t values[256][16] = {};
  constexpr ProductTable() {
    constexpr int kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int scale = 0; scale < 256; ++scale) {
      const int field = (scale >> 3) & 15, fraction = scale & 7;
      const int integer = field == 0 ? fraction : 8 + fraction;
      const int exponent = field == 0 ? -9 : field - 10;
      for (int code = 0; code < 16; ++code) {
        values[scale][code] = small_bf16(integer * kDoubled[code & 7], exponent - 1,
                                         (scale >= 128) != (code >= 8));
      }
    }
  }
};
constexpr ProductTable kProducts;

struct alignas(64) EntryOrder {
  uint16_t shifts[32] = {};   // of the packed word a value's code comes from
  uint16_t groups[32] = {};   // index bits of the value's group
  uint16_t natural[32] = {};  // element at each place
  constexpr EntryOrder() {
    for (int place = 0; place < 32; ++place) {
      const int quad = place / 8, group = place / 4 % 2, word = place % 4;
      shifts[place] = static_cast<uint16_t>(4 * quad);
      groups[place] = static_cast<uint16_t>(16 * group);
      natural[place] = static_cast<uint16_t>(16 * group + 4 * word + quad);
    }
  }
};
constexpr EntryOrder kEntryOrder;

// 32 elements of a compressed row: a lookup among the products of its two scales, by group and code.
CEDAR_INLINE __m512i main_block(const uint8_t* row, const uint8_t* scales, int block, __m512i shifts,
                                __m512i groups) {
  const __m512i packed = _mm512_broadcast_i32x4(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + block * 16)));
  const __m256i first = _mm256_load_si256(
      reinterpret_cast<const __m256i*>(kProducts.values[scales[2 * block]]));
  const __m256i second = _mm256_load_si256(
      reinterpret_cast<const __m256i*>(kProducts.values[scales[2 * block + 1]]));
  const __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  // (packed >> shifts) & 15 | groups
  const __m512i index = _mm512_ternarylogic_epi32(_mm512_srlv_epi16(packed, shifts),
                                                  _mm512_set1_epi16(15), groups, 0xea);
  return _mm512_permutexvar_epi16(index, table);
}

// Natural order of 32 bfloat16 values to the order of entry rows.
CEDAR_INLINE __m512i to_entry_order(__m512i natural) {
  return _mm512_permutexvar_epi16(_mm512_load_si512(kEntryOrder.natural), natural);
}

// Columns of a pair row, as floats, to natural order.
CEDAR_INLINE __m512 to_natural_columns(__m512 columns) {
  return _mm512_permutexvar_ps(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), columns);
}

// One window row as an entry row.
inline void unpack_window_row(const uint8_t* row, int dim, uint16_t* out) {
  // E4M3 subnormals, fraction 0..7 times 2^-9.
  alignas(64) static constexpr uint16_t kSubnormal[32] = {
      0,
      small_bf16(1, -9, false), small_bf16(2, -9, false), small_bf16(3, -9, false),
      small_bf16(4, -9, false), small_bf16(5, -9, false), small_bf16(6, -9, false),
      small_bf16(7, -9, false)};
  const __m512i subnormals = _mm512_load_si512(kSubnormal);
  for (int g = 0; g < dim / kWindowGroup; ++g) {
    const uint8_t* in = row + g * kWindowGroup;
    const int scale = row[dim + g];
    __m512i value;
    if (scale >= 10 && scale <= 246) {  // no exponent leaves the field
      const __m512i x =
          _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
      const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
      const __mmask32 nonzero = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7f));
      const __mmask32 small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
      value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
      value = _mm512_mask_permutexvar_epi16(value, small, magnitude, subnormals);
      value = _mm512_mask_add_epi16(value, nonzero, value,
                                    _mm512_set1_epi16(static_cast<int16_t>((scale - 127) * 128)));
      const __m512i sign = _mm512_slli_epi16(_mm512_xor_si512(x, magnitude), 8);
      value = _mm512_or_si512(value, sign);
    } else {
      alignas(64) uint16_t slow[kWindowGroup];
      for (int i = 0; i < kWindowGroup; ++i) {
        slow[i] = float_to_bf16(e4m3_to_float(in[i]) * e8m0_to_float(static_cast<uint8_t>(scale)));
      }
      value = _mm512_load_si512(slow);
    }
    _mm512_store_si512(out + g * kWindowGroup, to_entry_order(value));
  }
}

// Interleaves two entry rows into pair rows; column block c of the pair goes to out + c * stride.
CEDAR_INLINE void store_pair(__m512i first, __m512i second, uint16_t* out, int64_t stride) {
  _mm512_store_si512(out, _mm512_unpacklo_epi16(first, second));
  _mm512_store_si512(out + stride, _mm512_unpackhi_epi16(first, second));
}

inline void pair_rows(const uint16_t* first, const uint16_t* second, int dim, uint16_t* out,
                      int64_t stride) {
  for (int b = 0; b < dim / 32; ++b) {
    store_pair(_mm512_load_si512(first + b * 32), _mm512_load_si512(second + b * 32),
               out + 2 * b * stride, stride);
  }
}

// Two compressed rows, each to an entry row, both to pair rows.
inline void unpack_main_pair(const uint8_t* first, const uint8_t* second, int dim, uint16_t* entries,
                             uint16_t* pairs, int64_t stride) {
  const __m512i shifts = _mm512_load_si512(kEntryOrder.shifts);
  const __m512i groups = _mm512_load_si512(kEntryOrder.groups);
  const uint8_t *first_scales = first + dim / 2, *second_scales = second + dim / 2;
  for (int b = 0; b < dim / 32; ++b) {
    const __m512i x = main_block(first, first_scales, b, shifts, groups);
    const __m512i y = main_block(second, second_scales, b, shifts, groups);
    _mm512_store_si512(entries + b * 32, x);
    _mm512_store_si512(entries + dim + b * 32, y);
    store_pair(x, y, pairs + 2 * b * stride, stride);
  }
}

// Asks for a compressed row that is needed soon. Selected rows lie anywhere in the pool: without
// this, every one of them is waited for.
CEDAR_INLINE void prefetch_main_row(const uint8_t* row, int dim) {
  const int bytes = dim / 2 + dim / kMainGroup;
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
  __builtin_prefetch(row + bytes - 1);
}

// 2^t to about 3e-7 relative, below 2^-149 gives 0.
CEDAR_INLINE __m512 exp2(__m512 t) {
  t = _mm512_max_ps(t, _mm512_set1_ps(-160.f));
  // The fraction above the floor, which scalef takes out of t by itself.
  const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.8775767e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.9893397e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5826318e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4015361e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9315308e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9999994e-1f));
  return _mm512_scalef_ps(p, t);
}

}  // namespace CEDAR_ISA
}  // namespace cedar
