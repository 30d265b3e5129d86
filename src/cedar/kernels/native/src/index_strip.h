// Index keys and queries made ready for dot products, and the dot products.
//
// A row holds E2M1 values with one power-of-two scale per group of 32. Doubled, a value is an
// integer in -12..12. When the scales of a row lie within a factor of 8 of each other, the row is an
// integer vector in -96..96 times one power of two ("plain"): then all dot products are integers
// below 2^24, exact in any arithmetic, and the scales come out of the sum over heads as a factor.
// That equals the definition bit for bit as long as nothing leaves the normal float range, so
// exponents and head weights are checked too (kMaxExponent, kMaxWeight).
//
// Everything else takes the general road: integer dot products per group, combined in double,
// rounded to float once. Those are exact while the scales of one dot product lie within 2^38 of
// each other; beyond that, the result still depends on nothing but the bytes.
//
// 16 keys that are scored together are a strip. Layouts of a strip and of a query agree within a
// variant; the order of the elements inside a row is permuted where that is cheaper, alike in both.
#pragma once

#include "simd.h"
#include "topk_buffer.h"

namespace cedar {
namespace CEDAR_ISA {

constexpr int kGroup = 32;       // elements that share a scale
constexpr int kMaxGroups = 4;    // index_head_dim <= 128
constexpr int kMaxShift = 3;     // 12 << 3 fits a signed byte
constexpr int kMaxExponent = 30;
constexpr float kMaxWeight = 1099511627776.f;  // 2^40; the smallest is its inverse

#ifdef CEDAR_AVX512
using Element = int8_t;
#else
using Element = float;
#endif

// Elements of one row of a strip or query as laid out; whole tile rows of 64 bytes from two groups on.
CEDAR_INLINE int padded_dim(int groups) {
#ifdef CEDAR_AVX512
  return groups == 1 ? 32 : (groups + 1) / 2 * 64;
#else
  return groups * kGroup;
#endif
}

CEDAR_INLINE double pow2(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

// 2^(byte - 127) / 2: the unit of doubled values under scale byte `byte`.
CEDAR_INLINE double unit_of(int byte) { return pow2(byte - 128); }

// 16 keys.
struct Strip {
  Element* values;              // avx512: [padded/4][16 keys][4]; else [dim][16 keys]
  int32_t units[kMaxGroups][kStrip];  // scale byte of each group, common to all groups if plain
  float scale[kStrip];          // unit of the key; only if plain
  int32_t correction[kStrip];   // avx512: -128 * sum of values, because queries are stored + 128
  bool plain;
};

// One query: all heads.
struct Query {
  Element* values;              // [heads][padded]; avx512: bytes
  const float* weights;         // [heads]
  float* plain_weights;         // [heads] weight * unit of the head; only if plain
  uint8_t* units;               // [heads][kMaxGroups] scale bytes
  bool plain;
};

// Scale bytes of a row brought to what the layout needs: returns whether one exponent will do, and
// then sets the left shift of every group and makes all bytes equal to the smallest. Groups without a
// nonzero value set no conditions. Otherwise shifts are zero.
inline bool common_exponent(uint8_t* bytes, const bool* nonzero, int groups, int* shifts) {
  int low = 255, high = 0;
  for (int g = 0; g < groups; ++g) {
    shifts[g] = 0;
    if (!nonzero[g]) continue;
    low = bytes[g] < low ? bytes[g] : low;
    high = bytes[g] > high ? bytes[g] : high;
  }
  if (low > high) low = high = 127;
  if (high - low > kMaxShift || low < 127 - kMaxExponent || high > 127 + kMaxExponent) return false;
  for (int g = 0; g < groups; ++g) {
    if (nonzero[g]) shifts[g] = bytes[g] - low;
    bytes[g] = static_cast<uint8_t>(low);
  }
  return true;
}

inline bool any_nonzero(const uint8_t* packed) {
  uint64_t a, b;
  std::memcpy(&a, packed, 8);
  std::memcpy(&b, packed + 8, 8);
  return ((a | b) & 0x7777777777777777ull) != 0;
}

inline bool plain_weight(float weight) {
  const float magnitude = __builtin_fabsf(weight);
  return weight == 0.f || (magnitude <= kMaxWeight && magnitude >= 1.f / kMaxWeight);
}

#ifdef CEDAR_AVX512
// Doubled values shifted left: entry shift * 16 + code.
alignas(64) constexpr int8_t kShifted[64] = {
    0, 1, 2, 3,  4,  6,  8,  12, 0, -1, -2, -3,  -4,  -6,  -8,  -12,
    0, 2, 4, 6,  8,  12, 16, 24, 0, -2, -4, -6,  -8,  -12, -16, -24,
    0, 4, 8, 12, 16, 24, 32, 48, 0, -4, -8, -12, -16, -24, -32, -48,
    0, 8, 16, 24, 32, 48, 64, 96, 0, -8, -16, -24, -32, -48, -64, -96};
#endif

// Unpacks one group of a row, elements shifted left.
CEDAR_INLINE void unpack_group(const uint8_t* packed, int shift, Element* values) {
#ifdef CEDAR_AVX512
  // Order: for each of the four dwords, the four low nibbles, then the four high ones.
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kShifted + 16 * shift));
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed));
  const __m128i nibble = _mm_set1_epi8(15);
  const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(x, nibble));
  const __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(x, 4), nibble));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(values), _mm_unpacklo_epi32(low, high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(values + 16), _mm_unpackhi_epi32(low, high));
