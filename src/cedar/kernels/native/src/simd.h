// One vector of floats, as wide as the variant being compiled allows, and the number formats.
//
// Included by kernel files only (they define CEDAR_ISA). Nothing here rounds differently between
// variants except `fma`, which is fused only where the hardware is: use `a * b + c` (two
// roundings everywhere, -ffp-contract=off) where bits must agree.
#pragma once

#ifndef CEDAR_ISA
#error "compile kernel files with -DCEDAR_ISA=scalar|avx2|avx512|amx"
#endif

#include <cstdint>
#include <cstring>

#include "bfloat16.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define CEDAR_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#define CEDAR_AVX2 1
#include <immintrin.h>
#endif

namespace cedar {
namespace CEDAR_ISA {

// ---- number formats, one value at a time -------------------------------------------------------

// E8M0: byte b means 2^(b - 127); 0 is the subnormal 2^-127, 255 is NaN.
CEDAR_INLINE float e8m0_to_float(uint8_t byte) {
  if (byte == 0) return float_of_bits(0x00400000u);
  if (byte == 255) return float_of_bits(0x7fc00000u);
  return float_of_bits(static_cast<uint32_t>(byte) << 23);
}

// E4M3 (fn): sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, 0x7f/0xff are NaN.
CEDAR_INLINE float e4m3_to_float(uint8_t byte) {
  const uint32_t magnitude = byte & 0x7fu;
  if (magnitude == 0x7fu) return float_of_bits(0x7fc00000u);
  // Subnormals are made from integers: no float subnormal occurs, whatever the processor's mode.
  const float value = magnitude < 8u ? static_cast<float>(static_cast<int>(magnitude)) * 0x1p-9f
                                     : float_of_bits((magnitude << 20) + (120u << 23));
  return float_of_bits(bits_of_float(value) | (static_cast<uint32_t>(byte & 0x80u) << 24));
}

// E2M1: twice the value of a 4-bit code, an integer in -12..12.
CEDAR_INLINE int e2m1_doubled(uint32_t code) {
  constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return kDoubled[code & 15u];
}

CEDAR_INLINE float e2m1_to_float(uint32_t code) {
  constexpr float kValue[16] = {0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
  return kValue[code & 15u];
}

// ---- F32: one vector of floats ---------------------------------------------------------------------

#if defined(CEDAR_AVX512)

struct F32 {
  static constexpr int kLanes = 16;
  __m512 v;

  static CEDAR_INLINE __mmask16 mask(int n) {
    return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u);
  }
  static CEDAR_INLINE F32 zero() { return {_mm512_setzero_ps()}; }
  static CEDAR_INLINE F32 set(float x) { return {_mm512_set1_ps(x)}; }
  static CEDAR_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  // The first n lanes (n < kLanes allowed); the others are 0 and their memory is not touched.
  static CEDAR_INLINE F32 load(const float* p, int n) {
    return {_mm512_maskz_loadu_ps(mask(n), p)};
  }
  static CEDAR_INLINE F32 load_bf16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  static CEDAR_INLINE F32 load_bf16(const uint16_t* p, int n) {
    const __m256i half = _mm256_maskz_loadu_epi16(mask(n), p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  CEDAR_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  CEDAR_INLINE void store(float* p, int n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
  // Rounded to bfloat16, in the upper half of each lane; the lower half is left over.
  CEDAR_INLINE __m512i rounded_bits() const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  }
  CEDAR_INLINE __m256i to_bf16() const {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(), 16));
  }
  CEDAR_INLINE void store_bf16(uint16_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16());
  }
  CEDAR_INLINE void store_bf16(uint16_t* p, int n) const {
    _mm256_mask_storeu_epi16(p, mask(n), to_bf16());
  }
  CEDAR_INLINE float sum() const { return _mm512_reduce_add_ps(v); }
  CEDAR_INLINE float highest() const { return _mm512_reduce_max_ps(v); }
};

CEDAR_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
CEDAR_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
CEDAR_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
CEDAR_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
CEDAR_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
CEDAR_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
CEDAR_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
CEDAR_INLINE F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
CEDAR_INLINE F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
CEDAR_INLINE F32 round(F32 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x * 2^n for integral n.
CEDAR_INLINE F32 scale_pow2(F32 x, F32 n) { return {_mm512_scalef_ps(x.v, n.v)}; }

#elif defined(CEDAR_AVX2)

struct F32 {
  static constexpr int kLanes = 8;
  __m256 v;

  static CEDAR_INLINE __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static CEDAR_INLINE F32 zero() { return {_mm256_setzero_ps()}; }
  static CEDAR_INLINE F32 set(float x) { return {_mm256_set1_ps(x)}; }
  static CEDAR_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static CEDAR_INLINE F32 load(const float* p, int n) { return {_mm256_maskload_ps(p, mask(n))}; }
  static CEDAR_INLINE F32 load_bf16(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
  }
  static CEDAR_INLINE F32 load_bf16(const uint16_t* p, int n) {
    uint16_t whole[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    std::memcpy(whole, p, sizeof(uint16_t) * static_cast<size_t>(n < 8 ? n : 8));
    return load_bf16(whole);
  }
  CEDAR_INLINE void store(float* p) const { _mm256_storeu_ps(p, v); }
  CEDAR_INLINE void store(float* p, int n) const { _mm256_maskstore_ps(p, mask(n), v); }
  CEDAR_INLINE __m128i to_bf16() const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i out = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    const __m256i packed = _mm256_packus_epi32(out, out);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
  CEDAR_INLINE void store_bf16(uint16_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16());
  }
  CEDAR_INLINE void store_bf16(uint16_t* p, int n) const {
    uint16_t whole[8];
    store_bf16(whole);
    std::memcpy(p, whole, sizeof(uint16_t) * static_cast<size_t>(n < 8 ? n : 8));
  }
  CEDAR_INLINE float sum() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  CEDAR_INLINE float highest() const {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
};

CEDAR_INLINE F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
CEDAR_INLINE F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
CEDAR_INLINE F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
CEDAR_INLINE F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
CEDAR_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
CEDAR_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
CEDAR_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
CEDAR_INLINE F32 abs(F32 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.f), a.v)}; }
CEDAR_INLINE F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.v)}; }
CEDAR_INLINE F32 round(F32 a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
CEDAR_INLINE F32 scale_pow2(F32 x, F32 n) {
  // In two halves, so that results in the subnormal range come out right.
  const __m256i whole = _mm256_cvtps_epi32(n.v);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i rest = _mm256_sub_epi32(whole, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(x.v, a), b)};
}

