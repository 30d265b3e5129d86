// Vectors of float32 or bfloat16 values in memory, the last one of a row possibly shorter.
#pragma once

#include "quant.h"

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

}  // namespace CEDAR_ISA
}  // namespace cedar
