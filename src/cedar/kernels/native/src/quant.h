// Rounding to and from the small number formats, a vector of values at a time.
//
// The rules are the model's semantics (specification section 5) and hold bit for bit. Written with
// the compiler's vector types, which gcc and clang map to any instruction set; only narrow lanes and
// the table look-up of packed E2M1 have code of their own. No step depends on subnormal arithmetic of the
// machine: torch may have switched it off in the calling thread.
#pragma once

#include "simd.h"

namespace cedar {
namespace CEDAR_ISA {

constexpr int kFloat32 = 0, kBfloat16 = 1;  // the dtype flag of every entry point
constexpr int kActGroup = 32;               // values that share one activation scale

constexpr uint8_t kNanScale = 255;  // E8M0
constexpr uint8_t kNanCode = 0x7f;  // E4M3
constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

constexpr int kLanes = F32::kLanes;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t CodePairs __attribute__((vector_size(16)));  // two E2M1 codes, a byte each
typedef uint8_t Packed __attribute__((vector_size(8)));

template <class V>
CEDAR_INLINE V load_vector(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
CEDAR_INLINE void store_vector(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// Narrow lanes in memory to and from Ints; compilers do this badly by themselves.
CEDAR_INLINE Ints load_bytes(const uint8_t* p) {
#if defined(CEDAR_AVX512)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(CEDAR_AVX2)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return Ints{p[0], p[1], p[2], p[3]};
#endif
}

CEDAR_INLINE Ints load_halves(const uint16_t* p) {
#if defined(CEDAR_AVX512)
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(CEDAR_AVX2)
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return Ints{p[0], p[1], p[2], p[3]};
#endif
}

// Lanes must fit.
CEDAR_INLINE void store_bytes(uint8_t* p, Ints v) {
#if defined(CEDAR_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(CEDAR_AVX2)
  const __m256i gathered = _mm256_shuffle_epi8(
      (__m256i)v, _mm256_set1_epi32(0x0c080400));  // the low byte of each lane, four times over
  const int32_t words[2] = {_mm256_extract_epi32(gathered, 0), _mm256_extract_epi32(gathered, 4)};
  std::memcpy(p, words, 8);
#else
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(v[i]);
#endif
}

CEDAR_INLINE void store_halves(uint16_t* p, Ints v) {
#if defined(CEDAR_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)v));
#elif defined(CEDAR_AVX2)
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(v[i]);
#endif
}

// ---- loading and storing a group ---------------------------------------------------------------

template <int n>
CEDAR_INLINE void load_values(const void* x, int dtype, int64_t offset, float* out) {
  if (dtype == kBfloat16) {
    const uint16_t* p = static_cast<const uint16_t*>(x) + offset;
    for (int i = 0; i < n; i += kLanes) store_vector(out + i, load_halves(p + i) << 16);
  } else {
    std::memcpy(out, static_cast<const float*>(x) + offset, n * sizeof(float));
  }
}

// Values that are exact in bfloat16 (or NaN): truncation is the conversion.
template <int n>
CEDAR_INLINE void store_exact(const float* x, void* out, int dtype, int64_t offset) {
  if (dtype == kBfloat16) {
    uint16_t* p = static_cast<uint16_t*>(out) + offset;
    for (int i = 0; i < n; i += kLanes) {
      store_halves(p + i, (load_vector<Ints>(x + i) >> 16) & 0xffff);
    }
  } else {
    std::memcpy(static_cast<float*>(out) + offset, x, n * sizeof(float));
  }
}

// ---- scales ------------------------------------------------------------------------------------

CEDAR_INLINE int32_t highest_lane(Ints v) {
#if defined(CEDAR_AVX512)
  return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(CEDAR_AVX2)
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v),
                            _mm256_extracti128_si256((__m256i)v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
#else
  int32_t best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

// max |x|; as an integer comparison it also lets infinity and NaN win.
template <int n>
CEDAR_INLINE float highest_magnitude(const float* x) {
  Ints best = load_vector<Ints>(x) & kMagnitude;
  for (int i = kLanes; i < n; i += kLanes) {
    const Ints next = load_vector<Ints>(x + i) & kMagnitude;
    best = next > best ? next : best;
  }
  return float_of_bits(static_cast<uint32_t>(highest_lane(best)));
}

CEDAR_INLINE bool is_finite(float x) { return (bits_of_float(x) & kMagnitude) < kInfinity; }

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

constexpr int32_t kE4m3Normal = 0x3c800000;    // 2^-6, below it the step is 2^-9
constexpr float kE4m3Magic = 16384.f;          // its last bit is worth 2^-9
constexpr int32_t kE4m3MagicBits = 0x46800000;
constexpr int32_t kE4m3Highest = 0x43e00000;   // 448

// Codes, one a lane: to nearest, ties to even, at most 448 in magnitude.
CEDAR_INLINE Ints e4m3_codes(Floats x) {
  const Ints bits = (Ints)x, magnitude = bits & kMagnitude;
  const Ints normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  const Ints small = (Ints)((Floats)magnitude + kE4m3Magic) - kE4m3MagicBits;
  const Ints code = magnitude < kE4m3Normal ? small : normal;
  return (code < 0x7e ? code : Ints{} + 0x7e) | ((bits >> 24) & 0x80);
}

// The values those codes mean, without making the codes.
CEDAR_INLINE Floats e4m3_rounded(Floats x) {
  const Ints bits = (Ints)x, magnitude = bits & kMagnitude;
  const Ints normal = (magnitude + 0x7ffff + ((magnitude >> 20) & 1)) & ~0xfffff;
  const Ints small = (Ints)(((Floats)magnitude + kE4m3Magic) - kE4m3Magic);
  const Ints value = magnitude < kE4m3Normal ? small : normal;
  return (Floats)((value < kE4m3Highest ? value : Ints{} + kE4m3Highest) | (bits & ~kMagnitude));
}

// Codes to values, exact; both NaN codes give NaN.
CEDAR_INLINE Floats e4m3_values(Ints code) {
  const Ints magnitude = code & 0x7f;
  const Ints normal = (magnitude << 20) + (120 << 23);
  const Ints small = (Ints)(__builtin_convertvector(magnitude, Floats) * 0x1p-9f);
  const Ints finite = magnitude < 8 ? small : normal;
  const Ints value = magnitude == kNanCode ? Ints{} + 0x7fc00000 : finite;
  return (Floats)(value | ((code & 0x80) << 24));
}

template <int n>
CEDAR_INLINE void encode_e4m3(const float* x, float factor, uint8_t* codes) {
  for (int i = 0; i < n; i += kLanes) {
    store_bytes(codes + i, e4m3_codes(load_vector<Floats>(x + i) * factor));
  }
}

template <int n>
CEDAR_INLINE void decode_e4m3(const uint8_t* codes, float scale, float* out) {
  for (int i = 0; i < n; i += kLanes) {
    store_vector(out + i, e4m3_values(load_bytes(codes + i)) * scale);
  }
}

CEDAR_INLINE uint8_t encode_e4m3_one(float x) {
  return static_cast<uint8_t>(e4m3_codes(Floats{} + x)[0]);
}

// Replaces an activation group by what its quantised form means (specification 5.2); NaN if a value
// is not finite. The result can overflow to infinity, as the formula says.
CEDAR_INLINE void round_act_group(float* x) {
  const uint8_t byte = act_scale(x);
  const float scale = e8m0_to_float(byte);
  const float inverse = byte == kNanScale ? scale : pow2_inverse(byte);
  for (int i = 0; i < kActGroup; i += kLanes) {
    store_vector(x + i, e4m3_rounded(load_vector<Floats>(x + i) * inverse) * scale);
  }
}

// ---- E2M1 --------------------------------------------------------------------------------------

// Codes, one a lane: to nearest, ties to the even code, at most 6; the sign of zero is kept.
CEDAR_INLINE Ints e2m1_codes(Floats x) {
  constexpr int32_t kNormal = 0x3f800000;  // 1, below it the step is a half
  constexpr float kMagic = 4194304.f;      // its last bit is worth a half
  constexpr int32_t kMagicBits = 0x4a800000;
  const Ints bits = (Ints)x, magnitude = bits & kMagnitude;
  const Ints normal = ((magnitude + 0x1fffff + ((magnitude >> 22) & 1)) >> 22) - (126 << 1);
  const Ints small = (Ints)((Floats)magnitude + kMagic) - kMagicBits;
  const Ints code = magnitude < kNormal ? small : normal;
  return (code < 7 ? code : Ints{} + 7) | ((bits >> 28) & 8);
}

// Packs n scaled values to n/2 bytes, the even one in the low nibble.
template <int n>
CEDAR_INLINE void encode_e2m1(const float* scaled, uint8_t* packed) {
  alignas(64) uint8_t codes[n];
  for (int i = 0; i < n; i += kLanes) {
    store_bytes(codes + i, e2m1_codes(load_vector<Floats>(scaled + i)));
  }
  for (int i = 0; i < n; i += 16) {
    const CodePairs pairs = load_vector<CodePairs>(codes + i);
    store_vector(packed + i / 2, __builtin_convertvector((pairs | (pairs >> 4)) & 0xff, Packed));
  }
}

// 16 packed values (8 bytes) times a scale.
CEDAR_INLINE void decode_e2m1_16(const uint8_t* packed, float scale, float* out) {
#if defined(CEDAR_AVX512)
  const __m512 table = _mm512_setr_ps(0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -0.5f, -1.f,
                                      -1.5f, -2.f, -3.f, -4.f, -6.f);
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed));
  const __m512i pairs = _mm512_cvtepu8_epi64(bytes);
  // The table look-up reads four bits of each 32-bit lane: low nibble below, high nibble above.
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
