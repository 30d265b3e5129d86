// Row-wise kernels between the large ones. Every row is computed by itself in one fixed order, so a
// row's bits depend neither on its neighbours nor on the number of threads.
#include "glue.h"

#include <cmath>

#include "simd.h"
#include "thread_pool.h"

namespace cedar {
namespace CEDAR_ISA {
namespace {

constexpr int kLanes = F32::kLanes;
constexpr int kMaxCopies = 8;
constexpr int kMostMixes = kMaxCopies * (kMaxCopies + 2);

// A row of float32 or bfloat16 values, read or written a vector at a time.
template <int kDtype>
struct Row;

template <>
struct Row<0> {
  using Value = float;
  static CEDAR_INLINE F32 load(const Value* p, int n) {
    return n >= kLanes ? F32::load(p) : F32::load(p, n);
  }
  static CEDAR_INLINE void store(F32 x, Value* p, int n) {
    if (n >= kLanes) x.store(p);
    else x.store(p, n);
  }
  // What storing and loading again gives.
  static CEDAR_INLINE F32 rounded(F32 x) { return x; }
};

template <>
struct Row<1> {
  using Value = uint16_t;
  static CEDAR_INLINE F32 load(const Value* p, int n) {
    return n >= kLanes ? F32::load_bf16(p) : F32::load_bf16(p, n);
  }
  static CEDAR_INLINE void store(F32 x, Value* p, int n) {
    if (n >= kLanes) x.store_bf16(p);
    else x.store_bf16(p, n);
  }
  static CEDAR_INLINE F32 rounded(F32 x) {
    Value half[kLanes];
    x.store_bf16(half);
    return F32::load_bf16(half);
  }
};

CEDAR_INLINE F32 load_weight(const void* weight, int32_t dtype, int64_t at, int n) {
  if (dtype == 0) return Row<0>::load(static_cast<const float*>(weight) + at, n);
  return Row<1>::load(static_cast<const uint16_t*>(weight) + at, n);
}

CEDAR_INLINE int left(int64_t at, int64_t width) {
  return width - at < kLanes ? static_cast<int>(width - at) : kLanes;
}

// Rows a chunk of work takes: enough to outweigh handing it over.
int64_t rows_per_chunk(int64_t n, int64_t values, int threads) {
  const int64_t least = 1 + 16384 / (values > 0 ? values : 1);
  const int64_t even = (n + 4 * threads - 1) / (4 * threads);
  return even > least ? even : least;
}

template <class Body>
void for_rows(int64_t n, int64_t values, int threads, const Body& body) {
  const int64_t step = rows_per_chunk(n, values, threads);
  parallel_for((n + step - 1) / step, threads, [&](int64_t chunk) {
    const int64_t end = (chunk + 1) * step < n ? (chunk + 1) * step : n;
    for (int64_t row = chunk * step; row < end; ++row) body(row);
  });
}

// 1 / sqrt(mean(x^2) + eps), summed in a fixed order of lanes.
CEDAR_INLINE float inverse_rms(F32 squares, int64_t width, float eps) {
  return 1.f / std::sqrt(squares.sum() / static_cast<float>(width) + eps);
}

template <int kDtype>
void norm_rows(const NormCall& call) {
  using R = Row<kDtype>;
  using Value = typename R::Value;
  for_rows(call.n, call.width, call.threads, [&](int64_t row) {
    const Value* x = static_cast<const Value*>(call.x) + row * call.width;
    Value* out = static_cast<Value*>(call.out) + row * call.width;
    F32 squares = F32::zero();
    for (int64_t i = 0; i < call.width; i += kLanes) {
      const F32 v = R::load(x + i, left(i, call.width));
      squares = fma(v, v, squares);
    }
    const F32 scale = F32::set(inverse_rms(squares, call.width, call.eps));
    for (int64_t i = 0; i < call.width; i += kLanes) {
      const int n = left(i, call.width);
      const F32 weight = load_weight(call.weight, call.weight_dtype, i, n);
      R::store(R::load(x + i, n) * scale * weight, out + i, n);
    }
  });
}

template <int kDtype>
void rotate_rows(const RotateCall& call) {
  using R = Row<kDtype>;
  using Value = typename R::Value;
  for_rows(call.n, call.per_row * call.width, call.threads, [&](int64_t row) {
    const float* table = call.cos_sin + row * call.rope;
    for (int64_t k = 0; k < call.per_row; ++k) {
      const int64_t at = (row * call.per_row + k) * call.width;
      const Value* x = static_cast<const Value*>(call.x) + at;
      Value* out = static_cast<Value*>(call.out) + at;
      const int64_t head = call.width - call.rope;
      if (head > 0 && out != x) std::memcpy(out, x, static_cast<size_t>(head) * sizeof(Value));
      for (int64_t i = 0; i < call.rope; i += 2) {
        float pair[2];
        if (kDtype == 0) {
          std::memcpy(pair, x + head + i, 8);
        } else {
          uint16_t half[2];
          std::memcpy(half, x + head + i, 4);
          pair[0] = bf16_to_float(half[0]);
          pair[1] = bf16_to_float(half[1]);
        }
        const float cosine = table[i], sine = call.inverse ? -table[i + 1] : table[i + 1];
        const float even = pair[0] * cosine - pair[1] * sine;
        const float odd = pair[0] * sine + pair[1] * cosine;
        if (kDtype == 0) {
          const float turned[2] = {even, odd};
          std::memcpy(out + head + i, turned, 8);
        } else {
          const uint16_t turned[2] = {float_to_bf16(even), float_to_bf16(odd)};
          std::memcpy(out + head + i, turned, 4);
        }
      }
    }
  });
}

// ---- hyper-connections ---------------------------------------------------------------------------

// `mixes` raw numbers of one row: (fn @ x) / rms(x). Eight sums at a time share the loads of x.
template <int kDtype>
void raw_mixes(const MixesCall& call, int64_t row, float* raw) {
  using R = Row<kDtype>;
  const int64_t values = call.copies * call.width;
  const int64_t mixes = call.copies * (call.copies + 2);
  const auto* x = static_cast<const typename R::Value*>(call.stream) + row * values;
  F32 squares = F32::zero();
  for (int64_t first = 0; first < mixes; first += 8) {
    const int64_t count = mixes - first < 8 ? mixes - first : 8;
    F32 sums[8];
    for (int k = 0; k < 8; ++k) sums[k] = F32::zero();
    for (int64_t i = 0; i < values; i += kLanes) {
      const int n = left(i, values);
      const F32 v = R::load(x + i, n);
      if (first == 0) squares = fma(v, v, squares);
      for (int64_t k = 0; k < count; ++k) {
        const float* weights = call.fn + (first + k) * values + i;
        sums[k] = fma(v, n >= kLanes ? F32::load(weights) : F32::load(weights, n), sums[k]);
      }
    }
    for (int64_t k = 0; k < count; ++k) raw[first + k] = sums[k].sum();
  }
  const float rho = inverse_rms(squares, values, call.norm_eps);
  for (int64_t k = 0; k < mixes; ++k) raw[k] *= rho;
}

CEDAR_INLINE F32 sigmoid(F32 x) { return F32::set(1.f) / (F32::set(1.f) + exp(F32::zero() - x)); }

// Coefficients of up to kLanes rows, one row a lane: `raw` [mixes][kLanes] in, results out likewise.
void finish_mixes(const MixesCall& call, const F32* raw, F32* pre, F32* post, F32* comb) {
  const int64_t copies = call.copies;
  const F32 eps = F32::set(call.eps);
  for (int64_t c = 0; c < copies; ++c) {
    const F32 p = raw[c] * F32::set(call.scale[0]) + F32::set(call.base[c]);
    pre[c] = sigmoid(p) + eps;
    const F32 q = raw[copies + c] * F32::set(call.scale[1]) + F32::set(call.base[copies + c]);
    post[c] = F32::set(2.f) * sigmoid(q);
  }
  for (int64_t i = 0; i < copies; ++i) {
    F32* line = comb + i * copies;
    F32 highest = F32::set(-3.4e38f);
    for (int64_t j = 0; j < copies; ++j) {
      const int64_t at = 2 * copies + i * copies + j;
      line[j] = raw[at] * F32::set(call.scale[2]) + F32::set(call.base[at]);
      highest = max(highest, line[j]);
    }
    F32 sum = F32::zero();
    for (int64_t j = 0; j < copies; ++j) {
      line[j] = exp(line[j] - highest);
      sum = sum + line[j];
    }
    for (int64_t j = 0; j < copies; ++j) line[j] = line[j] / sum + eps;
  }
  for (int32_t round_number = 0; round_number < call.iterations; ++round_number) {
    if (round_number > 0) {
      for (int64_t i = 0; i < copies; ++i) {
        F32 sum = F32::zero();
        for (int64_t j = 0; j < copies; ++j) sum = sum + comb[i * copies + j];
        const F32 inverse = F32::set(1.f) / (sum + eps);
        for (int64_t j = 0; j < copies; ++j) comb[i * copies + j] = comb[i * copies + j] * inverse;
      }
    }
    for (int64_t j = 0; j < copies; ++j) {
      F32 sum = F32::zero();
      for (int64_t i = 0; i < copies; ++i) sum = sum + comb[i * copies + j];
      const F32 inverse = F32::set(1.f) / (sum + eps);
      for (int64_t i = 0; i < copies; ++i) comb[i * copies + j] = comb[i * copies + j] * inverse;
    }
  }
}

template <int kDtype>
void mixes_rows(const MixesCall& call) {
  const int64_t mixes = call.copies * (call.copies + 2);
  const int64_t squares = call.copies * call.copies;
  const int64_t groups = (call.n + kLanes - 1) / kLanes;
  for_rows(groups, call.copies * call.width * kLanes, call.threads, [&](int64_t group) {
    // Lanes beyond the last row keep zeros: harmless coefficients that are never stored.
    alignas(64) float lanes[kMostMixes * kLanes] = {};
    const int64_t first = group * kLanes;
    const int64_t rows = call.n - first < kLanes ? call.n - first : kLanes;
    for (int64_t r = 0; r < rows; ++r) {
      float raw[kMostMixes];
      raw_mixes<kDtype>(call, first + r, raw);
      for (int64_t k = 0; k < mixes; ++k) lanes[k * kLanes + r] = raw[k];
    }
    F32 in[kMostMixes], pre[kMaxCopies], post[kMaxCopies], comb[kMaxCopies * kMaxCopies];
    for (int64_t k = 0; k < mixes; ++k) in[k] = F32::load(lanes + k * kLanes);
    finish_mixes(call, in, pre, post, comb);
    float column[kLanes];
    for (int64_t c = 0; c < call.copies; ++c) {
      pre[c].store(column);
      for (int64_t r = 0; r < rows; ++r) call.pre[(first + r) * call.copies + c] = column[r];
      post[c].store(column);
      for (int64_t r = 0; r < rows; ++r) call.post[(first + r) * call.copies + c] = column[r];
    }
    for (int64_t k = 0; k < squares; ++k) {
      comb[k].store(column);
      for (int64_t r = 0; r < rows; ++r) call.comb[(first + r) * squares + k] = column[r];
    }
  });
}

template <int kDtype>
void collapse_rows(const CollapseCall& call) {
  using R = Row<kDtype>;
  using Value = typename R::Value;
  for_rows(call.n, call.copies * call.width, call.threads, [&](int64_t row) {
    const Value* stream = static_cast<const Value*>(call.stream) + row * call.copies * call.width;
    const float* pre = call.pre + row * call.copies;
    Value* out = static_cast<Value*>(call.out) + row * call.width;
    F32 squares = F32::zero();
    for (int64_t i = 0; i < call.width; i += kLanes) {
      const int n = left(i, call.width);
      F32 sum = F32::zero();
      for (int64_t c = 0; c < call.copies; ++c) {
        sum = fma(F32::set(pre[c]), R::load(stream + c * call.width + i, n), sum);
      }
      sum = R::rounded(sum);
      squares = fma(sum, sum, squares);
      R::store(sum, out + i, n);
    }
    if (call.weight == nullptr) return;
    const F32 scale = F32::set(inverse_rms(squares, call.width, call.eps));
    for (int64_t i = 0; i < call.width; i += kLanes) {
      const int n = left(i, call.width);
      const F32 weight = load_weight(call.weight, call.weight_dtype, i, n);
      R::store(R::load(out + i, n) * scale * weight, out + i, n);
    }
  });
}

template <int kDtype>
void expand_rows(const ExpandCall& call) {
  using R = Row<kDtype>;
  using Value = typename R::Value;
  const int64_t values = call.copies * call.width;
  for_rows(call.n, values, call.threads, [&](int64_t row) {
    const Value* y = static_cast<const Value*>(call.y) + row * call.width;
    const Value* stream = static_cast<const Value*>(call.stream) + row * values;
    Value* out = static_cast<Value*>(call.out) + row * values;
    const float* post = call.post + row * call.copies;
    const float* comb = call.comb + row * call.copies * call.copies;
    for (int64_t i = 0; i < call.width; i += kLanes) {
      const int n = left(i, call.width);
      F32 in[kMaxCopies];
      for (int64_t c = 0; c < call.copies; ++c) in[c] = R::load(stream + c * call.width + i, n);
      const F32 added = R::load(y + i, n);
      for (int64_t j = 0; j < call.copies; ++j) {
        F32 sum = F32::set(post[j]) * added;
        for (int64_t c = 0; c < call.copies; ++c) {
          sum = fma(F32::set(comb[c * call.copies + j]), in[c], sum);
        }
        R::store(sum, out + j * call.width + i, n);
      }
    }
  });
}

}  // namespace

int rms_norm(const NormCall& call) {
  if (call.dtype == 0) norm_rows<0>(call);
  else norm_rows<1>(call);
  return 0;
}

int rotate(const RotateCall& call) {
  if (call.dtype == 0) rotate_rows<0>(call);
  else rotate_rows<1>(call);
  return 0;
}

int hc_mixes(const MixesCall& call) {
  if (call.dtype == 0) mixes_rows<0>(call);
  else mixes_rows<1>(call);
  return 0;
}

int hc_collapse(const CollapseCall& call) {
  if (call.dtype == 0) collapse_rows<0>(call);
  else collapse_rows<1>(call);
  return 0;
}

int hc_expand(const ExpandCall& call) {
  if (call.dtype == 0) expand_rows<0>(call);
  else expand_rows<1>(call);
  return 0;
}

int pool_groups(const PoolCall& call) {
  for_rows(call.groups, call.ratio * call.width, call.threads, [&](int64_t group) {
    const float* kv = call.kv + group * call.ratio * call.width;
    const float* gate = call.gate + group * call.ratio * call.width;
    float* out = call.out + group * call.width;
    for (int64_t i = 0; i < call.width; i += kLanes) {
      const int n = left(i, call.width);
      F32 highest = Row<0>::load(gate + i, n);
      for (int64_t r = 1; r < call.ratio; ++r) {
        highest = max(highest, Row<0>::load(gate + r * call.width + i, n));
      }
      F32 total = F32::zero(), sum = F32::zero();
      for (int64_t r = 0; r < call.ratio; ++r) {
        const F32 weight = exp(Row<0>::load(gate + r * call.width + i, n) - highest);
        total = total + weight;
        sum = fma(weight, Row<0>::load(kv + r * call.width + i, n), sum);
      }
      Row<0>::store(sum / total, out + i, n);
    }
  });
  return 0;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