#else
  const float factor = static_cast<float>(1 << shift);
  for (int i = 0; i < kGroup / 2; ++i) {
    values[2 * i] = static_cast<float>(e2m1_doubled(packed[i] & 15u)) * factor;
    values[2 * i + 1] = static_cast<float>(e2m1_doubled(packed[i] >> 4)) * factor;
  }
#endif
}

// Prepares one query from its packed head rows. `query` points to memory of the right size.
inline void load_query(const uint8_t* rows, const float* weights, int heads, int groups,
                       Query& query) {
  const int value_bytes = groups * kGroup / 2, row_bytes = value_bytes + groups;
  const int padded = padded_dim(groups);
  query.weights = weights;
  query.plain = true;
  for (int h = 0; h < heads; ++h) {
    const uint8_t* row = rows + static_cast<int64_t>(h) * row_bytes;
    uint8_t* units = query.units + h * kMaxGroups;
    bool nonzero[kMaxGroups];
    int shifts[kMaxGroups];
    for (int g = 0; g < groups; ++g) {
      units[g] = row[value_bytes + g];
      nonzero[g] = any_nonzero(row + g * kGroup / 2);
    }
    const bool common = common_exponent(units, nonzero, groups, shifts);
    Element* values = query.values + static_cast<int64_t>(h) * padded;
    for (int g = 0; g < groups; ++g) {
      unpack_group(row + g * kGroup / 2, shifts[g], values + g * kGroup);
    }
    for (int i = groups * kGroup; i < padded; ++i) values[i] = 0;
    if (common && plain_weight(weights[h])) {
      query.plain_weights[h] = weights[h] * static_cast<float>(unit_of(units[0]));
    } else {
      query.plain_weights[h] = 0.f;
      query.plain = false;
    }
  }
}

#ifdef CEDAR_AVX512

