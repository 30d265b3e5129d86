// Rounding to and from the small number formats, a group of values at a time.
//
// The rules are the model's semantics (specification section 5) and hold bit for bit. Written as
// plain loops over a fixed count, which compilers turn into vectors of the variant being compiled;
// only the table look-up of packed E2M1 has vector code of its own. No step depends on subnormal
// arithmetic of the machine: torch may have switched it off in the calling thread.
#pragma once

#include "simd.h"

namespace cedar {
namespace CEDAR_ISA {

constexpr int kFloat32 = 0, kBfloat16 = 1;  // the dtype flag of every entry point
constexpr int kActGroup = 32;               // values that share one activation scale

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint8_t kNanScale = 255;  // E8M0
constexpr uint8_t kNanCode = 0x7f;  // E4M3

// ---- loading and storing a group ---------------------------------------------------------------

template <int n>
CEDAR_INLINE void load_values(const void* x, int dtype, int64_t offset, float* out) {
  if (dtype == kBfloat16) {
    const uint16_t* p = static_cast<const uint16_t*>(x) + offset;
    for (int i = 0; i < n; ++i) out[i] = bf16_to_float(p[i]);
  } else {
    std::memcpy(out, static_cast<const float*>(x) + offset, n * sizeof(float));
  }
}

// Values that are exact in bfloat16 (or NaN): truncation is the conversion.
template <int n>
CEDAR_INLINE void store_exact(const float* x, void* out, int dtype, int64_t offset) {
  if (dtype == kBfloat16) {
    uint16_t* p = static_cast<uint16_t*>(out) + offset;
    for (int i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(bits_of_float(x[i]) >> 16);
  } else {
    std::memcpy(static_cast<float*>(out) + offset, x, n * sizeof(float));
  }
}

// ---- scales ------------------------------------------------------------------------------------

// max |x|; as an integer comparison it also lets infinity and NaN win.
template <int n>
CEDAR_INLINE float highest_magnitude(const float* x) {
  uint32_t best = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of_float(x[i]) & ~kSignBit;
    best = magnitude > best ? magnitude : best;
  }
  return float_of_bits(best);
}

CEDAR_INLINE bool is_finite(float x) { return (bits_of_float(x) & ~kSignBit) < 0x7f800000u; }

// E8M0 byte of the smallest power of two >= ratio, for a normal ratio > 0.
CEDAR_INLINE uint8_t pow2_ceil(float ratio) {
  const uint32_t bits = bits_of_float(ratio);
  return static_cast<uint8_t>((bits >> 23) + ((bits & 0x7fffffu) != 0));
}

// 1 / 2^(scale - 127) for 1 <= scale <= 253: dividing by the scale and multiplying by this round
// the same real number.
CEDAR_INLINE float pow2_inverse(uint8_t scale) {
  return float_of_bits(static_cast<uint32_t>(254 - scale) << 23);
}

// The scale of an activation group (specification 5.2); kNanScale if a value is not finite.
CEDAR_INLINE uint8_t act_scale(const float* x) {
  const float amax = highest_magnitude<kActGroup>(x);
  if (!is_finite(amax)) return kNanScale;
  return pow2_ceil((amax > 1e-4f ? amax : 1e-4f) * (1.f / 448.f));
}

// ---- E4M3 --------------------------------------------------------------------------------------

constexpr uint32_t kE4m3Normal = 0x3c800000u;  // 2^-6, below it the step is 2^-9
constexpr float kE4m3Magic = 16384.f;          // its last bit is worth 2^-9

// Code without sign of a magnitude given as float bits: to nearest, ties to even, at most 448.
CEDAR_INLINE uint32_t e4m3_magnitude(uint32_t magnitude) {
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  const uint32_t small = bits_of_float(float_of_bits(magnitude) + kE4m3Magic) -
                         bits_of_float(kE4m3Magic);
  const uint32_t code = magnitude < kE4m3Normal ? small : normal;
  return code < 0x7eu ? code : 0x7eu;
}

CEDAR_INLINE uint8_t e4m3_code(float x) {
  const uint32_t bits = bits_of_float(x);
  return static_cast<uint8_t>(e4m3_magnitude(bits & ~kSignBit) | ((bits & kSignBit) >> 24));
}

// The value an E4M3 code of x would have, without making the code.
CEDAR_INLINE float e4m3_rounded(float x) {
  const uint32_t bits = bits_of_float(x), magnitude = bits & ~kSignBit;
  const uint32_t normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) & 0xfff00000u;
  const uint32_t small = bits_of_float((float_of_bits(magnitude) + kE4m3Magic) - kE4m3Magic);
  const uint32_t value = magnitude < kE4m3Normal ? small : normal;
  const uint32_t highest = 0x43e00000u;  // 448
  return float_of_bits((value < highest ? value : highest) | (bits & kSignBit));
}

// As e4m3_to_float of simd.h, in a form that vectorises and needs no subnormals.
CEDAR_INLINE float e4m3_value(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t small = bits_of_float(static_cast<float>(static_cast<int>(magnitude)) *
                                       float_of_bits((127u - 9u) << 23));
  const uint32_t finite = magnitude < 8 ? small : normal;
  return float_of_bits((magnitude == kNanCode ? 0x7fc00000u : finite) |
                       (static_cast<uint32_t>(code & 0x80u) << 24));
}

// ---- E2M1 --------------------------------------------------------------------------------------

// Code without sign: to nearest, ties to the even code, at most 6.
CEDAR_INLINE uint32_t e2m1_magnitude(uint32_t magnitude) {
  constexpr uint32_t kNormal = 0x3f800000u;  // 1, below it the step is a half
  constexpr float kMagic = 4194304.f;        // its last bit is worth a half
  const uint32_t normal = ((magnitude + 0x1fffffu + ((magnitude >> 22) & 1u)) >> 22) - (126u << 1);
  const uint32_t small = bits_of_float(float_of_bits(magnitude) + kMagic) - bits_of_float(kMagic);
  const uint32_t code = magnitude < kNormal ? small : normal;
  return code < 7u ? code : 7u;
}

// Packs n scaled values to n/2 bytes, the even one in the low nibble; the sign of zero is kept.
template <int n>
CEDAR_INLINE void encode_e2m1(const float* x, uint8_t* out) {
  uint32_t codes[n];
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = bits_of_float(x[i]);
    codes[i] = e2m1_magnitude(bits & ~kSignBit) | ((bits & kSignBit) >> 28);
  }
  for (int i = 0; i < n / 2; ++i) {
    out[i] = static_cast<uint8_t>(codes[2 * i] | (codes[2 * i + 1] << 4));
  }
}

