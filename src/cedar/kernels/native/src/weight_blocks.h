// Packed weights to plain numbers: whole rows of float32 in every variant, 32 bfloat16 values at a
// time where the variant has bfloat16 products. All exact (specification 3.3).
#pragma once

#include "linear.h"
#include "quant.h"

namespace cedar {
namespace CEDAR_ISA {

constexpr int64_t kBlock = 32;  // inputs that share a scale

inline int64_t blocks_of(int64_t in) { return (in + kBlock - 1) / kBlock; }

inline int64_t row_bytes(const Weight& w) {
  switch (w.kind) {
    case kFloat32Weight: return w.in * 4;
    case kBfloat16Weight: return w.in * 2;
    case kFp8Weight: return w.in;
    default: return w.in / 2;
  }
}

inline const uint8_t* row_values(const Weight& w, int64_t row) {
  return static_cast<const uint8_t*>(w.values) + row * row_bytes(w);
}

inline const uint8_t* row_scales(const Weight& w, int64_t row) {
  if (w.scales == nullptr) return nullptr;
  return w.scales + (w.kind == kFp8Weight ? row / kBlock : row) * blocks_of(w.in);
}

// 32 values of one block of a packed row.
CEDAR_INLINE void decode_block(int32_t kind, const uint8_t* row, const uint8_t* scales,
                               int64_t block, float* out) {
  const float scale = e8m0_to_float(scales[block]);
  if (kind == kFp8Weight) {
    decode_e4m3<kBlock>(row + block * kBlock, scale, out);
  } else {
    decode_e2m1_16(row + block * (kBlock / 2), scale, out);
    decode_e2m1_16(row + block * (kBlock / 2) + 8, scale, out + 16);
  }
}

#if defined(CEDAR_AVX512)

// A power of two multiplies a bfloat16 by adding to its exponent: `adds[b]` is what to add for
// block b, in place. Returns whether no value of any block can leave the range of normal numbers;
// if it can, callers take `exact_block`.
inline bool expand_scales(int32_t kind, const uint8_t* scales, int64_t blocks, int16_t* adds) {
  // Exponents of the smallest and the largest value of each format: 2^-1 .. 6, 2^-9 .. 448.
  const __m256i lowest = _mm256_set1_epi8(kind == kFp8Weight ? 1 + 9 : 1 + 1);
  const __m256i highest = _mm256_set1_epi8(static_cast<char>(kind == kFp8Weight ? 254 - 8 : 254 - 2));
  __mmask32 outside = 0;
  for (int64_t b = 0; b < blocks; b += 32) {
    const __mmask32 mask = blocks - b >= 32 ? 0xffffffffu : (1u << (blocks - b)) - 1u;
    const __m256i bytes = _mm256_maskz_loadu_epi8(mask, scales + b);
    outside |= _mm256_mask_cmplt_epu8_mask(mask, bytes, lowest) |
               _mm256_mask_cmpgt_epu8_mask(mask, bytes, highest);
    const __m512i exponent = _mm512_sub_epi16(_mm512_cvtepu8_epi16(bytes), _mm512_set1_epi16(127));
    _mm512_mask_storeu_epi16(adds + b, mask, _mm512_slli_epi16(exponent, 7));
  }
  return outside == 0;
}

// 32 bfloat16 values of a packed row, for scales that expand_scales found plain.
CEDAR_INLINE __m512i fp4_block(const uint8_t* packed, int16_t add) {
  // Bits of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, twice: the look-up reads five bits of
  // each 16-bit lane, the fifth is a neighbour's.
  const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
      0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, int16_t(0x8000),
      int16_t(0xbf00), int16_t(0xbf80), int16_t(0xbfc0), int16_t(0xc000), int16_t(0xc040),
      int16_t(0xc080), int16_t(0xc0c0)));
  constexpr __mmask32 kNonzero = 0xfefefefeu;
  const __m512i bytes =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
  // Masking clears the sign of a zero, which no sum shows.
  const __m512i scaled = _mm512_maskz_add_epi16(kNonzero, table, _mm512_set1_epi16(add));
  return _mm512_permutexvar_epi16(codes, scaled);
}

// Any codes, NaN and the subnormal ones included.
inline __m512i fp8_block_any(__m256i bytes, int16_t add) {
  // Magnitudes below 2^-6 (codes 0..7) are 0..7 times 2^-9; the look-up reads five bits.
  const __m512i small = _mm512_broadcast_i32x4(_mm_setr_epi16(
      0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  constexpr __mmask32 kNonzero = 0xfefefefeu;
  const __m512i codes = _mm512_cvtepu8_epi16(bytes);
  const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
  const __m512i wide_add = _mm512_set1_epi16(add);
  const __m512i rebias = _mm512_add_epi16(wide_add, _mm512_set1_epi16(120 * 128));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), rebias);
  const __m512i scaled = _mm512_maskz_add_epi16(kNonzero, small, wide_add);
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(kNanCode));
  __m512i value = _mm512_mask_permutexvar_epi16(normal, is_small, codes, scaled);
  value = _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(0x7fc0));
  const __m512i sign = _mm512_slli_epi16(_mm512_sub_epi16(codes, magnitude), 8);
  return _mm512_or_si512(value, sign);
}

CEDAR_INLINE __m512i fp8_block(const uint8_t* values, int16_t add) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  // Magnitude codes 8..126 are normal numbers; the others are rare enough for a branch.
  const __m256i from_8 = _mm256_sub_epi8(_mm256_and_si256(bytes, _mm256_set1_epi8(0x7f)),
                                         _mm256_set1_epi8(8));
  if (__builtin_expect(_mm256_cmpgt_epu8_mask(from_8, _mm256_set1_epi8(126 - 8)) != 0, 0)) {
    return fp8_block_any(bytes, add);
  }
  // Sign to bit 15, exponent and mantissa from bit 4 up.
  const __m512i moved = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 4);
  const __m512i placed = _mm512_and_si512(moved, _mm512_set1_epi16(static_cast<int16_t>(0x87f0)));
  return _mm512_add_epi16(placed, _mm512_set1_epi16(static_cast<int16_t>(add + 120 * 128)));
}

// The same for any scale byte.
inline __m512i exact_block(int32_t kind, const uint8_t* row, const uint8_t* scales, int64_t block) {
  alignas(64) float values[kBlock];
  decode_block(kind, row, scales, block, values);
  alignas(64) uint16_t halves[kBlock];
  store_exact<kBlock>(values, halves, kBfloat16, 0);
  return _mm512_load_si512(halves);
}

// Block of a bfloat16 row, zeros beyond the end of the row.
CEDAR_INLINE __m512i bf16_block(const uint8_t* row, int64_t in, int64_t block) {
  const int64_t left = in - block * kBlock;
  const __mmask32 mask = left >= kBlock ? 0xffffffffu : (1u << left) - 1u;
  return _mm512_maskz_loadu_epi16(mask, row + block * kBlock * 2);
}

#endif  // CEDAR_AVX512

}  // namespace CEDAR_ISA
}  // namespace cedar
