// The float32 path of matmul.cpp: every weight kind, every variant.
#pragma once

#include "matmul.h"
#include "thread_pool.h"
#include "weight_blocks.h"

namespace cedar {
namespace CEDAR_ISA {
namespace floats {

constexpr int kWeightRows = 4;                          // weight rows of one register block
constexpr int kColumns = kLanes == 16 ? 4 : 2;          // operand rows of one register block
constexpr int64_t kPad = 16;                            // floats an operand row is padded to

inline int64_t padded(int64_t width) { return (width + kPad - 1) / kPad * kPad; }

inline size_t operand_bytes(int64_t n, int64_t width) {
  return static_cast<size_t>(n * padded(width)) * sizeof(float);
}

inline void prepare(const Rows& rows, bool quantise, int64_t first, int64_t last, float* data) {
  const int64_t stride = padded(rows.width);
  for (int64_t i = first; i < last; ++i) {
    const int64_t source = (rows.index == nullptr ? i : rows.index[i]) * rows.stride;
    float* out = data + i * stride;
    int64_t k = 0;
    for (; k + 32 <= rows.width; k += 32) {
      load_values<32>(rows.x, rows.dtype, source + k, out + k);
      if (quantise) round_act_group(out + k);
    }
    for (; k < rows.width; ++k) {
      out[k] = rows.dtype == kBfloat16
                   ? bf16_to_float(static_cast<const uint16_t*>(rows.x)[source + k])
                   : static_cast<const float*>(rows.x)[source + k];
    }
    for (; k < stride; ++k) out[k] = 0.f;
  }
}

CEDAR_INLINE F32 load_weight(const float* p) { return F32::load(p); }
CEDAR_INLINE F32 load_weight(const float* p, int n) { return F32::load(p, n); }
CEDAR_INLINE F32 load_weight(const uint16_t* p) { return F32::load_bf16(p); }
CEDAR_INLINE F32 load_weight(const uint16_t* p, int n) { return F32::load_bf16(p, n); }

// kWeightRows x T outputs: sums[r][t] = <w[r], x[t]>.
template <int T, class W>
CEDAR_INLINE void dot(const W* const* w, const float* const* x, int64_t width, float (*sums)[T]) {
  F32 acc[kWeightRows][T];
  for (int r = 0; r < kWeightRows; ++r) {
    for (int t = 0; t < T; ++t) acc[r][t] = F32::zero();
  }
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes) {
    F32 column[T];
    for (int t = 0; t < T; ++t) column[t] = F32::load(x[t] + k);
    for (int r = 0; r < kWeightRows; ++r) {
      const F32 row = load_weight(w[r] + k);
      for (int t = 0; t < T; ++t) acc[r][t] = fma(row, column[t], acc[r][t]);
    }
  }
  if (k < width) {
    for (int r = 0; r < kWeightRows; ++r) {
      const F32 row = load_weight(w[r] + k, static_cast<int>(width - k));
      for (int t = 0; t < T; ++t) acc[r][t] = fma(row, F32::load(x[t] + k), acc[r][t]);
    }
  }
  for (int r = 0; r < kWeightRows; ++r) {
    for (int t = 0; t < T; ++t) sums[r][t] = acc[r][t].sum();
  }
}

template <int T, class W>
inline void dot_columns(const W* const* w, int rows, const float* data, int64_t width,
                        int64_t column, float* out, int64_t stride) {
  const float* x[T];
  for (int t = 0; t < T; ++t) x[t] = data + (column + t) * padded(width);
  float sums[kWeightRows][T];
  dot<T>(w, x, width, sums);
  for (int t = 0; t < T; ++t) {
    for (int r = 0; r < rows; ++r) out[t * stride + r] = sums[r][t];
  }
}

// All columns of up to kWeightRows weight rows; w has kWeightRows valid pointers.
template <class W>
inline void multiply_rows(const W* const* w, int rows, const Operand& operand, int64_t first_column,
                          int64_t columns, float* out, int64_t stride) {
  const float* data = static_cast<const float*>(operand.data);
  int64_t c = 0;
  for (; c + kColumns <= columns; c += kColumns) {
    dot_columns<kColumns>(w, rows, data, operand.width, first_column + c, out + c * stride, stride);
  }
  for (; c < columns; ++c) {
    dot_columns<1>(w, rows, data, operand.width, first_column + c, out + c * stride, stride);
  }
}

inline void multiply(const Weight& weight, int64_t first_row, int64_t rows, const Operand& operand,
                     int64_t first_column, int64_t columns, float* out, int64_t stride) {
  const bool packed = weight.kind == kFp8Weight || weight.kind == kFp4Weight;
  float* plain = packed ? scratch_array<float>(kMatmulSlot, kWeightRows * weight.in) : nullptr;
  for (int64_t r = 0; r < rows; r += kWeightRows) {
    const int count = static_cast<int>(rows - r < kWeightRows ? rows - r : kWeightRows);
    const float* wide[kWeightRows];
    const uint16_t* half[kWeightRows];
    for (int i = 0; i < kWeightRows; ++i) {
      const int64_t row = first_row + r + (i < count ? i : 0);  // a missing row is computed twice
      const uint8_t* values = row_values(weight, row);
      half[i] = reinterpret_cast<const uint16_t*>(values);
      wide[i] = reinterpret_cast<const float*>(values);
      if (!packed) continue;
      wide[i] = plain + i * weight.in;
      for (int64_t b = 0; b < weight.in / kBlock; ++b) {
        decode_block(weight.kind, values, row_scales(weight, row), b,
                     plain + i * weight.in + b * kBlock);
      }
    }
    if (weight.kind == kBfloat16Weight) {
      multiply_rows(half, count, operand, first_column, columns, out + r, stride);
    } else {
      multiply_rows(wide, count, operand, first_column, columns, out + r, stride);
    }
  }
}

}  // namespace floats
}  // namespace CEDAR_ISA
}  // namespace cedar
