// Projections y = x W^T for plain, FP8 and FP4 weights (specification 3.3, 4 and 5.2).
#include "linear.h"

#include "cedar_native.h"
#include "matmul.h"
#include "quant.h"
#include "thread_pool.h"

namespace cedar {
namespace CEDAR_ISA {
namespace {

// How a product is cut into chunks of work: blocks of weight rows times blocks of columns.
struct Grid {
  int64_t rows, columns;          // of one block
  int64_t row_blocks, column_blocks;
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

Grid make_grid(int64_t out, int64_t n, int threads) {
  // Unpacked weights of a block and its sums stay in the second-level cache.
  constexpr int64_t kMostRows = 256, kMostColumns = 512, kRowStep = 64;
  Grid grid;
  grid.columns = n < kMostColumns ? n : kMostColumns;
  grid.column_blocks = divide_up(n, grid.columns);
  // Several chunks a thread, so that a thread that lost its core does not hold up the others; long
  // ones when few columns make the product a stream through the weights.
  const int64_t wanted = divide_up(4 * threads, grid.column_blocks);
  grid.rows = divide_up(divide_up(out, threads == 1 ? 1 : wanted), kRowStep) * kRowStep;
  if (n > kPanel && grid.rows > kMostRows) grid.rows = kMostRows;
  grid.row_blocks = divide_up(out, grid.rows);
  return grid;
}

void store_block(const float* sums, int64_t stride, int64_t rows, int64_t columns, void* y,
                 int32_t dtype, int64_t y_stride) {
  for (int64_t c = 0; c < columns; ++c) {
    const float* from = sums + c * stride;
    if (dtype == kFloat32) {
      std::memcpy(static_cast<float*>(y) + c * y_stride, from, static_cast<size_t>(rows) * 4);
      continue;
    }
    uint16_t* to = static_cast<uint16_t*>(y) + c * y_stride;
    int64_t r = 0;
    for (; r + kLanes <= rows; r += kLanes) F32::load(from + r).store_bf16(to + r);
    if (r < rows) {
      const int left = static_cast<int>(rows - r);
      F32::load(from + r, left).store_bf16(to + r, left);
    }
  }
}

}  // namespace

int linear(const LinearCall& call) {
  if (call.n == 0) return 0;
  const Weight& weight = call.weight;
  const int threads =
      worthwhile_threads(weight.out * weight.in * divide_up(call.n, kPanel), call.threads);
  const Path path = choose_path(weight.kind, call.x_dtype, call.quantise);
  const Rows rows = {call.x, call.x_dtype, call.x_stride, nullptr, call.n, weight.in};
  void* data = scratch(kOperandSlot, operand_bytes(path, call.n, weight.in));
  parallel_for(divide_up(call.n, kPanel), threads, [&](int64_t panel) {
    const int64_t last = (panel + 1) * kPanel;
    prepare(rows, call.quantise, path, panel * kPanel, last < call.n ? last : call.n, data);
  });
  const Operand operand = {path, call.n, weight.in, data};
  const Grid grid = make_grid(weight.out, call.n, threads);
  const int64_t size = call.y_dtype == kBfloat16 ? 2 : 4;
  parallel_for(grid.row_blocks * grid.column_blocks, threads, [&](int64_t chunk) {
    const int64_t row = chunk % grid.row_blocks * grid.rows;
    const int64_t column = chunk / grid.row_blocks * grid.columns;
    const int64_t count = weight.out - row < grid.rows ? weight.out - row : grid.rows;
    const int64_t columns = call.n - column < grid.columns ? call.n - column : grid.columns;
    float* sums = scratch_array<float>(kOutputSlot, columns * grid.rows);
    multiply(weight, row, count, operand, column, columns, sums, grid.rows);
    store_block(sums, grid.rows, count, columns,
                static_cast<char*>(call.y) + (column * call.y_stride + row) * size, call.y_dtype,
                call.y_stride);
  });
  return 0;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
