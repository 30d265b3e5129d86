// Exported entry points of codec, linear, moe and glue: check what C cannot, then forward to the
// variant in use. Compiled once, for the baseline instruction set. Return 0, or a Status.
#include "cedar_native.h"
#include "codec.h"

CEDAR_VARIANTS(int, store_rows, (const cedar::RowsCall& call))
CEDAR_VARIANTS(int, load_rows, (const cedar::RowsCall& call))
CEDAR_VARIANTS(int, fake_quantise, (const cedar::FakeQuantiseCall& call))

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

CEDAR_API int cedar_abi_version() {
  constexpr int kAbiVersion = 1;  // keep in step with library.py
  return kAbiVersion;
}
