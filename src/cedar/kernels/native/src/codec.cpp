// Packed cache rows (specification 5.2, 5.4, 5.5, 6.2) and activation rounding, bit exact.
#include "codec.h"

#include "cedar_native.h"
#include "quant.h"
#include "thread_pool.h"

namespace cedar {
namespace CEDAR_ISA {
namespace {

constexpr int kIndexGroup = 32, kMainGroup = 16;
constexpr float kSmallestMainAmax = 6.f / 512.f;  // keeps the E4M3 scale above zero
constexpr int64_t kValuesPerChunk = 32768;        // a few microseconds of work

int64_t rows_per_chunk(int64_t width) {
  return width >= kValuesPerChunk ? 1 : kValuesPerChunk / width;
}

// ---- one group ---------------------------------------------------------------------------------

void encode_window_group(const float* x, uint8_t* codes, uint8_t* scale) {
  *scale = act_scale(x);
  if (*scale == kNanScale) {
    std::memset(codes, kNanCode, kActGroup);
    return;
  }
  encode_e4m3<kActGroup>(x, pow2_inverse(*scale), codes);
}

void encode_index_group(const float* x, uint8_t* packed, uint8_t* scale) {
  constexpr float kSmallest = 6.f * 1.1754943508222875e-38f;  // 6 * 2^-126
  const float amax = highest_magnitude<kIndexGroup>(x);
  if (!is_finite(amax)) {
    *scale = kNanScale;
    std::memset(packed, 0, kIndexGroup / 2);
    return;
  }
  *scale = pow2_ceil((amax > kSmallest ? amax : kSmallest) * (1.f / 6.f));
  alignas(64) float scaled[kIndexGroup];
  for (int i = 0; i < kIndexGroup; i += kLanes) {
    store_vector(scaled + i, load_vector<Floats>(x + i) * pow2_inverse(*scale));
  }
  encode_e2m1<kIndexGroup>(scaled, packed);
}

void encode_main_group(const float* x, uint8_t* packed, uint8_t* scale) {
  const float amax = highest_magnitude<kMainGroup>(x);
  if (bits_of_float(amax) > static_cast<uint32_t>(kInfinity)) {  // NaN; infinity saturates
    *scale = kNanCode;
    std::memset(packed, 0, kMainGroup / 2);
    return;
  }
  *scale = encode_e4m3_one((amax > kSmallestMainAmax ? amax : kSmallestMainAmax) / 6.f);
  const float divisor = e4m3_to_float(*scale);
  alignas(64) float scaled[kMainGroup];
  for (int i = 0; i < kMainGroup; i += kLanes) {
    store_vector(scaled + i, load_vector<Floats>(x + i) / divisor);
  }
  encode_e2m1<kMainGroup>(scaled, packed);
}

// ---- one row -----------------------------------------------------------------------------------

void encode_row(const RowsCall& call, int64_t row, uint8_t* out) {
  const int64_t start = row * call.x_stride;
  alignas(64) float group[32];
  if (call.kind == kMainRow) {
    uint8_t* scales = out + call.width / 2;
    for (int64_t g = 0; g < call.width / kMainGroup; ++g) {
      load_values<kMainGroup>(call.x, call.dtype, start + g * kMainGroup, group);
      encode_main_group(group, out + g * kMainGroup / 2, scales + g);
    }
    return;
  }
  const bool window = call.kind == kWindowRow;
  const int64_t group_bytes = window ? kActGroup : kIndexGroup / 2;
  uint8_t* scales = out + call.width / 32 * group_bytes;
  for (int64_t g = 0; g < call.width / 32; ++g) {
    load_values<32>(call.x, call.dtype, start + g * 32, group);
    if (window) {
      encode_window_group(group, out + g * group_bytes, scales + g);
    } else {
      encode_index_group(group, out + g * group_bytes, scales + g);
    }
  }
}

void decode_row(const RowsCall& call, int64_t row, const uint8_t* in) {
  const int64_t start = row * call.x_stride;
  alignas(64) float group[32];
  if (call.kind == kWindowRow) {
    for (int64_t g = 0; g < call.width / kActGroup; ++g) {
      decode_e4m3<kActGroup>(in + g * kActGroup, e8m0_to_float(in[call.width + g]), group);
      store_exact<kActGroup>(group, call.x, call.dtype, start + g * kActGroup);
    }
    return;
  }
  const bool main = call.kind == kMainRow;
  const uint8_t* scales = in + call.width / 2;
  for (int64_t g = 0; g < call.width / 16; ++g) {
    const float scale = main ? e4m3_to_float(scales[g]) : e8m0_to_float(scales[g / 2]);
    decode_e2m1_16(in + g * 8, scale, group);
    store_exact<16>(group, call.x, call.dtype, start + g * 16);
  }
}

void fill_zero(const RowsCall& call, int64_t row) {
  const size_t size = call.dtype == kBfloat16 ? 2 : 4;
  std::memset(static_cast<char*>(call.x) + static_cast<size_t>(row * call.x_stride) * size, 0,
              static_cast<size_t>(call.width) * size);
}

template <class Row>
void for_rows(int64_t n, int64_t width, int threads, const Row& row) {
  const int64_t step = rows_per_chunk(width);
  parallel_for((n + step - 1) / step, threads, [&](int64_t chunk) {
    const int64_t end = (chunk + 1) * step < n ? (chunk + 1) * step : n;
    for (int64_t i = chunk * step; i < end; ++i) row(i);
  });
}

}  // namespace

int store_rows(const RowsCall& call) {
  for_rows(call.n, call.width, call.threads, [&](int64_t i) {
    const int64_t at = call.where == nullptr ? i : call.where[i];
    encode_row(call, i, call.rows + at * call.row_stride);
  });
  return 0;
}

int load_rows(const RowsCall& call) {
  for_rows(call.n, call.width, call.threads, [&](int64_t i) {
    const int64_t at = call.where == nullptr ? i : call.where[i];
    if (at < 0) {
      fill_zero(call, i);
    } else {
      decode_row(call, i, call.rows + at * call.row_stride);
    }
  });
  return 0;
}

int fake_quantise(const FakeQuantiseCall& call) {
  for_rows(call.n, call.width, call.threads, [&](int64_t i) {
    alignas(64) float group[kActGroup];
    for (int64_t k = 0; k < call.width; k += kActGroup) {
      load_values<kActGroup>(call.x, call.dtype, i * call.x_stride + k, group);
      round_act_group(group);
      store_exact<kActGroup>(group, call.out, call.out_dtype, i * call.out_stride + k);
    }
  });
  return 0;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