template <int kGroups>
CEDAR_INLINE void load_strip_of(const uint8_t* const* rows, Strip& strip) {
  constexpr int kValueBytes = kGroups * kGroup / 2;
  const __m512i nibbles = _mm512_set1_epi8(15);
  __m512i packed[kGroups][4];  // dword c of the group, 16 keys
  __mmask16 nonzero[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    __m512i z[4];
    for (int r = 0; r < 4; ++r) {
      const auto at = [&](int i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + g * kGroup / 2));
      };
      z[r] = _mm512_castsi128_si512(at(r));
      z[r] = _mm512_inserti32x4(z[r], at(4 + r), 1);
      z[r] = _mm512_inserti32x4(z[r], at(8 + r), 2);
      z[r] = _mm512_inserti32x4(z[r], at(12 + r), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    packed[g][0] = _mm512_unpacklo_epi64(a, c);
    packed[g][1] = _mm512_unpackhi_epi64(a, c);
    packed[g][2] = _mm512_unpacklo_epi64(b, d);
    packed[g][3] = _mm512_unpackhi_epi64(b, d);
    const __m512i any = _mm512_or_si512(_mm512_or_si512(packed[g][0], packed[g][1]),
                                        _mm512_or_si512(packed[g][2], packed[g][3]));
    nonzero[g] = _mm512_test_epi32_mask(any, _mm512_set1_epi32(0x77777777));
  }

  // The dword that ends with the row holds all scale bytes, the last in its top byte.
  const auto scales_at = [&](int first) {
    const __m512i addresses = _mm512_add_epi64(
        _mm512_loadu_si512(rows + first), _mm512_set1_epi64(kValueBytes + kGroups - 4));
    return _mm512_i64gather_epi32(addresses, nullptr, 1);
  };
  const __m512i scales =
      _mm512_inserti64x4(_mm512_castsi256_si512(scales_at(0)), scales_at(8), 1);
  __m512i bytes[kGroups];
  __m512i low = _mm512_set1_epi32(255), high = _mm512_setzero_si512();
  for (int g = 0; g < kGroups; ++g) {
    bytes[g] = _mm512_and_si512(_mm512_srli_epi32(scales, static_cast<unsigned>(8 * (4 - kGroups + g))),
                                _mm512_set1_epi32(255));
    low = _mm512_mask_min_epi32(low, nonzero[g], low, bytes[g]);
    high = _mm512_mask_max_epi32(high, nonzero[g], high, bytes[g]);
  }
  const __mmask16 empty = _mm512_cmpgt_epi32_mask(low, high);
  low = _mm512_mask_mov_epi32(low, empty, _mm512_set1_epi32(127));
  high = _mm512_mask_mov_epi32(high, empty, _mm512_set1_epi32(127));
  const __mmask16 bad = static_cast<__mmask16>(
      _mm512_cmpgt_epi32_mask(_mm512_sub_epi32(high, low), _mm512_set1_epi32(kMaxShift)) |
      _mm512_cmplt_epi32_mask(low, _mm512_set1_epi32(127 - kMaxExponent)) |
      _mm512_cmpgt_epi32_mask(high, _mm512_set1_epi32(127 + kMaxExponent)));
  strip.plain = bad == 0;
  const __m512i unit = _mm512_slli_epi32(_mm512_sub_epi32(low, _mm512_set1_epi32(1)), 23);
  _mm512_storeu_ps(strip.scale, _mm512_castsi512_ps(unit));

  const __m512i table = _mm512_load_si512(kShifted);
  const __m512i offset = _mm512_set1_epi8(-128);
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int g = 0; g < kGroups; ++g) {
    __m512i shift = _mm512_setzero_si512();
    if (strip.plain) {
      shift = _mm512_maskz_sub_epi32(nonzero[g], bytes[g], low);
      shift = _mm512_mullo_epi32(shift, _mm512_set1_epi32(0x10101010));
      bytes[g] = low;
    }
    _mm512_storeu_si512(strip.units[g], bytes[g]);
    for (int c = 0; c < 4; ++c) {
      // (x & nibbles) | shift
      const __m512i even = _mm512_ternarylogic_epi32(packed[g][c], nibbles, shift, 0xea);
      const __m512i odd = _mm512_ternarylogic_epi32(_mm512_srli_epi32(packed[g][c], 4), nibbles,
                                                    shift, 0xea);
      const __m512i first = _mm512_permutexvar_epi8(even, table);
      const __m512i second = _mm512_permutexvar_epi8(odd, table);
      Element* to = strip.values + (g * 8 + c * 2) * 64;
      _mm512_store_si512(to, first);
      _mm512_store_si512(to + 64, second);
      sums[0] = _mm512_dpbusd_epi32(sums[0], offset, first);
      sums[1] = _mm512_dpbusd_epi32(sums[1], offset, second);
    }
  }
  if (kGroups == 3) {
    for (int i = 24; i < 32; ++i) _mm512_store_si512(strip.values + i * 64, _mm512_setzero_si512());
  }
  const __m512i sum = _mm512_add_epi32(sums[0], sums[1]);
  _mm512_storeu_si512(strip.correction, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
}

