// Matrix products for linear.cpp, moe.cpp and glue.cpp: prepare activations once, then multiply any
// block of weight rows with any block of them.
//
// Every output element is computed alone, in one order over the input dimension that depends on
// the variant and the path but not on the block, the batch or the thread: row i of a result is the
// same bits alone or in a batch.
//
//   path     variants         products and order
//   floats   all              float32, lane l sums inputs l, l + kLanes, ...; lanes added at the end
//   pairs    avx512           bfloat16 dot products (VDPBF16PS), 16 lanes of pairs; lanes added last
//   tiles    amx              bfloat16 tiles: 32 inputs at a time, even and odd ones apart
#pragma once

#include "linear.h"
#include "simd.h"

namespace cedar {
namespace CEDAR_ISA {

enum class Path { floats, pairs, tiles };

// Activation rows as the caller has them.
struct Rows {
  const void* x;
  int32_t dtype;
  int64_t stride;
  const int32_t* index;  // row i is x[index[i]]; x[i] when null
  int64_t n, width;
};

// Activation rows made ready for one path.
struct Operand {
  Path path;
  int64_t n, width;
  const void* data;
};

// The path for these activations: bfloat16 paths need values that are exact in bfloat16.
Path choose_path(int32_t weight_kind, int32_t x_dtype, bool quantise);

// Rows that `prepare` handles as one unit and on whose multiples blocks of columns start.
constexpr int64_t kPanel = 16;

size_t operand_bytes(Path path, int64_t n, int64_t width);

// Fills rows [first, last) of an operand; `first` is a multiple of kPanel, and so is `last` or it is
// rows.n. Panels are independent: different threads may fill them.
void prepare(const Rows& rows, bool quantise, Path path, int64_t first, int64_t last, void* data);

// out[c * stride + r] = <weight row first_row + r, operand row first_column + c> in float32;
// first_column is a multiple of kPanel. Uses scratch slots from kMatmulSlot on.
void multiply(const Weight& weight, int64_t first_row, int64_t rows, const Operand& operand,
              int64_t first_column, int64_t columns, float* out, int64_t stride);

// Scratch slots taken by a product (kMatmulSlot takes four); callers keep theirs from kFreeSlot on.
constexpr int kOperandSlot = 0, kOutputSlot = 1, kMatmulSlot = 2, kFreeSlot = 6;

}  // namespace CEDAR_ISA
}  // namespace cedar
