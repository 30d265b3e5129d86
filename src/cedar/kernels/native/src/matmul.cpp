// Chooses the path of a matrix product; the paths live in matmul_*.h.
#include "matmul.h"

#include "cedar_native.h"
#include "matmul_floats.h"
#if defined(CEDAR_AVX512)
#include "matmul_pairs.h"
#endif
#if defined(__AMX_BF16__)
#include "matmul_tiles.h"
#endif

namespace cedar {
namespace CEDAR_ISA {

Path choose_path(int32_t weight_kind, int32_t x_dtype, bool quantise) {
  const bool exact = weight_kind != kFloat32Weight && (x_dtype == kBfloat16 || quantise);
#if defined(__AMX_BF16__)
  return exact ? Path::tiles : Path::floats;
#elif defined(CEDAR_AVX512)
  return exact ? Path::pairs : Path::floats;
#else
  (void)exact;
  return Path::floats;
#endif
}

size_t operand_bytes(Path path, int64_t n, int64_t width) {
#if defined(__AMX_BF16__)
  if (path == Path::tiles) return tiles::operand_bytes(n, width);
#elif defined(CEDAR_AVX512)
  if (path == Path::pairs) return pairs::operand_bytes(n, width);
#endif
  (void)path;
  return floats::operand_bytes(n, width);
}

void prepare(const Rows& rows, bool quantise, Path path, int64_t first, int64_t last, void* data) {
#if defined(__AMX_BF16__)
  if (path == Path::tiles) {
    return tiles::prepare(rows, quantise, first, last, static_cast<uint16_t*>(data));
  }
#elif defined(CEDAR_AVX512)
  if (path == Path::pairs) {
    return pairs::prepare(rows, quantise, first, last, static_cast<uint16_t*>(data));
  }
#endif
  (void)path;
  floats::prepare(rows, quantise, first, last, static_cast<float*>(data));
}

void multiply(const Weight& weight, int64_t first_row, int64_t rows, const Operand& operand,
              int64_t first_column, int64_t columns, float* out, int64_t stride) {
#if defined(__AMX_BF16__)
  if (operand.path == Path::tiles) {
    return tiles::multiply(weight, first_row, rows, operand, first_column, columns, out, stride);
  }
#elif defined(CEDAR_AVX512)
  if (operand.path == Path::pairs) {
    return pairs::multiply(weight, first_row, rows, operand, first_column, columns, out, stride);
  }
#endif
  floats::multiply(weight, first_row, rows, operand, first_column, columns, out, stride);
}

}  // namespace CEDAR_ISA
}  // namespace cedar