inline void load_strip(const uint8_t* const* rows, int groups, Strip& strip) {
  switch (groups) {
    case 1: load_strip_of<1>(rows, strip); break;
    case 2: load_strip_of<2>(rows, strip); break;
    case 3: load_strip_of<3>(rows, strip); break;
    default: load_strip_of<4>(rows, strip); break;
  }
}

// Integer results of plain dot products start at kBiasBits, the bits of the float 2^23. Then a result
// n >= 0 reads as the float 2^23 + n, a negative one as less than 2^23: no conversion is needed, and
// fma(w, 2^23 + n, -w * 2^23) is w * n rounded once.
constexpr int32_t kBiasBits = 0x4b000000;
constexpr float kBias = 8388608.f;

// w * max(n, 0), rounded, from the biased n; offset = -w * kBias.
CEDAR_INLINE __m512 biased_product(__m512 dot, __m512 weight, __m512 offset) {
  return _mm512_fmadd_ps(weight, _mm512_max_ps(dot, _mm512_set1_ps(kBias)), offset);
}

CEDAR_INLINE __m512i broadcast4(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return _mm512_set1_epi32(bits);
}

// Adds kHeads heads to the running head sums of kStrips strips: sum += w * max(dot, 0), the product
// rounded, then the sum. Query bytes carry + 128 here (see add_offset).
template <int kHeads, int kStrips>
CEDAR_INLINE void add_plain_heads(const int8_t* query, const float* weights, int padded, int rows,
                                  const Strip* strips, __m512* sums) {
  __m512i dots[kHeads][kStrips];
  for (int s = 0; s < kStrips; ++s) {
    const __m512i start =
        _mm512_add_epi32(_mm512_loadu_si512(strips[s].correction), _mm512_set1_epi32(kBiasBits));
    for (int h = 0; h < kHeads; ++h) dots[h][s] = start;
  }
  for (int r = 0; r < rows; ++r) {
    __m512i keys[kStrips];
    for (int s = 0; s < kStrips; ++s) keys[s] = _mm512_load_si512(strips[s].values + r * 64);
    for (int h = 0; h < kHeads; ++h) {
      const __m512i q = broadcast4(query + h * padded + r * 4);
      for (int s = 0; s < kStrips; ++s) dots[h][s] = _mm512_dpbusd_epi32(dots[h][s], q, keys[s]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    const __m512 w = _mm512_set1_ps(weights[h]);
    const __m512 offset = _mm512_set1_ps(-kBias * weights[h]);
    for (int s = 0; s < kStrips; ++s) {
      const __m512 dot = _mm512_castsi512_ps(dots[h][s]);
      sums[s] = _mm512_add_ps(sums[s], biased_product(dot, w, offset));
    }
  }
}

template <int kStrips>
inline void score_plain_strips(const Query& query, int heads, int groups, const Strip* strips,
                               float* scores) {
  const int padded = padded_dim(groups), rows = groups * 8;
  __m512 sums[kStrips];
  for (int s = 0; s < kStrips; ++s) sums[s] = _mm512_setzero_ps();
  int h = 0;
  for (; h + 8 <= heads; h += 8) {
    add_plain_heads<8, kStrips>(query.values + h * padded, query.plain_weights + h, padded, rows,
                                strips, sums);
  }
  for (; h + 4 <= heads; h += 4) {
    add_plain_heads<4, kStrips>(query.values + h * padded, query.plain_weights + h, padded, rows,
                                strips, sums);
  }
  for (; h < heads; ++h) {
    add_plain_heads<1, kStrips>(query.values + h * padded, query.plain_weights + h, padded, rows,
                                strips, sums);
  }
  for (int s = 0; s < kStrips; ++s) {
    _mm512_storeu_ps(scores + s * kStrip,
                     _mm512_mul_ps(sums[s], _mm512_loadu_ps(strips[s].scale)));
  }
}

inline void score_plain(const Query& query, int heads, int groups, const Strip* strips, int count,
                        float* scores) {
  int s = 0;
  for (; s + 2 <= count; s += 2) {
    score_plain_strips<2>(query, heads, groups, strips + s, scores + s * kStrip);
  }
  if (s < count) score_plain_strips<1>(query, heads, groups, strips + s, scores + s * kStrip);
}

// Query bytes + 128, for the unsigned side of the byte dot product.
inline void add_offset(Query& query, int heads, int groups) {
  const int64_t bytes = static_cast<int64_t>(heads) * padded_dim(groups);
  for (int64_t i = 0; i < bytes; ++i) {
    query.values[i] = static_cast<int8_t>(static_cast<uint8_t>(query.values[i]) ^ 0x80u);
  }
}

CEDAR_INLINE __m512d units_as_double(const int32_t* units) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(units));
  const __m512i exponent =
      _mm512_add_epi64(_mm512_cvtepi32_epi64(bytes), _mm512_set1_epi64(1023 - 128));
  return _mm512_castsi512_pd(_mm512_slli_epi64(exponent, 52));
}

