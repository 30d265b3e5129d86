// SwiGLU of the experts (specification 4.10), a vector of hidden values at a time.
#pragma once

#include "values.h"

namespace cedar {
namespace CEDAR_ISA {

// silu(gate) * up * routing weight from rounded outputs of both projections; limit <= 0: no clamp.
CEDAR_INLINE F32 swiglu(F32 gate, F32 up, float limit, F32 weight) {
  if (limit > 0.f) {
    gate = min(gate, F32::set(limit));
    up = max(min(up, F32::set(limit)), F32::set(-limit));
  }
  const F32 silu = gate / (F32::set(1.f) + exp(F32::zero() - gate));
  return silu * up * weight;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
