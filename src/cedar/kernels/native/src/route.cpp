// The router (specification 4.10): float32 logits, scores, and the best experts of every row.
#include <cmath>

#include "cedar_native.h"
#include "matmul.h"
#include "moe.h"
#include "quant.h"
#include "thread_pool.h"

namespace cedar {
namespace CEDAR_ISA {

int linear(const LinearCall& call);

namespace {

constexpr int kLogitsSlot = kFreeSlot, kTakenSlot = kFreeSlot + 1;

// Scores of one row's logits, in place.
void score_row(float* logits, int64_t experts, int32_t scoring) {
  if (scoring == kSoftmax) {
    float highest = logits[0], sum = 0.f;
    for (int64_t e = 1; e < experts; ++e) highest = logits[e] > highest ? logits[e] : highest;
    for (int64_t e = 0; e < experts; ++e) {
      logits[e] = std::exp(logits[e] - highest);
      sum += logits[e];
    }
    for (int64_t e = 0; e < experts; ++e) logits[e] /= sum;
    return;
  }
  for (int64_t e = 0; e < experts; ++e) {
    const float x = logits[e];
    // Softplus is the identity above 20.
    logits[e] = scoring == kSigmoid ? 1.f / (1.f + std::exp(-x))
                                    : std::sqrt(x > 20.f ? x : std::log1p(std::exp(x)));
  }
}

// The `chosen` highest of score + bias, ties to the lowest id, into ids and weights of one row.
void choose_row(const RouteCall& call, const float* scores, const float* bias, uint8_t* taken,
                int64_t* ids, float* weights) {
  std::memset(taken, 0, static_cast<size_t>(call.experts));
  float sum = 0.f;
  for (int64_t k = 0; k < call.chosen; ++k) {
    int64_t best = -1;
    float highest = 0.f;
    for (int64_t e = 0; e < call.experts; ++e) {
      const float biased = scores[e] + bias[e];
      if (taken[e] == 0 && (best < 0 || biased > highest)) best = e, highest = biased;
    }
    taken[best] = 1;
    ids[k] = best;
    weights[k] = scores[best];
    sum += weights[k];
  }
  for (int64_t k = 0; k < call.chosen; ++k) {
    if (call.normalise && call.chosen > 1) weights[k] /= sum + 1e-20f;
    weights[k] *= call.scale;
  }
}

}  // namespace

int route(const RouteCall& call) {
  float* logits = scratch_array<float>(kLogitsSlot, static_cast<size_t>(call.n * call.experts));
  const Weight gate = {call.gate_dtype, call.gate, nullptr, call.experts, call.width};
  linear({call.x, call.dtype, call.width, call.n, gate, false, logits, kFloat32, call.experts,
          call.threads});
  const int64_t step = 1 + 4096 / call.experts;
  parallel_for((call.n + step - 1) / step, call.threads, [&](int64_t chunk) {
    uint8_t* taken = scratch_array<uint8_t>(kTakenSlot, static_cast<size_t>(call.experts));
    const int64_t end = (chunk + 1) * step < call.n ? (chunk + 1) * step : call.n;
    for (int64_t row = chunk * step; row < end; ++row) {
      float* scores = logits + row * call.experts;
      score_row(scores, call.experts, call.scoring);
      choose_row(call, scores, call.bias + row * call.bias_stride, taken,
                 call.ids + row * call.chosen, call.weights + row * call.chosen);
    }
  });
  return 0;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