// One strip by the definition. `flip` (0 or 0x80 in every byte) makes query bytes unsigned.
inline void score_general(const Query& query, int heads, int groups, const Strip& strip,
                          uint32_t flip, float* scores) {
  const int padded = padded_dim(groups);
  const __m512i flips = _mm512_set1_epi32(static_cast<int32_t>(flip));
  __m512i start[kMaxGroups];
  for (int g = 0; g < groups; ++g) {
    __m512i sum = _mm512_setzero_si512();
    for (int r = g * 8; r < g * 8 + 8; ++r) {
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), _mm512_load_si512(strip.values + r * 64));
    }
    start[g] = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
  }
  __m512 total = _mm512_setzero_ps();
  for (int h = 0; h < heads; ++h) {
    __m512d first = _mm512_setzero_pd(), second = _mm512_setzero_pd();
    for (int g = 0; g < groups; ++g) {
      __m512i dot = start[g];
      for (int r = g * 8; r < g * 8 + 8; ++r) {
        const __m512i q = _mm512_xor_si512(broadcast4(query.values + h * padded + r * 4), flips);
        dot = _mm512_dpbusd_epi32(dot, q, _mm512_load_si512(strip.values + r * 64));
      }
      const __m512d unit = _mm512_set1_pd(unit_of(query.units[h * kMaxGroups + g]));
      const __m512d a = _mm512_cvtepi32_pd(_mm512_castsi512_si256(dot));
      const __m512d b = _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(dot, 1));
      const __m512d ua = _mm512_mul_pd(unit, units_as_double(strip.units[g]));
      const __m512d ub = _mm512_mul_pd(unit, units_as_double(strip.units[g] + 8));
      first = _mm512_add_pd(first, _mm512_mul_pd(a, ua));
      second = _mm512_add_pd(second, _mm512_mul_pd(b, ub));
    }
    const __m512 dot = _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(first)),
                                          _mm512_cvtpd_ps(second), 1);
    const __m512 positive = _mm512_max_ps(dot, _mm512_setzero_ps());
    total = _mm512_add_ps(total, _mm512_mul_ps(_mm512_set1_ps(query.weights[h]), positive));
  }
  _mm512_storeu_ps(scores, total);
}

#else

