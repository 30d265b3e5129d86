// Arguments of the mixture of experts and its router.
#pragma once

#include <cstdint>

#include "linear.h"

namespace cedar {

// Addresses of the projections of the routed experts, one per expert, and of the shared expert.
struct ExpertWeights {
  const void* const* values;           // [experts]
  const uint8_t* const* scales;        // [experts], entries null for plain weights
};

struct MoeCall {
  const void* x;
  int32_t dtype;
  int64_t n, width, inner, experts, chosen;
  const int64_t* ids;                  // [n, chosen]
  const float* weights;                // [n, chosen]
  int32_t kind;                        // of the routed experts
  ExpertWeights gate, up, down;        // w1, w3, w2
  int32_t shared_kind;
  Weight shared_gate, shared_up, shared_down;
  float limit;                         // <= 0: no clamp
  void* out;
  int32_t threads;
};

enum Scoring : int32_t { kSqrtSoftplus = 0, kSigmoid = 1, kSoftmax = 2 };

// Chooses experts by score + bias, weighs them by the unbiased score (specification 4.10).
struct RouteCall {
  const void* x;
  int32_t dtype;
  int64_t n, width;
  const void* gate;                    // [experts, width]
  int32_t gate_dtype;
  const float* bias;                   // [experts], or per row [n, experts] with a stride
  int64_t bias_stride;
  int64_t experts, chosen;
  int32_t scoring;
  bool normalise;
  float scale;
  int64_t* ids;                        // [n, chosen], highest biased score first
  float* weights;                      // [n, chosen]
  int32_t threads;
};

}  // namespace cedar
