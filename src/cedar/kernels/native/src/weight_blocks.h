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

// E2M1 values times each E8M0 scale as bfloat16 bits, exact: the whole multiplication is a look-up.
// Twice 16 entries per scale, because VPERMW reads five bits of each lane and the fifth is a
// neighbour's.
struct Fp4Table {
  alignas(64) uint16_t bits[256][32];

  constexpr Fp4Table() : bits() {
    constexpr int kExponent[8] = {0, -1, 0, 0, 1, 1, 2, 2};  // 0, 0.5, 1, 1.5, 2, 3, 4, 6
    for (int scale = 0; scale < 256; ++scale) {
      for (int code = 0; code < 32; ++code) {
        const int magnitude = code & 7, half = magnitude == 3 || magnitude == 5 || magnitude == 7;
        const int exponent = kExponent[magnitude] + scale;
        int value = 0;
        if (scale == kNanScale) {
          value = 0x7fc0;
        } else if (magnitude != 0) {
          const int significand = 128 + half * 64;  // subnormal from exponent 0 down
          value = exponent > 254  ? 0x7f80
                  : exponent > 0 ? (exponent - 1) * 128 + significand
                                 : significand >> (1 - exponent);
        }
        bits[scale][code] = static_cast<uint16_t>(value | (code & 8) << 12);
      }
    }
  }
};

inline constexpr Fp4Table kFp4Table;

// Values of codes that lie in the lowest four bits of each 16-bit lane.
CEDAR_INLINE __m512i fp4_values(__m512i codes, uint8_t scale) {
  return _mm512_permutexvar_epi16(codes, _mm512_load_si512(kFp4Table.bits[scale]));
}

// 32 values of a packed row as bfloat16.
CEDAR_INLINE __m512i fp4_block(const uint8_t* packed, uint8_t scale) {
  const __m512i bytes =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
  return fp4_values(codes, scale);
}

// E4M3: a normal value times a power of two is an addition to the exponent, unless the result leaves
// the normal numbers: smallest 2^-9, largest below 2^9.
CEDAR_INLINE bool fp8_is_plain(uint8_t scale) { return scale >= 1 + 9 && scale <= 254 - 8; }

CEDAR_INLINE int16_t fp8_rebias(uint8_t scale) {
  return static_cast<int16_t>((scale - 127 + 120) * 128);
}

// Sign to bit 15, exponent and mantissa from bit 4 up; still with the exponent bias of E4M3.
CEDAR_INLINE __m512i fp8_placed(__m256i bytes) {
  const __m512i moved = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 4);
  return _mm512_and_si512(moved, _mm512_set1_epi16(static_cast<int16_t>(0x87f0)));
}

// Any codes and any scale.
inline __m512i fp8_block_any(const uint8_t* values, uint8_t scale) {
  alignas(64) float wide[kBlock];
  alignas(64) uint16_t halves[kBlock];
  decode_e4m3<kBlock>(values, e8m0_to_float(scale), wide);
  store_exact<kBlock>(wide, halves, kBfloat16, 0);
  return _mm512_load_si512(halves);
}

CEDAR_INLINE __m512i fp8_block(const uint8_t* values, uint8_t scale) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  // Magnitude codes 8..126 are normal numbers; the others are rare enough for a branch.
  const __m256i from_8 = _mm256_sub_epi8(_mm256_and_si256(bytes, _mm256_set1_epi8(0x7f)),
                                         _mm256_set1_epi8(8));
  const __mmask32 odd_ones = _mm256_cmpgt_epu8_mask(from_8, _mm256_set1_epi8(126 - 8));
  if (__builtin_expect(odd_ones != 0 || !fp8_is_plain(scale), 0)) {
    return fp8_block_any(values, scale);
  }
  return _mm512_add_epi16(fp8_placed(bytes), _mm512_set1_epi16(fp8_rebias(scale)));
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