// 16 packed values (8 bytes) times a scale.
CEDAR_INLINE void decode_e2m1_16(const uint8_t* packed, float scale, float* out) {
#if defined(CEDAR_AVX512)
  const __m512 table = _mm512_setr_ps(0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -0.5f, -1.f,
                                      -1.5f, -2.f, -3.f, -4.f, -6.f);
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed));
  const __m512i pairs = _mm512_cvtepu8_epi64(bytes);
  const __m512i codes = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
  _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), _mm512_set1_ps(scale)));
#elif defined(CEDAR_AVX2)
  const __m256 table = _mm256_setr_ps(0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  for (int half = 0; half < 2; ++half) {
    int32_t word;
    std::memcpy(&word, packed + 4 * half, 4);
    const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(codes, 3), 31);
    const __m256 value = _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes),
                                       _mm256_castsi256_ps(sign));
    _mm256_storeu_ps(out + 8 * half, _mm256_mul_ps(value, _mm256_set1_ps(scale)));
  }
#else
  for (int i = 0; i < 8; ++i) {
    out[2 * i] = e2m1_to_float(packed[i]) * scale;
    out[2 * i + 1] = e2m1_to_float(static_cast<uint32_t>(packed[i]) >> 4) * scale;
  }
#endif
}

}  // namespace CEDAR_ISA
}  // namespace cedar
