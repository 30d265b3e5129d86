// Arguments of the codec kernels: packed rows in and out, and activation rounding.
#pragma once

#include <cstdint>

namespace cedar {

enum RowKind : int32_t { kWindowRow = 0, kMainRow = 1, kIndexRow = 2 };

// n rows of `width` values at x <-> packed rows `where[i]` (i when null) of a pool.
// Strides: x in elements, rows in bytes.
struct RowsCall {
  void* x;
  int32_t dtype;
  int64_t x_stride, n;
  int32_t kind;
  int64_t width;
  uint8_t* rows;
  int64_t row_stride;
  const int64_t* where;
  int32_t threads;
};

// Activation rounding of n rows: E4M3 in groups of 32, back to float32 or bfloat16.
struct FakeQuantiseCall {
  const void* x;
  int32_t dtype;
  int64_t x_stride, n, width;
  void* out;
  int32_t out_dtype;
  int64_t out_stride;
  int32_t threads;
};

}  // namespace cedar
