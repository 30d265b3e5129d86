// Exported entry points of codec, linear, moe and glue: check what C cannot, then forward to the
// variant in use. Compiled once, for the baseline instruction set. Return 0, or a Status.
#include "cedar_native.h"
#include "codec.h"
#include "linear.h"

CEDAR_VARIANTS(int, store_rows, (const cedar::RowsCall& call))
CEDAR_VARIANTS(int, load_rows, (const cedar::RowsCall& call))
CEDAR_VARIANTS(int, fake_quantise, (const cedar::FakeQuantiseCall& call))
CEDAR_VARIANTS_AMX(int, linear, (const cedar::LinearCall& call))

namespace cedar {
namespace {

// Keep in step with `_STATUS` in library.py.
enum Status : int { kBadWidth = 1, kRowOutOfRange = 2, kBadKind = 3 };

int check_rows(const RowsCall& call, int64_t num_rows, int64_t lowest) {
  if (call.kind < kWindowRow || call.kind > kIndexRow) return kBadKind;
  if (call.width < 1 || call.width % (call.kind == kMainRow ? 16 : 32) != 0) return kBadWidth;
  if (call.where == nullptr) return call.n <= num_rows ? 0 : kRowOutOfRange;
  for (int64_t i = 0; i < call.n; ++i) {
    if (call.where[i] < lowest || call.where[i] >= num_rows) return kRowOutOfRange;
  }
  return 0;
}

// Activations are float32 or bfloat16; scaled weights have whole groups of 32 inputs.
int check_linear(const Weight& weight, bool quantise, int32_t x_dtype, int32_t y_dtype) {
  const bool scaled = weight.kind == kFp8Weight || weight.kind == kFp4Weight;
  if (!scaled && weight.kind != kFloat32Weight && weight.kind != kBfloat16Weight) return kBadKind;
  if ((x_dtype | y_dtype) & ~1) return kBadKind;
  if ((scaled || quantise) && weight.in % 32 != 0) return kBadWidth;
  return weight.in < 1 || weight.out < 1 ? kBadWidth : 0;
}

}  // namespace
}  // namespace cedar

CEDAR_API int cedar_store_rows(const void* x, int32_t dtype, int64_t x_stride, int64_t n,
                               int32_t kind, int64_t width, uint8_t* rows, int64_t row_stride,
                               int64_t num_rows, const int64_t* where, int32_t nthreads) {
  const cedar::RowsCall call = {const_cast<void*>(x), dtype, x_stride, n,     kind,
                                width,                rows,  row_stride, where, nthreads};
  if (const int status = cedar::check_rows(call, num_rows, 0)) return status;
  CEDAR_CALL(store_rows, (call));
}

CEDAR_API int cedar_load_rows(const uint8_t* rows, int64_t row_stride, int64_t num_rows,
                              const int64_t* where, int64_t n, int32_t kind, int64_t width,
                              void* out, int32_t dtype, int64_t out_stride, int32_t nthreads) {
  const cedar::RowsCall call = {out,   dtype, out_stride, n, kind, width, const_cast<uint8_t*>(rows),
                                row_stride, where, nthreads};
  if (const int status = cedar::check_rows(call, num_rows, -1)) return status;
  CEDAR_CALL(load_rows, (call));
}

CEDAR_API int cedar_fake_quantise(const void* x, int32_t dtype, int64_t x_stride, int64_t n,
                                  int64_t width, void* out, int32_t out_dtype, int64_t out_stride,
                                  int32_t nthreads) {
  if (width % 32 != 0) return cedar::kBadWidth;
  const cedar::FakeQuantiseCall call = {x,   dtype,     x_stride,   n,       width,
                                        out, out_dtype, out_stride, nthreads};
  CEDAR_CALL(fake_quantise, (call));
}

CEDAR_API int cedar_linear(const void* x, int32_t x_dtype, int64_t x_stride, int64_t n,
                           const void* values, const uint8_t* scales, int32_t kind, int64_t out,
                           int64_t in, int32_t quantise, void* y, int32_t y_dtype,
                           int64_t y_stride, int32_t nthreads) {
  const cedar::Weight weight = {kind, values, scales, out, in};
  const cedar::LinearCall call = {x, x_dtype, x_stride, n,        weight,  quantise != 0,
                                  y, y_dtype, y_stride, nthreads};
  if (const int status = cedar::check_linear(weight, call.quantise, x_dtype, y_dtype)) return status;
  CEDAR_CALL_AMX(linear, (call));
}

CEDAR_API int cedar_abi_version() {
  constexpr int kAbiVersion = 3;  // keep in step with library.py
  return kAbiVersion;
}
