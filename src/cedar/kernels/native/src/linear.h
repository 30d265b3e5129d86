// Arguments of the projection kernels.
#pragma once

#include <cstdint>

namespace cedar {

// The first two are also the dtype flags of activations.
enum WeightKind : int32_t { kFloat32Weight = 0, kBfloat16Weight = 1, kFp8Weight = 2, kFp4Weight = 3 };

// One projection [out, in], rows contiguous (specification 3.3):
//   float32, bfloat16   values [out, in], no scales
//   fp8                 E4M3 codes [out, in]; E8M0 scales [ceil(out/32), in/32], one per 32x32 tile
//   fp4                 E2M1 pairs [out, in/2]; E8M0 scales [out, in/32]
struct Weight {
  int32_t kind;
  const void* values;
  const uint8_t* scales;
  int64_t out, in;
};

// y[n, out] = x[n, in] @ weight^T. Strides in elements.
struct LinearCall {
  const void* x;
  int32_t x_dtype;
  int64_t x_stride, n;
  Weight weight;
  bool quantise;  // round x to E4M3 in groups of 32 first (specification 5.2)
  void* y;
  int32_t y_dtype;
  int64_t y_stride;
  int32_t threads;
};

}  // namespace cedar
