// Hyper-connections (specification 4.2): coefficients from the stream, collapse, expand. Every row is
// computed by itself in one fixed order, so a row's bits depend neither on its neighbours nor on the
// number of threads.
#include "glue.h"
#include "simd.h"
#include "values.h"

namespace cedar {
namespace CEDAR_ISA {
namespace {

constexpr int kMaxCopies = 8;
constexpr int kMostMixes = kMaxCopies * (kMaxCopies + 2);
constexpr int kSumsSlot = 0;

// ---- raw mixes: fn @ x, and the sum of squares ---------------------------------------------------

// Partial sums of one block of stream rows by mixes, kept in memory between blocks of inputs.
struct Sums {
  F32* dots;     // [mix][kLanes rows]
  F32* squares;  // [kLanes rows]
};

constexpr int kRowBlock = kLanes == 16 ? 4 : 2;
constexpr int kMixBlock = kLanes == 16 ? 6 : 4;
constexpr int64_t kInputBlock = 512;  // fn and stream of one block stay in the first-level cache

// Adds inputs [first, last) to kMixBlock x R sums. A missing row or mix repeats the last one: the same
// sum is computed twice.
template <int kDtype, int R>
CEDAR_INLINE void add_block(const MixesCall& call, const typename Row<kDtype>::Value* const* x,
                            const int* rows, const int* mixes, int64_t first, int64_t last,
                            const Sums& sums) {
  const int64_t values = call.copies * call.width;
  const float* fn[kMixBlock];
  F32 acc[kMixBlock][R];
  for (int m = 0; m < kMixBlock; ++m) {
    fn[m] = call.fn + mixes[m] * values;
    for (int r = 0; r < R; ++r) acc[m][r] = sums.dots[mixes[m] * kLanes + rows[r]];
  }
  for (int64_t i = first; i < last; i += kLanes) {
    const int n = lanes_left(i, last);
    F32 v[R];
    for (int r = 0; r < R; ++r) v[r] = Row<kDtype>::load(x[r] + i, n);
    for (int m = 0; m < kMixBlock; ++m) {
      const F32 w = Row<kFloat32>::load(fn[m] + i, n);
      for (int r = 0; r < R; ++r) acc[m][r] = fma(v[r], w, acc[m][r]);
    }
  }
  for (int m = 0; m < kMixBlock; ++m) {
    for (int r = 0; r < R; ++r) sums.dots[mixes[m] * kLanes + rows[r]] = acc[m][r];
  }
}

template <int kDtype, int R>
void add_inputs(const MixesCall& call, int64_t first_row, int count, int64_t first, int64_t last,
                const Sums& sums) {
  using Value = typename Row<kDtype>::Value;
  const int64_t values = call.copies * call.width;
  const int mix_count = static_cast<int>(call.copies * (call.copies + 2));
  for (int row = 0; row < count; row += R) {
    const Value* x[R];
    int rows[R];
    for (int r = 0; r < R; ++r) {
      rows[r] = row + r < count ? row + r : count - 1;
      x[r] = static_cast<const Value*>(call.stream) + (first_row + rows[r]) * values;
    }
    for (int mix = 0; mix < mix_count; mix += kMixBlock) {
      int mixes[kMixBlock];
      for (int m = 0; m < kMixBlock; ++m) mixes[m] = mix + m < mix_count ? mix + m : mix_count - 1;
      add_block<kDtype, R>(call, x, rows, mixes, first, last, sums);
    }
    for (int r = 0; r < R && row + r < count; ++r) {
      F32 squares = sums.squares[row + r];
      for (int64_t i = first; i < last; i += kLanes) {
        const F32 v = Row<kDtype>::load(x[r] + i, lanes_left(i, last));
        squares = fma(v, v, squares);
      }
      sums.squares[row + r] = squares;
    }
  }
}

// Raw mixes (fn @ x) / rms(x) of up to kLanes rows: raw[mix * kLanes + row].
template <int kDtype>
void raw_mixes(const MixesCall& call, int64_t first_row, int count, float* raw) {
  const int64_t values = call.copies * call.width, mixes = call.copies * (call.copies + 2);
  F32* memory = scratch_array<F32>(kSumsSlot, static_cast<size_t>((mixes + 1) * kLanes));
  const Sums sums = {memory, memory + mixes * kLanes};
  for (int64_t i = 0; i < (mixes + 1) * kLanes; ++i) memory[i] = F32::zero();
  for (int64_t i = 0; i < values; i += kInputBlock) {
    const int64_t last = i + kInputBlock < values ? i + kInputBlock : values;
    if (count == 1) {
      add_inputs<kDtype, 1>(call, first_row, count, i, last, sums);
    } else {
      add_inputs<kDtype, kRowBlock>(call, first_row, count, i, last, sums);
    }
  }
  for (int r = 0; r < count; ++r) {
    const float rho = inverse_rms(sums.squares[r], values, call.norm_eps);
    for (int64_t m = 0; m < mixes; ++m) raw[m * kLanes + r] = sums.dots[m * kLanes + r].sum() * rho;
  }
}

// ---- coefficients: sigmoids and Sinkhorn ---------------------------------------------------------

// One row's number where F32 holds one of several rows: the same arithmetic, less latency.
struct One {
  float v;
  static CEDAR_INLINE One zero() { return {0.f}; }
  static CEDAR_INLINE One set(float x) { return {x}; }
  static CEDAR_INLINE One load(const float* p) { return {*p}; }
  CEDAR_INLINE void store(float* p) const { *p = v; }
};
CEDAR_INLINE One operator+(One a, One b) { return {a.v + b.v}; }
CEDAR_INLINE One operator-(One a, One b) { return {a.v - b.v}; }
CEDAR_INLINE One operator*(One a, One b) { return {a.v * b.v}; }
CEDAR_INLINE One operator/(One a, One b) { return {a.v / b.v}; }
CEDAR_INLINE One max(One a, One b) { return {a.v > b.v ? a.v : b.v}; }
CEDAR_INLINE One exp(One x) {
  float lanes[kLanes];
  exp(F32::set(x.v)).store(lanes);
  return {lanes[0]};
}

template <class V>
CEDAR_INLINE V sigmoid(V x) {
  return V::set(1.f) / (V::set(1.f) + exp(V::zero() - x));
}

// Softmax over each row plus eps, then columns and rows in turn, ending on columns.
template <class V, int C>
CEDAR_INLINE void sinkhorn(V* comb, int copies, int32_t iterations, float eps_value) {
  const int n = C > 0 ? C : copies;
  const V eps = V::set(eps_value);
  for (int i = 0; i < n; ++i) {
    V* line = comb + i * n;
    V highest = line[0], sum = V::zero();
    for (int j = 1; j < n; ++j) highest = max(highest, line[j]);
    for (int j = 0; j < n; ++j) {
      line[j] = exp(line[j] - highest);
      sum = sum + line[j];
    }
    for (int j = 0; j < n; ++j) line[j] = line[j] / sum + eps;
  }
  for (int32_t turn = 0; turn < iterations; ++turn) {
    for (int i = 0; turn > 0 && i < n; ++i) {
      V sum = V::zero();
      for (int j = 0; j < n; ++j) sum = sum + comb[i * n + j];
      for (int j = 0; j < n; ++j) comb[i * n + j] = comb[i * n + j] / (sum + eps);
    }
    for (int j = 0; j < n; ++j) {
      V sum = V::zero();
      for (int i = 0; i < n; ++i) sum = sum + comb[i * n + j];
      for (int i = 0; i < n; ++i) comb[i * n + j] = comb[i * n + j] / (sum + eps);
    }
  }
}

// Coefficients of the rows of one V from raw[mix * stride]; out likewise: pre, post, comb.
template <class V, int C>
void finish_mixes(const MixesCall& call, const float* raw, int64_t stride, float* out) {
  const int n = C > 0 ? C : static_cast<int>(call.copies);
  const auto affine = [&](int mix, int part) {
    return V::load(raw + mix * stride) * V::set(call.scale[part]) + V::set(call.base[mix]);
  };
  for (int c = 0; c < n; ++c) {
    (sigmoid(affine(c, 0)) + V::set(call.eps)).store(out + c * stride);
    (V::set(2.f) * sigmoid(affine(n + c, 1))).store(out + (n + c) * stride);
  }
  V comb[C > 0 ? C * C : kMaxCopies * kMaxCopies];
  for (int k = 0; k < n * n; ++k) comb[k] = affine(2 * n + k, 2);
  sinkhorn<V, C>(comb, n, call.iterations, call.eps);
  for (int k = 0; k < n * n; ++k) comb[k].store(out + (2 * n + k) * stride);
}

template <class V>
void finish_mixes(const MixesCall& call, const float* raw, float* out) {
  if (call.copies == 4) {
    finish_mixes<V, 4>(call, raw, kLanes, out);
  } else {
    finish_mixes<V, 0>(call, raw, kLanes, out);
  }
}

template <int kDtype>
void mixes_rows(const MixesCall& call) {
  const int64_t copies = call.copies, mixes = copies * (copies + 2);
  const int64_t groups = (call.n + kLanes - 1) / kLanes;
  for_rows(groups, copies * call.width * kLanes, call.threads, [&](int64_t group) {
    // Lanes beyond the last row keep zeros: harmless coefficients that are never stored.
    alignas(64) float raw[kMostMixes * kLanes] = {}, out[kMostMixes * kLanes];
    const int64_t first = group * kLanes;
    const int rows = static_cast<int>(call.n - first < kLanes ? call.n - first : kLanes);
    raw_mixes<kDtype>(call, first, rows, raw);
    if (rows <= 2) {
      for (int r = 0; r < rows; ++r) finish_mixes<One>(call, raw + r, out + r);
    } else {
      finish_mixes<F32>(call, raw, out);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = out + r;
      for (int64_t m = 0; m < mixes; ++m) {
        float* to = m < copies       ? call.pre + (first + r) * copies + m
                    : m < 2 * copies ? call.post + (first + r) * copies + (m - copies)
                                     : call.comb + (first + r) * copies * copies + (m - 2 * copies);
        *to = from[m * kLanes];
      }
    }
  });
}

// ---- collapse and expand -------------------------------------------------------------------------

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
      const int n = lanes_left(i, call.width);
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
      const int n = lanes_left(i, call.width);
      const F32 weight = load_lanes(call.weight, call.weight_dtype, i, n);
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
      const int n = lanes_left(i, call.width);
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

int hc_mixes(const MixesCall& call) {
  call.dtype == kFloat32 ? mixes_rows<kFloat32>(call) : mixes_rows<kBfloat16>(call);
  return 0;
}

int hc_collapse(const CollapseCall& call) {
  call.dtype == kFloat32 ? collapse_rows<kFloat32>(call) : collapse_rows<kBfloat16>(call);
  return 0;
}

int hc_expand(const ExpandCall& call) {
  call.dtype == kFloat32 ? expand_rows<kFloat32>(call) : expand_rows<kBfloat16>(call);
  return 0;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
