// Vectors of float32 or bfloat16 values in memory, the last one of a row possibly shorter; loops over
// rows.
#pragma once

#include <cmath>

#include "quant.h"
#include "thread_pool.h"

namespace cedar {
namespace CEDAR_ISA {

CEDAR_INLINE int64_t value_bytes(int32_t dtype) { return dtype == kBfloat16 ? 2 : 4; }

// Lanes that are left of a row of `width` values at `at`, at most a vector.
CEDAR_INLINE int lanes_left(int64_t at, int64_t width) {
  return width - at < kLanes ? static_cast<int>(width - at) : kLanes;
}

// n values at index `at`; the other lanes are 0.
CEDAR_INLINE F32 load_lanes(const void* p, int32_t dtype, int64_t at, int n) {
  if (dtype == kBfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(p) + at;
    return n >= kLanes ? F32::load_bf16(from) : F32::load_bf16(from, n);
  }
  const float* from = static_cast<const float*>(p) + at;
  return n >= kLanes ? F32::load(from) : F32::load(from, n);
}

CEDAR_INLINE void store_lanes(F32 x, void* p, int32_t dtype, int64_t at, int n) {
  if (dtype == kBfloat16) {
    uint16_t* to = static_cast<uint16_t*>(p) + at;
    n >= kLanes ? x.store_bf16(to) : x.store_bf16(to, n);
  } else {
    float* to = static_cast<float*>(p) + at;
    n >= kLanes ? x.store(to) : x.store(to, n);
  }
}

// What storing and loading again gives.
CEDAR_INLINE F32 rounded(F32 x, int32_t dtype) {
  if (dtype != kBfloat16) return x;
  uint16_t halves[kLanes];
  x.store_bf16(halves);
  return F32::load_bf16(halves);
}

// A row of float32 or bfloat16 values, read or written a vector at a time.
template <int kDtype>
struct Row;

template <>
struct Row<kFloat32> {
  using Value = float;
  static CEDAR_INLINE F32 load(const Value* p, int n) {
    return n >= kLanes ? F32::load(p) : F32::load(p, n);
  }
  static CEDAR_INLINE void store(F32 x, Value* p, int n) {
    if (n >= kLanes) x.store(p);
    else x.store(p, n);
  }
  // What storing and loading again gives.
  static CEDAR_INLINE F32 rounded(F32 x) { return x; }
};

template <>
struct Row<kBfloat16> {
  using Value = uint16_t;
  static CEDAR_INLINE F32 load(const Value* p, int n) {
    return n >= kLanes ? F32::load_bf16(p) : F32::load_bf16(p, n);
  }
  static CEDAR_INLINE void store(F32 x, Value* p, int n) {
    if (n >= kLanes) x.store_bf16(p);
    else x.store_bf16(p, n);
  }
  static CEDAR_INLINE F32 rounded(F32 x) {
    Value half[kLanes];
    x.store_bf16(half);
    return F32::load_bf16(half);
  }
};

// Rows a chunk of work takes: enough to outweigh handing it over.
inline int64_t rows_per_chunk(int64_t n, int64_t values, int threads) {
  const int64_t least = 1 + 16384 / (values > 0 ? values : 1);
  const int64_t even = (n + 4 * threads - 1) / (4 * threads);
  return even > least ? even : least;
}

// body(row) for n rows of `values` values.
template <class Body>
inline void for_rows(int64_t n, int64_t values, int threads, const Body& body) {
  const int64_t step = rows_per_chunk(n, values, threads);
  parallel_for((n + step - 1) / step, threads, [&](int64_t chunk) {
    const int64_t end = (chunk + 1) * step < n ? (chunk + 1) * step : n;
    for (int64_t row = chunk * step; row < end; ++row) body(row);
  });
}

// 1 / sqrt(mean(x^2) + eps), from sums of squares in a fixed order of lanes.
CEDAR_INLINE float inverse_rms(F32 squares, int64_t width, float eps) {
  return 1.f / std::sqrt(squares.sum() / static_cast<float>(width) + eps);
}

}  // namespace CEDAR_ISA
}  // namespace cedar
