// Logits and mixing of bfloat16 sparse attention on vectors (AVX512_BF16). Included by the avx512 variant.
#pragma once

#include "attention_bf16_rows.h"

namespace cedar {
namespace CEDAR_ISA {

constexpr int kAhead = 8;              // rows to fetch ahead
constexpr int kTileHeads = kMostHeads;  // heads that go through at once

// Sums of 16 vectors, one per lane.
CEDAR_INLINE __m512 sum_each(const __m512* v) {
  __m512 a[8], b[4], c[2];
  const auto fold = [](__m512 x, __m512 y, auto low, auto high) { return _mm512_add_ps(low(x, y), high(x, y)); };
  // Lane l of the result must be vector l: fold 128-bit lanes last.
  for (int i = 0; i < 8; ++i) {
    a[i] = fold(v[2 * i], v[2 * i + 1],
                [](__m512 x, __m512 y) { return _mm512_unpacklo_ps(x, y); },
                [](__m512 x, __m512 y) { return _mm512_unpackhi_ps(x, y); });
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; ++i) {
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88),
                       _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

CEDAR_INLINE __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Logits of kBlock entry rows on vectors: z[h * stride + e], scaled. Heads are padded to fours.
inline void vector_logits(const uint16_t* q, const uint16_t* rows, int heads, int dim, float scale,
                          float* z, int64_t stride) {
  for (int h = 0; h < heads; h += 4) {
    for (int e = 0; e < kBlock; e += 4) {
      __m512 sums[16];
      for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
      for (int b = 0; b < dim; b += 32) {
        __m512i x[4];
        for (int j = 0; j < 4; ++j) x[j] = _mm512_load_si512(rows + (e + j) * dim + b);
        for (int i = 0; i < 4; ++i) {
          const __m512i y = _mm512_load_si512(q + (h + i) * dim + b);
          for (int j = 0; j < 4; ++j) sums[4 * i + j] = dot_pairs(sums[4 * i + j], y, x[j]);
        }
      }
      const __m512 all = _mm512_mul_ps(sum_each(sums), _mm512_set1_ps(scale));
      _mm_storeu_ps(z + h * stride + e, _mm512_castps512_ps128(all));
      _mm_storeu_ps(z + (h + 1) * stride + e, _mm512_extractf32x4_ps(all, 1));
      _mm_storeu_ps(z + (h + 2) * stride + e, _mm512_extractf32x4_ps(all, 2));
      _mm_storeu_ps(z + (h + 3) * stride + e, _mm512_extractf32x4_ps(all, 3));
    }
  }
}

// Sums of weights times values for kHeads heads and two column blocks, added to `sums`.
template <int kHeads>
CEDAR_INLINE void vector_mix(const uint16_t* weights, int64_t stride, const PairPart& part,
                             int column, __m512 sums[kHeads][2]) {
  for (int64_t block = 0; block < part.blocks; ++block) {
    const uint16_t* x = part.base + column * part.column_stride + block * part.block_stride;
    const uint16_t* y = x + part.column_stride;
    for (int i = 0; i < kBlock / 2; ++i) {
      const __m512i a = _mm512_load_si512(x + i * part.row_stride);
      const __m512i b = _mm512_load_si512(y + i * part.row_stride);
      for (int h = 0; h < kHeads; ++h) {
        int32_t pair;
        std::memcpy(&pair, weights + h * stride + block * kBlock + 2 * i, 4);
        const __m512i w = _mm512_set1_epi32(pair);
        sums[h][0] = dot_pairs(sums[h][0], w, a);
        sums[h][1] = dot_pairs(sums[h][1], w, b);
      }
    }
  }
}

template <int kHeads>
inline void vector_mix_heads(const uint16_t* weights, int64_t stride, const PairPart* parts,
                             int part_count, const float* factors, int dim, uint16_t* out) {
  for (int column = 0; column < dim / kPairColumns; column += 2) {
    __m512 sums[kHeads][2];
    for (int h = 0; h < kHeads; ++h) sums[h][0] = sums[h][1] = _mm512_setzero_ps();
    const uint16_t* w = weights;
    for (int p = 0; p < part_count; ++p) {
      vector_mix<kHeads>(w, stride, parts[p], column, sums);
      w += parts[p].blocks * kBlock;
    }
    for (int h = 0; h < kHeads; ++h) {
      const F32 factor = F32::set(factors[h]);
      uint16_t* to = out + h * dim + column * kPairColumns;
      (F32{to_natural_columns(sums[h][0])} * factor).store_bf16(to);
      (F32{to_natural_columns(sums[h][1])} * factor).store_bf16(to + kPairColumns);
    }
  }
}

// out[h][:] = factor_h * sum over the parts' entries of weight * value, all heads.
inline void vector_mix_all(const uint16_t* weights, int64_t stride, const PairPart* parts,
                           int part_count, const float* factors, int heads, int dim, uint16_t* out) {
  int h = 0;
  const auto some = [&](auto function) {
    function(weights + h * stride, stride, parts, part_count, factors + h, dim,
             out + static_cast<int64_t>(h) * dim);
  };
  for (; h + 8 <= heads; h += 8) some(vector_mix_heads<8>);
  for (; h + 4 <= heads; h += 4) some(vector_mix_heads<4>);
  for (; h < heads; ++h) some(vector_mix_heads<1>);
}

}  // namespace CEDAR_ISA
}  // namespace cedar
