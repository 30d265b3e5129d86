// Bits of a float, and bfloat16, one value at a time. Always inlined, so files compiled for any instruction
// set may include it: kernel files through simd.h, entry points that touch single values directly.
#pragma once

#include <cstdint>
#include <cstring>

#define CEDAR_INLINE inline __attribute__((always_inline))

namespace cedar {

CEDAR_INLINE float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

CEDAR_INLINE uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

CEDAR_INLINE float bf16_to_float(uint16_t value) {
  return float_of_bits(static_cast<uint32_t>(value) << 16);
}

// Round to nearest, ties to even; NaN stays NaN.
CEDAR_INLINE uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace cedar
