// One expert's columns on matrix tiles (AMX), for plain bfloat16 weights: gate and up, SwiGLU and down
// without leaving the caches. Included by the amx variant of moe.cpp.
//
// A tile of gate or up holds 16 hidden channels (rows) of 16 columns, which is how the operand of the
// next product wants them, so SwiGLU works on rows of tiles and nothing is turned around. Products, orders
// and roundings are those of the path by way of memory, so the bits are too.
#pragma once

#include "moe_swiglu.h"
#include "tile_panels.h"
#include "values.h"

namespace cedar {
namespace CEDAR_ISA {
namespace tiles {

// What the chain of one expert works on: up to kChainColumns rows of the call.
struct ExpertChain {
  Weight gate, up, down;
  Rows input;             // its columns
  const float* weights;   // per column: routing weight
  float limit;
  float* sums;            // [row][width]; column c is added to row input.index[c]
};

constexpr int64_t kChainColumns = 128;  // their panels stay in the second-level cache

// Bytes of scratch memory of a chain: both operands.
inline size_t chain_bytes(int64_t width, int64_t inner) {
  return static_cast<size_t>(kChainColumns * (width + inner)) * sizeof(uint16_t);
}

// 32 hidden channels of a panel: gate rows 0..15 and 16..31, then up; [channel][column] to `sums`.
inline void multiply_gate_and_up(const ExpertChain& chain, int64_t channel, const uint32_t* panel,
                                 float* sums) {
  const int64_t stride = chain.gate.in * 2;
  const uint8_t* gate = row_values(chain.gate, channel);
  const uint8_t* up = row_values(chain.up, channel);
  compiler_fence(panel);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t b = 0; b < chain.gate.in / kBlock; ++b) {
    _tile_loadd(6, panel + b * kTileSums, 64);
    _tile_loadd(4, gate + b * 64, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, gate + b * 64 + kTileRows * stride, stride);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, up + b * 64, stride);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, up + b * 64 + kTileRows * stride, stride);
    _tile_dpbf16ps(3, 5, 6);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTileSums, 64);
  _tile_stored(2, sums + 2 * kTileSums, 64);
  _tile_stored(3, sums + 3 * kTileSums, 64);
  compiler_fence(sums);
}

// 16 sums rounded to bfloat16.
CEDAR_INLINE F32 round_sums(const float* sums) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_and_si512(F32::load(sums).rounded_bits(), upper))};
}

// Those sums to a block of the next operand: pairs of channels, 16 columns each.
inline void swiglu_block(const float* sums, float limit, F32 weights, uint32_t* out) {
  const auto hidden = [&](int64_t channel) {
    const float* gate = sums + channel * kPanel;
    return swiglu(round_sums(gate), round_sums(gate + 2 * kTileSums), limit, weights).rounded_bits();
  };
  for (int64_t p = 0; p < kBlock / 2; ++p) {
    const __m512i even = hidden(2 * p), odd = hidden(2 * p + 1);
    _mm512_store_si512(out + p * kPanel,
                       _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd));
  }
}

// Hidden values of all panels. The products of a panel run while the one before goes through SwiGLU.
inline void make_hidden(const ExpertChain& chain, const uint32_t* input, uint32_t* hidden) {
  alignas(64) float sums[2][4 * kTileSums];
  const int64_t panels = (chain.input.n + kPanel - 1) / kPanel;
  const int64_t input_step = chain.gate.in * kPanel / 2, hidden_step = chain.gate.out * kPanel / 2;
  const auto finish = [&](int64_t panel, int64_t channel) {
    const F32 weights = load_lanes(chain.weights, kFloat32, panel * kPanel,
                                   lanes_left(panel * kPanel, chain.input.n));
    swiglu_block(sums[panel & 1], chain.limit, weights,
                 hidden + panel * hidden_step + channel * kPanel / 2);
  };
  for (int64_t channel = 0; channel < chain.gate.out; channel += kBlock) {
    for (int64_t p = 0; p < panels; ++p) {
      multiply_gate_and_up(chain, channel, input + p * input_step, sums[p & 1]);
      if (p > 0) finish(p - 1, channel);
    }
    finish(panels - 1, channel);
  }
}

// 16 output channels of a panel, [channel][column], rounded and added to the sums of their rows.
inline void add_tile(const ExpertChain& chain, float* tile, int64_t panel, int64_t channel) {
  __m512i a[16];
  for (int64_t r = 0; r < kTileRows; ++r) a[r] = _mm512_load_si512(tile + r * kPanel);
  transpose(a);
  const int64_t first = panel * kPanel;
  const int64_t count = chain.input.n - first < kPanel ? chain.input.n - first : kPanel;
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  for (int64_t c = 0; c < count; ++c) {
    float* sum = chain.sums + chain.input.index[first + c] * chain.down.out + channel;
    const F32 value = {_mm512_castsi512_ps(a[c])};
    const F32 term = {_mm512_castsi512_ps(_mm512_and_si512(value.rounded_bits(), upper))};
    (F32::load(sum) + term).store(sum);
  }
}

inline void add_outputs(const ExpertChain& chain, const uint32_t* hidden) {
  alignas(64) float sums[2][4 * kTileSums];
  const int64_t panels = (chain.input.n + kPanel - 1) / kPanel;
  const int64_t hidden_step = chain.down.in * kPanel / 2, stride = chain.down.in * 2;
  const auto finish = [&](int64_t p, int64_t channel) {
    for (int64_t t = 0; t < 4; ++t) {
      if (p + t / 2 >= panels) break;
      add_tile(chain, sums[p / 2 & 1] + t * kTileSums, p + t / 2, channel + t % 2 * kTileRows);
    }
  };
  for (int64_t channel = 0; channel < chain.down.out; channel += 2 * kTileRows) {
    const uint8_t* weights = row_values(chain.down, channel);
    for (int64_t p = 0; p < panels; p += 2) {
      const uint32_t* first = hidden + p * hidden_step;
      const uint32_t* second = p + 1 < panels ? first + hidden_step : first;
      compiler_fence(hidden);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t b = 0; b < chain.down.in / kBlock; ++b) {
        _tile_loadd(4, weights + b * 64, stride);
        _tile_loadd(6, first + b * kTileSums, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, weights + b * 64 + kTileRows * stride, stride);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, second + b * kTileSums, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      float* out = sums[p / 2 & 1];
      _tile_stored(0, out, 64);
      _tile_stored(1, out + kTileSums, 64);
      _tile_stored(2, out + 2 * kTileSums, 64);
      _tile_stored(3, out + 3 * kTileSums, 64);
      compiler_fence(out);
      if (p > 0) finish(p - 2, channel);
    }
    finish((panels - 1) / 2 * 2, channel);
  }
}

// Adds what one expert makes of its columns to the sums of their rows.
inline void run_chain(const ExpertChain& chain, void* memory) {
  uint32_t* input = static_cast<uint32_t*>(memory);
  uint32_t* hidden = input + kChainColumns * chain.gate.in / 2;
  for (int64_t c = 0; c < chain.input.n; c += kPanel) {
    prepare_panel(chain.input, false, c, kPanel, input + c * chain.gate.in / 2);
  }
  const TileScope scope(tile_shapes(kPanel));
  make_hidden(chain, input, hidden);
  add_outputs(chain, hidden);
}

}  // namespace tiles
}  // namespace CEDAR_ISA
}  // namespace cedar
