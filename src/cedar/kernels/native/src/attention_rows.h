// Stored rows of sparse attention as floats, and where to find them.
#pragma once

#include "simd.h"
#include "sparse_attention.h"

namespace cedar {
namespace CEDAR_ISA {

constexpr int kMostHeads = 256;
constexpr int kWindowGroup = 32;  // E4M3 values under one E8M0 scale
constexpr int kMainGroup = 16;    // E2M1 values under one E4M3 scale

// The two row formats, `dim` values each, then their scales.
inline void window_row_to_floats(const uint8_t* row, int dim, float* out) {
  const uint8_t* scales = row + dim;
  for (int g = 0; g < dim / kWindowGroup; ++g) {
    const float scale = e8m0_to_float(scales[g]);
    const uint8_t* in = row + g * kWindowGroup;
    float* to = out + g * kWindowGroup;
#if defined(CEDAR_AVX512)
    for (int i = 0; i < kWindowGroup; i += 16) {
      const __m512i x = _mm512_cvtepu8_epi32(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
      const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi32(0x7f));
      const __mmask16 small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
      __m512 value = _mm512_castsi512_ps(
          _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23)));
      value = _mm512_mask_mul_ps(value, small, _mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
      const __m512i sign = _mm512_slli_epi32(_mm512_andnot_si512(_mm512_set1_epi32(0x7f), x), 24);
      value = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign));
      _mm512_storeu_ps(to + i, _mm512_mul_ps(value, _mm512_set1_ps(scale)));
    }
#elif defined(CEDAR_AVX2)
    for (int i = 0; i < kWindowGroup; i += 8) {
      const __m256i x = _mm256_cvtepu8_epi32(
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in + i)));
      const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
      const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
      const __m256 normal = _mm256_castsi256_ps(
          _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23)));
      const __m256 tiny = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
      const __m256 value = _mm256_blendv_ps(normal, tiny, _mm256_castsi256_ps(small));
      const __m256i sign =
          _mm256_slli_epi32(_mm256_andnot_si256(_mm256_set1_epi32(0x7f), x), 24);
      const __m256 with_sign = _mm256_or_ps(value, _mm256_castsi256_ps(sign));
      _mm256_storeu_ps(to + i, _mm256_mul_ps(with_sign, _mm256_set1_ps(scale)));
    }
#else
    for (int i = 0; i < kWindowGroup; ++i) to[i] = e4m3_to_float(in[i]) * scale;
#endif
  }
}

inline void main_row_to_floats(const uint8_t* row, int dim, float* out) {
  const uint8_t* scales = row + dim / 2;
  for (int g = 0; g < dim / kMainGroup; ++g) {
    const float scale = e4m3_to_float(scales[g]);
    const uint8_t* in = row + g * kMainGroup / 2;
    float* to = out + g * kMainGroup;
#if defined(CEDAR_AVX512) || defined(CEDAR_AVX2)
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in));
    const __m128i low = _mm_and_si128(x, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(x, 4), _mm_set1_epi8(15));
    const __m128i doubled = _mm_shuffle_epi8(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
        _mm_unpacklo_epi8(low, high));
    const float half = scale * 0.5f;
#endif
#if defined(CEDAR_AVX512)
    const __m512 values = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(doubled));
    _mm512_storeu_ps(to, _mm512_mul_ps(values, _mm512_set1_ps(half)));
#elif defined(CEDAR_AVX2)
    const __m256 first = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(doubled));
    const __m256 second = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(doubled, 8)));
    _mm256_storeu_ps(to, _mm256_mul_ps(first, _mm256_set1_ps(half)));
    _mm256_storeu_ps(to + 8, _mm256_mul_ps(second, _mm256_set1_ps(half)));
#else
    for (int i = 0; i < kMainGroup / 2; ++i) {
      to[2 * i] = e2m1_to_float(in[i] & 15u) * scale;
      to[2 * i + 1] = e2m1_to_float(in[i] >> 4) * scale;
    }
#endif
  }
}

// Address of the window row of token position p.
CEDAR_INLINE const uint8_t* window_row(const SparseAttentionCall& call, int64_t base, int64_t p) {
  return call.window + (base + p % call.window_modulus) * call.window_stride;
}

// Division of numbers below 2^32 by a divisor above 1, exact: a product with its inverse, rounded up.
// A division per selected row was 6 % of the time of eight heads x 128.
class Divider {
 public:
  explicit Divider(uint32_t divisor) : inverse_(~uint64_t{0} / divisor + 1) {}
  CEDAR_INLINE uint32_t quotient(uint32_t x) const {
    // Upper half of the 96-bit product; the lower words cannot carry past 64 bits.
    const uint64_t low = (inverse_ & 0xffffffffu) * x;
    return static_cast<uint32_t>(((inverse_ >> 32) * x + (low >> 32)) >> 32);
  }

 private:
  uint64_t inverse_;
};

// Addresses of the rows query n selected, in order, unused slots left out; returns how many.
inline int selected_rows(const SparseAttentionCall& call, int n, const uint8_t** rows) {
  if (call.selected == nullptr) return 0;
  const int32_t* positions = call.selected + static_cast<int64_t>(n) * call.topk;
  const int32_t* table = call.tables + call.sequences[n] * call.table_stride;
  const int32_t per_block = call.rows_per_block;
  const Divider divider(static_cast<uint32_t>(per_block));
  int count = 0;
  for (int i = 0; i < call.topk; ++i) {
    const int32_t p = positions[i];
    if (p < 0) continue;
    const int32_t block =
        per_block == 1 ? p : static_cast<int32_t>(divider.quotient(static_cast<uint32_t>(p)));
    // block * per_block is what p lies behind the start of its block.
    const int64_t row = static_cast<int64_t>(table[block] - block) * per_block + p;
    rows[count++] = call.rows + row * call.row_stride;
  }
  return count;
}

// Neighbouring queries that share unpacked window rows: queries [first, first + count), which see
// token positions [lo, lo + rows), every one of them seen by at least one of the queries.
struct WindowTile {
  int first, count;
  int64_t lo;
  int rows;
};

}  // namespace CEDAR_ISA
}  // namespace cedar
