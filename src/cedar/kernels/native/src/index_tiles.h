// Index dot products on matrix tiles (AMX), for plain queries and strips. Included by the amx variant.
//
// One tile product takes 16 rows (heads of one or more queries) times 16 keys over 64 elements. The
// integer results go through a small buffer to the vector unit, which does the sum over heads.
#pragma once

#include "amx_tiles.h"
#include "index_strip.h"

namespace cedar {
namespace CEDAR_ISA {

// How heads fill tiles: up to 16 heads, as many whole queries as fit one tile; up to 32, two tiles.
struct TilePlan {
  int queries;     // per group
  int row_tiles;   // 1 or 2
  int steps;       // of up to 64 elements

  static bool possible(int heads) { return heads <= 32; }
  TilePlan(int heads, int groups)
      : queries(heads <= 16 ? 16 / heads : 1),
        row_tiles(heads <= 16 ? 1 : 2),
        steps(groups <= 2 ? 1 : 2) {}
};

inline TileShapes index_tile_shapes(int heads, int groups) {
  const TilePlan plan(heads, groups);
  const int bytes = groups == 1 ? 32 : 64;
  TileShapes shapes;
  for (int t = 0; t < 4; ++t) shapes.set(t, heads <= 16 ? plan.queries * heads : 16, bytes);
  for (int t = 4; t < 6; ++t) shapes.set(t, heads <= 16 ? plan.queries * heads : 16, 64);
  for (int t = 6; t < 8; ++t) shapes.set(t, bytes / 4, 64);
  return shapes;
}

// sum over heads of w * max(dot, 0), one query, 16 keys; kHeads = 0: `heads` at run time.
template <int kHeads>
CEDAR_INLINE __m512 sum_heads(const int32_t* dots, const float* weights, int heads) {
  __m512 sum = _mm512_setzero_ps();
  const int n = kHeads > 0 ? kHeads : heads;
  for (int h = 0; h < n; ++h) {
    const __m512i positive =
        _mm512_max_epi32(_mm512_load_si512(dots + h * kStrip), _mm512_setzero_si512());
    sum = _mm512_add_ps(sum, _mm512_mul_ps(_mm512_set1_ps(weights[h]), _mm512_cvtepi32_ps(positive)));
  }
  return sum;
}

template <int kRowTiles, int kSteps>
CEDAR_INLINE void strip_product(const int8_t* keys, int32_t* dots) {
  _tile_loadd(6, keys, 64);
  if (kSteps == 2) _tile_loadd(7, keys + 1024, 64);
  _tile_zero(4);
  _tile_dpbssd(4, 0, 6);
  if (kSteps == 2) _tile_dpbssd(4, 1, 7);
  if (kRowTiles == 2) {
    _tile_zero(5);
    _tile_dpbssd(5, 2, 6);
    if (kSteps == 2) _tile_dpbssd(5, 3, 7);
  }
  _tile_stored(4, dots, 64);
  if (kRowTiles == 2) _tile_stored(5, dots + 16 * kStrip, 64);
}

// Scores `count` strips for one group of queries whose values and weights follow each other in memory.
// `scores` of query i start at i * score_stride.
template <int kHeads, int kRowTiles, int kSteps>
inline void score_group(const Query& first, int queries, int heads, int padded, const Strip* strips,
                        int count, float* scores, int score_stride) {
  alignas(64) int32_t dots[2][kRowTiles * 16 * kStrip];
  compiler_fence(first.values);
  _tile_loadd(0, first.values, padded);
  if (kSteps == 2) _tile_loadd(1, first.values + 64, padded);
  if (kRowTiles == 2) {
    _tile_loadd(2, first.values + 16 * padded, padded);
    if (kSteps == 2) _tile_loadd(3, first.values + 16 * padded + 64, padded);
  }
  strip_product<kRowTiles, kSteps>(strips[0].values, dots[0]);
  for (int s = 0; s < count; ++s) {
    // The next strip's products run in the matrix unit while this one's heads are summed.
    if (s + 1 < count) strip_product<kRowTiles, kSteps>(strips[s + 1].values, dots[(s + 1) & 1]);
    const __m512 scale = _mm512_loadu_ps(strips[s].scale);
    for (int q = 0; q < queries; ++q) {
      const __m512 sum = sum_heads<kHeads>(dots[s & 1] + q * heads * kStrip,
                                           first.plain_weights + q * heads, heads);
      _mm512_storeu_ps(scores + q * score_stride + s * kStrip, _mm512_mul_ps(sum, scale));
    }
  }
}

template <int kHeads>
inline void score_group_of(const Query& first, int queries, int heads, int groups,
                           const Strip* strips, int count, float* scores, int score_stride) {
  const int padded = padded_dim(groups);
  constexpr int kRowTiles = kHeads > 16 ? 2 : 1;
  if (groups <= 2) {
    score_group<kHeads, kRowTiles, 1>(first, queries, heads, padded, strips, count, scores,
                                      score_stride);
  } else {
    score_group<kHeads, kRowTiles, 2>(first, queries, heads, padded, strips, count, scores,
                                      score_stride);
  }
}

inline void score_on_tiles(const Query& first, int queries, int heads, int groups,
                           const Strip* strips, int count, float* scores, int score_stride) {
  const auto call = [&](auto function) {
    function(first, queries, heads, groups, strips, count, scores, score_stride);
  };
  switch (heads) {
    case 4: call(score_group_of<4>); break;
    case 8: call(score_group_of<8>); break;
    case 16: call(score_group_of<16>); break;
    case 32: call(score_group_of<32>); break;
    default:
      if (heads <= 16) {
        call(score_group_of<0>);
      } else if (groups <= 2) {
        score_group<0, 2, 1>(first, queries, heads, padded_dim(groups), strips, count, scores,
                             score_stride);
      } else {
        score_group<0, 2, 2>(first, queries, heads, padded_dim(groups), strips, count, scores,
                             score_stride);
      }
  }
}

}  // namespace CEDAR_ISA
}  // namespace cedar
