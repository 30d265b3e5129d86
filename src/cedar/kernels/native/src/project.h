// Arguments of the fused projections: what lies between two large kernels of a layer, in one call.
#pragma once

#include <cstdint>

#include "glue.h"
#include "linear.h"

namespace cedar {

// y = rotate(norm(x W^T)); norm and rotation are optional. Intermediates are rounded as if stored.
struct ProjectCall {
  LinearCall linear;
  const void* norm_weight;   // or null
  int32_t norm_dtype;
  float eps;
  const float* cos_sin;      // [n, rope / 2, 2] or null
  int64_t rope, per_row;     // vectors of one row that share its angles
};

// Attention output: inverse rotation, block-diagonal projection per group, final projection.
struct OutputCall {
  const void* o;             // [n, heads, dim]
  int32_t dtype;
  int64_t n, heads, dim;
  const float* cos_sin;
  int64_t rope;
  int64_t groups;
  Weight grouped;            // [groups * rank, heads / groups * dim]
  Weight last;               // [width, groups * rank]
  void* y;                   // [n, width]
  int32_t threads;
};

}  // namespace cedar
