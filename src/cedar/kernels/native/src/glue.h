// Arguments of the row-wise kernels: norm, rotary, hyper-connections, group pooling.
#pragma once

#include <cstdint>

namespace cedar {

// dtype flags: 0 float32, 1 bfloat16; rows are contiguous.
struct NormCall {
  const void* x;
  int32_t dtype;
  int64_t n, width;
  const void* weight;
  int32_t weight_dtype;
  float eps;
  void* out;
  int32_t threads;
};

// Rotates adjacent pairs of the last `rope` values of every vector; `per_row` vectors share a row
// of the table cos_sin [n, rope / 2, 2].
struct RotateCall {
  const void* x;
  int32_t dtype;
  int64_t n, per_row, width;
  const float* cos_sin;
  int64_t rope;
  bool inverse;
  void* out;
  int32_t threads;
};

// Coefficients of one sublayer (specification 4.2) from streams [n, copies, width].
struct MixesCall {
  const void* stream;
  int32_t dtype;
  int64_t n, copies, width;
  const float *fn, *base, *scale;
  int32_t iterations;
  float eps, norm_eps;
  float *pre, *post, *comb;  // [n, copies], [n, copies], [n, copies, copies]
  int32_t threads;
};

// sum_c pre[c] * stream[c], rounded; with a norm weight also normed and rounded again.
struct CollapseCall {
  const void* stream;
  int32_t dtype;
  int64_t n, copies, width;
  const float* pre;
  const void* weight;  // or null: no norm
  int32_t weight_dtype;
  float eps;
  void* out;
  int32_t threads;
};

// post[j] * y + sum_i comb[i, j] * stream[i]. `out` may be `stream`.
struct ExpandCall {
  const void *y, *stream;
  int32_t dtype;
  int64_t n, copies, width;
  const float *post, *comb;
  void* out;
  int32_t threads;
};

// Softmax over the group per channel, then the weighted sum: float32 [groups, ratio, width].
struct PoolCall {
  const float *kv, *gate;
  int64_t groups, ratio, width;
  float* out;
  int32_t threads;
};

}  // namespace cedar
