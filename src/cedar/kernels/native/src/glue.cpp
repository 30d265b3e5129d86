// Norm, rotation and group pooling. Every row is computed by itself in one fixed order, so a row's bits
// depend neither on its neighbours nor on the number of threads.
#include "glue.h"

#include "simd.h"
#include "values.h"

namespace cedar {
namespace CEDAR_ISA {
namespace {

template <int kDtype>
void norm_rows(const NormCall& call) {
  using R = Row<kDtype>;
  using Value = typename R::Value;
  for_rows(call.n, call.width, call.threads, [&](int64_t row) {
    const Value* x = static_cast<const Value*>(call.x) + row * call.width;
    Value* out = static_cast<Value*>(call.out) + row * call.width;
    F32 squares = F32::zero();
    for (int64_t i = 0; i < call.width; i += kLanes) {
      const F32 v = R::load(x + i, lanes_left(i, call.width));
      squares = fma(v, v, squares);
    }
    const F32 scale = F32::set(inverse_rms(squares, call.width, call.eps));
    for (int64_t i = 0; i < call.width; i += kLanes) {
      const int n = lanes_left(i, call.width);
      const F32 weight = load_lanes(call.weight, call.weight_dtype, i, n);
      R::store(R::load(x + i, n) * scale * weight, out + i, n);
    }
  });
}

// ---- rotation ------------------------------------------------------------------------------------

// Float32 bits rounded to bfloat16, in the upper half of each lane; NaN stays NaN.
CEDAR_INLINE Ints round_upper(Floats x) {
  const Ints bits = (Ints)x;
  const Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return ((bits & kMagnitude) > kInfinity ? bits | 0x400000 : rounded) & ~0xffff;
}

// Rotates `pairs` adjacent pairs by angles given as cosines and sines.
void turn(const uint16_t* x, const float* cosines, const float* sines, int64_t pairs,
          uint16_t* out) {
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    // A lane holds a pair, the even value in its lower half.
    const Ints both = load_vector<Ints>(x + 2 * i);
    const Floats even = (Floats)(both << 16), odd = (Floats)(both & ~0xffff);
    const Floats c = load_vector<Floats>(cosines + i), s = load_vector<Floats>(sines + i);
    const Ints low = (round_upper(even * c - odd * s) >> 16) & 0xffff;
    store_vector(out + 2 * i, low | round_upper(even * s + odd * c));
  }
  for (; i < pairs; ++i) {
    const float even = bf16_to_float(x[2 * i]), odd = bf16_to_float(x[2 * i + 1]);
    out[2 * i] = float_to_bf16(even * cosines[i] - odd * sines[i]);
    out[2 * i + 1] = float_to_bf16(even * sines[i] + odd * cosines[i]);
  }
}

void turn(const float* x, const float* cosines, const float* sines, int64_t pairs, float* out) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float even = x[2 * i], odd = x[2 * i + 1];
    out[2 * i] = even * cosines[i] - odd * sines[i];
    out[2 * i + 1] = even * sines[i] + odd * cosines[i];
  }
}

template <int kDtype>
void rotate_rows(const RotateCall& call) {
  using Value = typename Row<kDtype>::Value;
  constexpr int kAnglesSlot = 0;
  const int64_t pairs = call.rope / 2, head = call.width - call.rope;
  for_rows(call.n, call.per_row * call.width, call.threads, [&](int64_t row) {
    float* cosines = scratch_array<float>(kAnglesSlot, static_cast<size_t>(2 * pairs));
    float* sines = cosines + pairs;
    for (int64_t i = 0; i < pairs; ++i) {
      const float* angle = call.cos_sin + row * call.rope + 2 * i;
      cosines[i] = angle[0];
      sines[i] = call.inverse ? -angle[1] : angle[1];
    }
    for (int64_t k = 0; k < call.per_row; ++k) {
      const int64_t at = (row * call.per_row + k) * call.width;
      const Value* x = static_cast<const Value*>(call.x) + at;
      Value* out = static_cast<Value*>(call.out) + at;
      if (out != x) std::memcpy(out, x, static_cast<size_t>(head) * sizeof(Value));
      turn(x + head, cosines, sines, pairs, out + head);
    }
  });
}

}  // namespace

int rms_norm(const NormCall& call) {
  call.dtype == kFloat32 ? norm_rows<kFloat32>(call) : norm_rows<kBfloat16>(call);
  return 0;
}

int rotate(const RotateCall& call) {
  call.dtype == kFloat32 ? rotate_rows<kFloat32>(call) : rotate_rows<kBfloat16>(call);
  return 0;
}

int pool_groups(const PoolCall& call) {
  for_rows(call.groups, call.ratio * call.width, call.threads, [&](int64_t group) {
    const float* kv = call.kv + group * call.ratio * call.width;
    const float* gate = call.gate + group * call.ratio * call.width;
    float* out = call.out + group * call.width;
    for (int64_t i = 0; i < call.width; i += kLanes) {
      const int n = lanes_left(i, call.width);
      F32 highest = Row<kFloat32>::load(gate + i, n);
      for (int64_t r = 1; r < call.ratio; ++r) {
        highest = max(highest, Row<kFloat32>::load(gate + r * call.width + i, n));
      }
      F32 total = F32::zero(), sum = F32::zero();
      for (int64_t r = 0; r < call.ratio; ++r) {
        const F32 weight = exp(Row<kFloat32>::load(gate + r * call.width + i, n) - highest);
        total = total + weight;
        sum = fma(weight, Row<kFloat32>::load(kv + r * call.width + i, n), sum);
      }
      Row<kFloat32>::store(sum / total, out + i, n);
    }
  });
  return 0;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
