// Mixture of experts (specification 4.10): rows are grouped by expert, each expert runs its three
// projections on its rows, results are added in float32 in ascending expert id, the shared expert
// last, and rounded once.
//
// A row's bits do not depend on the other rows: the projections are batch-invariant and the order of
// the sum is the order of expert ids.
#include "moe.h"

#include <cmath>

#include "simd.h"
#include "thread_pool.h"

namespace cedar {
namespace CEDAR_ISA {

int linear(const LinearCall& call);

namespace {

constexpr int kLanes = F32::kLanes;
// Scratch slots of this file; projections inside it use others.
constexpr int kOrderSlot = 8, kRowsSlot = 9, kGateSlot = 11, kUpSlot = 12, kDownSlot = 13,
              kSumSlot = 14;

CEDAR_INLINE int64_t value_bytes(int32_t dtype) { return dtype == kFloat32Weight ? 4 : 2; }

CEDAR_INLINE F32 load_value(const void* p, int32_t dtype, int64_t at, int n) {
  if (dtype == kFloat32Weight) {
    const float* from = static_cast<const float*>(p) + at;
    return n >= kLanes ? F32::load(from) : F32::load(from, n);
  }
  const uint16_t* from = static_cast<const uint16_t*>(p) + at;
  return n >= kLanes ? F32::load_bf16(from) : F32::load_bf16(from, n);
}

CEDAR_INLINE void store_value(F32 x, void* p, int32_t dtype, int64_t at, int n) {
  if (dtype == kFloat32Weight) {
    float* to = static_cast<float*>(p) + at;
    if (n >= kLanes) x.store(to);
    else x.store(to, n);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(p) + at;
  if (n >= kLanes) x.store_bf16(to);
  else x.store_bf16(to, n);
}

CEDAR_INLINE int left(int64_t at, int64_t width) {
  return width - at < kLanes ? static_cast<int>(width - at) : kLanes;
}

// silu(gate) * up * weight of one row, clamped, in place of the gate's values.
void swiglu_row(const MoeCall& call, void* gate, const void* up, int64_t row, float weight) {
  const F32 limit = F32::set(call.limit), floor = F32::set(-call.limit);
  for (int64_t i = 0; i < call.inner; i += kLanes) {
    const int n = left(i, call.inner);
    const int64_t at = row * call.inner + i;
    F32 g = load_value(gate, call.dtype, at, n);
    F32 u = load_value(up, call.dtype, at, n);
    if (call.limit > 0.f) {
      g = min(g, limit);
      u = max(min(u, limit), floor);
    }
    const F32 silu = g / (F32::set(1.f) + exp(F32::zero() - g));
    store_value(silu * u * F32::set(weight), gate, call.dtype, at, n);
  }
}

// One expert on `rows` contiguous rows: gate and up, SwiGLU times the route weights, down.
void run_expert(const MoeCall& call, const void* x, int64_t rows, const Weight& gate,
                const Weight& up, const Weight& down, const float* route, void* out) {
  const size_t bytes = static_cast<size_t>(rows * call.inner * value_bytes(call.dtype));
  void* gates = scratch(kGateSlot, bytes);
  void* ups = scratch(kUpSlot, bytes);
  const auto project = [&](const Weight& weight, const void* from, int64_t in, void* to, int64_t width) {
    const bool quantise = weight.kind == kFp8Weight || weight.kind == kFp4Weight;
    linear({from, call.dtype, in, rows, weight, quantise, to, call.dtype, width, call.threads});
  };
  project(gate, x, call.width, gates, call.inner);
  project(up, x, call.width, ups, call.inner);
  const int64_t step = 1 + 32768 / call.inner;
  parallel_for((rows + step - 1) / step, call.threads, [&](int64_t chunk) {
    const int64_t end = (chunk + 1) * step < rows ? (chunk + 1) * step : rows;
    for (int64_t row = chunk * step; row < end; ++row) {
      swiglu_row(call, gates, ups, row, route == nullptr ? 1.f : route[row]);
    }
  });
  project(down, gates, call.inner, out, call.width);
}

// sums[row] += out[i] for the rows an expert ran.
void add_rows(const MoeCall& call, const void* out, const int64_t* rows, int64_t count, float* sums) {
  const int64_t step = 1 + 32768 / call.width;
  parallel_for((count + step - 1) / step, call.threads, [&](int64_t chunk) {
    const int64_t end = (chunk + 1) * step < count ? (chunk + 1) * step : count;
    for (int64_t i = chunk * step; i < end; ++i) {
      float* sum = sums + (rows == nullptr ? i : rows[i]) * call.width;
      for (int64_t k = 0; k < call.width; k += kLanes) {
        const int n = left(k, call.width);
        const F32 total = load_value(sum, kFloat32Weight, k, n);
        store_value(total + load_value(out, call.dtype, i * call.width + k, n), sum,
                    kFloat32Weight, k, n);
      }
    }
  });
}

// Scores of one row's float32 logits, in place.
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
    if (scoring == kSigmoid) logits[e] = 1.f / (1.f + std::exp(-x));
    // Softplus is the identity above 20.
    else logits[e] = std::sqrt(x > 20.f ? x : std::log1p(std::exp(x)));
  }
}

// The `chosen` highest of score + bias, ties to the lowest id, into ids and weights of one row.
void choose_row(const RouteCall& call, const float* scores, const float* bias, int64_t* ids,
                float* weights) {
  float sum = 0.f;
  for (int64_t k = 0; k < call.chosen; ++k) {
    int64_t best = -1;
    for (int64_t e = 0; e < call.experts; ++e) {
      bool taken = false;
      for (int64_t before = 0; before < k; ++before) taken = taken || ids[before] == e;
      if (!taken && (best < 0 || scores[e] + bias[e] > scores[best] + bias[best])) best = e;
    }
    ids[k] = best;
    weights[k] = scores[best];
    sum += weights[k];
  }
  for (int64_t k = 0; k < call.chosen; ++k) {
    if (call.normalise && call.chosen > 1) weights[k] /= sum + 1e-20f;
    weights[k] *= call.scale;
  }
}

Weight expert_weight(const ExpertWeights& all, int64_t expert, int32_t kind, int64_t out, int64_t in) {
  return {kind, all.values[expert], all.scales[expert], out, in};
}

}  // namespace

int route(const RouteCall& call) {
  const int64_t step = 1 + 65536 / (call.experts * call.width);
  parallel_for((call.n + step - 1) / step, call.threads, [&](int64_t chunk) {
    float* scores = scratch_array<float>(kSumSlot, static_cast<size_t>(call.experts));
    const int64_t end = (chunk + 1) * step < call.n ? (chunk + 1) * step : call.n;
    for (int64_t row = chunk * step; row < end; ++row) {
      for (int64_t e = 0; e < call.experts; ++e) {
        F32 sum = F32::zero();
        for (int64_t i = 0; i < call.width; i += kLanes) {
          const int n = left(i, call.width);
          sum = fma(load_value(call.x, call.dtype, row * call.width + i, n),
                    load_value(call.gate, call.gate_dtype, e * call.width + i, n), sum);
        }
        scores[e] = sum.sum();
      }
      score_row(scores, call.experts, call.scoring);
      choose_row(call, scores, call.bias + row * call.bias_stride, call.ids + row * call.chosen,
                 call.weights + row * call.chosen);
    }
  });
  return 0;
}

int moe(const MoeCall& call) {
  const int64_t slots = call.n * call.chosen, value = value_bytes(call.dtype);
  // Counting sort of the choices by expert: where[expert] .. where[expert + 1] are its rows, ascending.
  int64_t* order = scratch_array<int64_t>(kOrderSlot, static_cast<size_t>(call.experts + 2 + 2 * slots));
  int64_t* where = order;
  int64_t* rows = order + call.experts + 2;
  float* route = reinterpret_cast<float*>(rows + slots);
  for (int64_t e = 0; e < call.experts + 2; ++e) where[e] = 0;
  for (int64_t s = 0; s < slots; ++s) ++where[call.ids[s] + 2];
  for (int64_t e = 2; e < call.experts + 2; ++e) where[e] += where[e - 1];
  for (int64_t s = 0; s < slots; ++s) {
    const int64_t at = where[call.ids[s] + 1]++;
    rows[at] = s / call.chosen;
    route[at] = call.weights[s];
  }
  const size_t row_bytes = static_cast<size_t>(call.width * value);
  float* sums = scratch_array<float>(kSumSlot, static_cast<size_t>(call.n * call.width));
  std::memset(sums, 0, static_cast<size_t>(call.n * call.width) * sizeof(float));
  char* gathered = static_cast<char*>(scratch(kRowsSlot, static_cast<size_t>(call.n) * row_bytes));
  void* down = scratch(kDownSlot, static_cast<size_t>(call.n) * row_bytes);
  for (int64_t e = 0; e < call.experts; ++e) {
    const int64_t first = where[e], count = where[e + 1] - first;
    if (count == 0) continue;
    const void* x = call.x;
    if (call.n > 1) {
      for (int64_t i = 0; i < count; ++i) {
        const char* from = static_cast<const char*>(call.x) + static_cast<size_t>(rows[first + i]) * row_bytes;
        std::memcpy(gathered + static_cast<size_t>(i) * row_bytes, from, row_bytes);
      }
      x = gathered;
    }
    run_expert(call, x, count, expert_weight(call.gate, e, call.kind, call.inner, call.width),
               expert_weight(call.up, e, call.kind, call.inner, call.width),
               expert_weight(call.down, e, call.kind, call.width, call.inner), route + first, down);
    add_rows(call, down, rows + first, count, sums);
  }
  run_expert(call, call.x, call.n, call.shared_gate, call.shared_up, call.shared_down, nullptr, down);
  add_rows(call, down, nullptr, call.n, sums);
  for (int64_t i = 0; i < call.n * call.width; i += kLanes) {
    const int n = left(i, call.n * call.width);
    store_value(load_value(sums, kFloat32Weight, i, n), call.out, call.dtype, i, n);
  }
  return 0;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
