// Fused projections: chains of the kernels beside this file, each step rounded as if it were stored.
// What a chain saves is calls, not arithmetic. The row-wise steps are handed in: they have no variant
// for matrix tiles.
#include "project.h"

#include "matmul.h"
#include "simd.h"
#include "thread_pool.h"

namespace cedar {
namespace CEDAR_ISA {

int linear(const LinearCall& call);

namespace {

constexpr int kTurnedSlot = kFreeSlot + 4, kInnerSlot = kFreeSlot + 5;

int64_t value_bytes(int32_t dtype) { return dtype == kFloat32Weight ? 4 : 2; }

const void* row_offset(const void* values, int32_t kind, int64_t rows, int64_t in) {
  const char* from = static_cast<const char*>(values);
  switch (kind) {
    case kFloat32Weight: return from + rows * in * 4;
    case kBfloat16Weight: return from + rows * in * 2;
    case kFp8Weight: return from + rows * in;
    default: return from + rows * in / 2;
  }
}

// Rows `first ..` of a projection; a block of fp8 rows starts on a whole 32x32 tile.
Weight block_of(const Weight& all, int64_t first, int64_t out) {
  Weight block = all;
  block.values = row_offset(all.values, all.kind, first, all.in);
  block.out = out;
  if (all.kind == kFp8Weight) block.scales = all.scales + first / 32 * (all.in / 32);
  if (all.kind == kFp4Weight) block.scales = all.scales + first * (all.in / 32);
  return block;
}

}  // namespace

int project(const ProjectCall& call, int (*norm)(const NormCall&), int (*turn)(const RotateCall&)) {
  const LinearCall& product = call.linear;
  if (const int status = linear(product)) return status;
  const int64_t width = product.weight.out;
  if (call.norm_weight != nullptr) {
    norm({product.y, product.y_dtype, product.n, width, call.norm_weight, call.norm_dtype, call.eps,
          product.y, product.threads});
  }
  if (call.cos_sin != nullptr) {
    turn({product.y, product.y_dtype, product.n, call.per_row, width / call.per_row, call.cos_sin,
          call.rope, false, product.y, product.threads});
  }
  return 0;
}

int project_output(const OutputCall& call, int (*turn)(const RotateCall&)) {
  const int64_t values = call.heads * call.dim, bytes = value_bytes(call.dtype);
  const int64_t inner = call.grouped.out, rank = inner / call.groups, in = values / call.groups;
  char* turned = static_cast<char*>(scratch(kTurnedSlot, static_cast<size_t>(call.n * values * bytes)));
  char* middle = static_cast<char*>(scratch(kInnerSlot, static_cast<size_t>(call.n * inner * bytes)));
  turn({call.o, call.dtype, call.n, call.heads, call.dim, call.cos_sin, call.rope, true, turned,
        call.threads});
  for (int64_t group = 0; group < call.groups; ++group) {
    const LinearCall part = {turned + group * in * bytes, call.dtype, values, call.n,
                             block_of(call.grouped, group * rank, rank), false,
                             middle + group * rank * bytes, call.dtype, inner, call.threads};
    if (const int status = linear(part)) return status;
  }
  const bool quantise = call.last.kind == kFp8Weight || call.last.kind == kFp4Weight;
  return linear({middle, call.dtype, inner, call.n, call.last, quantise, call.y, call.dtype,
                 call.last.out, call.threads});
}

}  // namespace CEDAR_ISA
}  // namespace cedar
