// Index dot products on matrix tiles (AMX), for plain queries and strips. Included by the amx variant.
//
// One tile product takes up to 16 rows (heads of one or more queries) times 16 keys over 64 elements;
// its integers go through a small ring of buffers to the vector unit, which sums over heads.
#pragma once

#include "amx_tiles.h"
#include "index_strip.h"

namespace cedar {
namespace CEDAR_ISA {

// How heads fill tiles: up to 16 heads, as many whole queries as fit one tile; up to 32, two tiles.
struct TilePlan {
  int queries;     // per group
  int row_tiles;   // 1 or 2
  int rows;        // per tile
  int step_bytes;  // elements per product

  static bool possible(int heads) { return heads <= 32; }
  TilePlan(int heads, int groups)
      : queries(heads <= 16 ? 16 / heads : 1),
        row_tiles(heads <= 16 ? 1 : 2),
        rows(heads <= 16 ? queries * heads : 16),
        step_bytes(groups == 1 ? 32 : 64) {}
};

// Tiles 0..3: queries [row tile][step]; 4, 5: results; 6, 7: keys.
inline TileShapes index_tile_shapes(int heads, int groups) {
  const TilePlan plan(heads, groups);
  TileShapes shapes;
  for (int t = 0; t < 4; ++t) shapes.set(t, plan.rows, plan.step_bytes);
  for (int t = 4; t < 6; ++t) shapes.set(t, plan.rows, 64);
  for (int t = 6; t < 8; ++t) shapes.set(t, plan.step_bytes / 4, 64);
  return shapes;
}

// Products start from kBiasBits in every element (index_strip.h).
struct alignas(64) BiasTile {
  int32_t values[16 * kStrip] = {};
  constexpr BiasTile() {
    for (int32_t& value : values) value = kBiasBits;
  }
};
constexpr BiasTile kBiasTile;

// Adds heads of one query to its head sums: sum += w * max(dot, 0), the product rounded, then the sum.
template <int kHeads>
CEDAR_INLINE __m512 add_heads(__m512 sum, const int32_t* dots, const float* weights,
                              const float* offsets, int heads) {
  const int n = kHeads > 0 ? kHeads : heads;
  for (int h = 0; h < n; ++h) {
    const __m512 dot = _mm512_castsi512_ps(_mm512_load_si512(dots + h * kStrip));
    sum = _mm512_add_ps(sum, biased_product(dot, _mm512_set1_ps(weights[h]),
                                            _mm512_set1_ps(offsets[h])));
  }
  return sum;
}

// Product number `unit` of a group, into tile 4 or 5 in turn. With two row tiles, even numbers are the
// first 16 heads of a strip and odd ones the rest; with one, numbers are strips.
template <int kRowTiles, int kSteps>
CEDAR_INLINE void multiply(const Strip* strips, int unit) {
  const int8_t* keys = strips[kRowTiles == 2 ? unit / 2 : unit].values;
  if ((unit & 1) == 0) {
    _tile_loadd(6, keys, 64);
    _tile_loadd(4, kBiasTile.values, 64);
    _tile_dpbssd(4, 0, 6);
    if (kSteps == 2) {
      _tile_loadd(7, keys + 1024, 64);
      _tile_dpbssd(4, 1, 7);
    }
  } else if (kRowTiles == 2) {
    _tile_loadd(5, kBiasTile.values, 64);
    _tile_dpbssd(5, 2, 6);
    if (kSteps == 2) _tile_dpbssd(5, 3, 7);
  } else {
    _tile_loadd(5, kBiasTile.values, 64);
    _tile_loadd(6, keys, 64);
    _tile_dpbssd(5, 0, 6);
    if (kSteps == 2) {
      _tile_loadd(7, keys + 1024, 64);
      _tile_dpbssd(5, 1, 7);
    }
  }
}

// Scores `count` strips for one group of queries whose values and weights follow each other in memory.
// `scores` of query i start at i * score_stride.
template <int kHeads, int kRowTiles, int kSteps>
inline void score_group(const Query& first, int queries, int heads, int padded, const Strip* strips,
                        int count, float* scores, int score_stride) {
  alignas(64) int32_t dots[4][16 * kStrip];
  compiler_fence(first.values);
  _tile_loadd(0, first.values, padded);
  if (kSteps == 2) _tile_loadd(1, first.values + 64, padded);
  if (kRowTiles == 2) {
    _tile_loadd(2, first.values + 16 * padded, padded);
    if (kSteps == 2) _tile_loadd(3, first.values + 16 * padded + 64, padded);
  }
  const float* weights = first.plain_weights;
  float offsets[2 * 16];
  for (int i = 0; i < queries * heads; ++i) offsets[i] = -kBias * weights[i];
  const int units = count * kRowTiles;
  __m512 sum = _mm512_setzero_ps();
  // Three stages, one unit apart: multiply, store, sum. The matrix and vector units work side by side.
  for (int u = 0; u < units + 2; ++u) {
    if (u < units) multiply<kRowTiles, kSteps>(strips, u);
    if (u >= 1 && u <= units) {
      if (((u - 1) & 1) == 0) {
        _tile_stored(4, dots[(u - 1) & 3], 64);
      } else {
        _tile_stored(5, dots[(u - 1) & 3], 64);
      }
    }
    if (u < 2) continue;
    const int32_t* done = dots[(u - 2) & 3];
    const int s = (u - 2) / kRowTiles;
    const __m512 scale = _mm512_loadu_ps(strips[s].scale);
    if (kRowTiles == 1) {
      for (int q = 0; q < queries; ++q) {
        sum = add_heads<kHeads>(_mm512_setzero_ps(), done + q * heads * kStrip, weights + q * heads,
                                offsets + q * heads, heads);
        _mm512_storeu_ps(scores + q * score_stride + s * kStrip, _mm512_mul_ps(sum, scale));
      }
    } else if ((u & 1) == 0) {
      sum = add_heads<16>(_mm512_setzero_ps(), done, weights, offsets, 16);
    } else {
      sum = add_heads<kHeads == 0 ? 0 : kHeads - 16>(sum, done, weights + 16, offsets + 16, heads - 16);
      _mm512_storeu_ps(scores + s * kStrip, _mm512_mul_ps(sum, scale));
    }
  }
}

inline void score_on_tiles(const Query& first, int queries, int heads, int groups,
                           const Strip* strips, int count, float* scores,
                           int score_stride) {
  const int padded = padded_dim(groups);
  const auto call = [&](auto one_step, auto two_steps) {
    (groups <= 2 ? one_step : two_steps)(first, queries, heads, padded, strips, count, scores,
                                         score_stride);
  };
  switch (heads) {
    case 4: call(score_group<4, 1, 1>, score_group<4, 1, 2>); break;
    case 8: call(score_group<8, 1, 1>, score_group<8, 1, 2>); break;
    case 16: call(score_group<16, 1, 1>, score_group<16, 1, 2>); break;
    case 32: call(score_group<32, 2, 1>, score_group<32, 2, 2>); break;
    default:
      if (heads <= 16) {
        call(score_group<0, 1, 1>, score_group<0, 1, 2>);
      } else {
        call(score_group<0, 2, 1>, score_group<0, 2, 2>);
      }
  }
}

}  // namespace CEDAR_ISA
}  // namespace cedar