inline void load_strip(const uint8_t* const* rows, int groups, Strip& strip) {
  const int value_bytes = groups * kGroup / 2;
  uint8_t bytes[kStrip][kMaxGroups];
  int shifts[kStrip][kMaxGroups];
  strip.plain = true;
  for (int i = 0; i < kStrip; ++i) {
    bool nonzero[kMaxGroups];
    for (int g = 0; g < groups; ++g) {
      bytes[i][g] = rows[i][value_bytes + g];
      nonzero[g] = any_nonzero(rows[i] + g * kGroup / 2);
    }
    strip.plain &= common_exponent(bytes[i], nonzero, groups, shifts[i]);
    strip.scale[i] = strip.plain ? static_cast<float>(unit_of(bytes[i][0])) : 0.f;
  }
  for (int i = 0; i < kStrip; ++i) {
    for (int g = 0; g < groups; ++g) {
      Element values[kGroup];
      unpack_group(rows[i] + g * kGroup / 2, shifts[i][g], values);
      for (int e = 0; e < kGroup; ++e) strip.values[(g * kGroup + e) * kStrip + i] = values[e];
      strip.units[g][i] = bytes[i][g];
    }
  }
}

constexpr int kVectors = kStrip / F32::kLanes;

// Dot products of kHeads heads over elements [from, to); all values are integers below 2^24.
template <int kHeads>
CEDAR_INLINE void dots_of(const float* query, int padded, const float* keys, int from, int to,
                          F32 dots[kHeads][kVectors]) {
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) dots[h][v] = F32::zero();
  }
  for (int e = from; e < to; ++e) {
    F32 k[kVectors];
    for (int v = 0; v < kVectors; ++v) k[v] = F32::load(keys + e * kStrip + v * F32::kLanes);
    for (int h = 0; h < kHeads; ++h) {
      const F32 q = F32::set(query[h * padded + e]);
      for (int v = 0; v < kVectors; ++v) dots[h][v] = fma(q, k[v], dots[h][v]);
    }
  }
}

template <int kHeads>
CEDAR_INLINE void add_plain_heads(const Query& query, int h, int padded, const Strip& strip,
                                  F32* sums) {
  F32 dots[kHeads][kVectors];
  dots_of<kHeads>(query.values + h * padded, padded, strip.values, 0, padded, dots);
  for (int i = 0; i < kHeads; ++i) {
    const F32 w = F32::set(query.plain_weights[h + i]);
    for (int v = 0; v < kVectors; ++v) sums[v] = sums[v] + w * max(dots[i][v], F32::zero());
  }
}

inline void score_plain(const Query& query, int heads, int groups, const Strip* strips, int count,
                        float* scores) {
  const int padded = padded_dim(groups);
  for (int s = 0; s < count; ++s) {
    F32 sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = F32::zero();
    int h = 0;
    for (; h + 4 <= heads; h += 4) add_plain_heads<4>(query, h, padded, strips[s], sums);
    for (; h < heads; ++h) add_plain_heads<1>(query, h, padded, strips[s], sums);
    for (int v = 0; v < kVectors; ++v) {
      const F32 scale = F32::load(strips[s].scale + v * F32::kLanes);
      (sums[v] * scale).store(scores + s * kStrip + v * F32::kLanes);
    }
  }
}

inline void add_offset(Query&, int, int) {}

inline void score_general(const Query& query, int heads, int groups, const Strip& strip, uint32_t,
                          float* scores) {
  const int padded = padded_dim(groups);
  for (int i = 0; i < kStrip; ++i) scores[i] = 0.f;
  for (int h = 0; h < heads; ++h) {
    double sums[kStrip] = {};
    for (int g = 0; g < groups; ++g) {
      F32 dots[1][kVectors];
      float dot[kStrip];
      dots_of<1>(query.values + h * padded, padded, strip.values, g * kGroup, (g + 1) * kGroup, dots);
      for (int v = 0; v < kVectors; ++v) dots[0][v].store(dot + v * F32::kLanes);
      const double unit = unit_of(query.units[h * kMaxGroups + g]);
      for (int i = 0; i < kStrip; ++i) {
        sums[i] += static_cast<double>(dot[i]) * (unit * unit_of(strip.units[g][i]));
      }
    }
    for (int i = 0; i < kStrip; ++i) {
      const float dot = static_cast<float>(sums[i]);
      scores[i] += query.weights[h] * (dot > 0.f ? dot : 0.f);
    }
  }
}

#endif

}  // namespace CEDAR_ISA
}  // namespace cedar