#else

// Plain loops over four floats; the compiler makes SSE2 or NEON of them.
struct F32 {
  static constexpr int kLanes = 4;
  float v[4];

  static CEDAR_INLINE F32 zero() { return {{0.f, 0.f, 0.f, 0.f}}; }
  static CEDAR_INLINE F32 set(float x) { return {{x, x, x, x}}; }
  static CEDAR_INLINE F32 load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static CEDAR_INLINE F32 load(const float* p, int n) {
    F32 r = zero();
    for (int i = 0; i < 4 && i < n; ++i) r.v[i] = p[i];
    return r;
  }
  static CEDAR_INLINE F32 load_bf16(const uint16_t* p) { return load_bf16(p, 4); }
  static CEDAR_INLINE F32 load_bf16(const uint16_t* p, int n) {
    F32 r = zero();
    for (int i = 0; i < 4 && i < n; ++i) r.v[i] = bf16_to_float(p[i]);
    return r;
  }
  CEDAR_INLINE void store(float* p) const { std::memcpy(p, v, sizeof v); }
  CEDAR_INLINE void store(float* p, int n) const {
    for (int i = 0; i < 4 && i < n; ++i) p[i] = v[i];
  }
  CEDAR_INLINE void store_bf16(uint16_t* p) const { store_bf16(p, 4); }
  CEDAR_INLINE void store_bf16(uint16_t* p, int n) const {
    for (int i = 0; i < 4 && i < n; ++i) p[i] = float_to_bf16(v[i]);
  }
  CEDAR_INLINE float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
  CEDAR_INLINE float highest() const {
    const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
  }
};

#define CEDAR_LANEWISE(expression) \
  F32 r;                           \
  for (int i = 0; i < 4; ++i) r.v[i] = (expression); \
  return r
CEDAR_INLINE F32 operator+(F32 a, F32 b) { CEDAR_LANEWISE(a.v[i] + b.v[i]); }
CEDAR_INLINE F32 operator-(F32 a, F32 b) { CEDAR_LANEWISE(a.v[i] - b.v[i]); }
CEDAR_INLINE F32 operator*(F32 a, F32 b) { CEDAR_LANEWISE(a.v[i] * b.v[i]); }
CEDAR_INLINE F32 operator/(F32 a, F32 b) { CEDAR_LANEWISE(a.v[i] / b.v[i]); }
CEDAR_INLINE F32 fma(F32 a, F32 b, F32 c) { CEDAR_LANEWISE(a.v[i] * b.v[i] + c.v[i]); }
CEDAR_INLINE F32 max(F32 a, F32 b) { CEDAR_LANEWISE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
CEDAR_INLINE F32 min(F32 a, F32 b) { CEDAR_LANEWISE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
CEDAR_INLINE F32 abs(F32 a) { CEDAR_LANEWISE(__builtin_fabsf(a.v[i])); }
CEDAR_INLINE F32 sqrt(F32 a) { CEDAR_LANEWISE(__builtin_sqrtf(a.v[i])); }
// For |a| < 2^22.
CEDAR_INLINE F32 round(F32 a) { CEDAR_LANEWISE((a.v[i] + 12582912.f) - 12582912.f); }
CEDAR_INLINE float scale_pow2_lane(float x, float n) {
  const int whole = static_cast<int>(n), half = whole >> 1, rest = whole - half;
  return x * float_of_bits(static_cast<uint32_t>(half + 127) << 23) *
         float_of_bits(static_cast<uint32_t>(rest + 127) << 23);
}
CEDAR_INLINE F32 scale_pow2(F32 x, F32 n) { CEDAR_LANEWISE(scale_pow2_lane(x.v[i], n.v[i])); }
#undef CEDAR_LANEWISE

#endif

// e^x to about 2 units in the last place; x below -104 gives 0, above 88.7 infinity; NaN is lost.
CEDAR_INLINE F32 exp(F32 x) {
  x = min(max(x, F32::set(-110.f)), F32::set(89.f));
  const F32 n = round(x * F32::set(1.44269504088896341f));
  // ln 2 in two parts: the first has few enough bits that n * part is exact.
  F32 r = fma(n, F32::set(-0.693359375f), x);
  r = fma(n, F32::set(2.12194440e-4f), r);
  F32 p = F32::set(1.9875691500e-4f);
  p = fma(p, r, F32::set(1.3981999507e-3f));
  p = fma(p, r, F32::set(8.3334519073e-3f));
  p = fma(p, r, F32::set(4.1665795894e-2f));
  p = fma(p, r, F32::set(1.6666665459e-1f));
  p = fma(p, r, F32::set(5.0000001201e-1f));
  p = fma(p, r * r, r) + F32::set(1.f);
  return scale_pow2(p, n);
}

}  // namespace CEDAR_ISA
}  // namespace cedar
