// Exported entry points of the row-wise kernels and the mixture of experts: check what C cannot, then
// forward to the variant in use. Compiled once, for the baseline instruction set. Return 0 or a Status
// of exports.cpp.
#include "variants.h"

using namespace cedar::status;
using cedar::is_activation;

CEDAR_API int cedar_rms_norm(const void* x, int32_t dtype, int64_t n, int64_t width,
                             const void* weight, int32_t weight_dtype, float eps, void* out,
                             int32_t nthreads) {
  if (!is_activation(dtype) || !is_activation(weight_dtype)) return kBadKind;
  const cedar::NormCall call = {x, dtype, n, width, weight, weight_dtype, eps, out, nthreads};
  return cedar::run::rms_norm(call);
}

CEDAR_API int cedar_rotate(const void* x, int32_t dtype, int64_t n, int64_t per_row, int64_t width,
                           const float* cos_sin, int64_t rope, int32_t inverse, void* out,
                           int32_t nthreads) {
  if (!is_activation(dtype)) return kBadKind;
  if (rope > width || rope % 2 != 0) return kBadWidth;
  const cedar::RotateCall call = {x,    dtype,        n,   per_row, width, cos_sin,
                                  rope, inverse != 0, out, nthreads};
  return cedar::run::rotate(call);
}

CEDAR_API int cedar_hc_mixes(const void* stream, int32_t dtype, int64_t n, int64_t copies,
                             int64_t width, const float* fn, const float* base, const float* scale,
                             int32_t iterations, float eps, float norm_eps, float* pre, float* post,
                             float* comb, int32_t nthreads) {
  if (!is_activation(dtype)) return kBadKind;
  if (copies < 1 || copies > 8) return kBadWidth;
  const cedar::MixesCall call = {stream,     dtype, n,        copies, width, fn,   base,    scale,
                                 iterations, eps,   norm_eps, pre,    post,  comb, nthreads};
  return cedar::run::hc_mixes(call);
}

CEDAR_API int cedar_hc_collapse(const void* stream, int32_t dtype, int64_t n, int64_t copies,
                                int64_t width, const float* pre, const void* weight,
                                int32_t weight_dtype, float eps, void* out, int32_t nthreads) {
  if (!is_activation(dtype) || !is_activation(weight_dtype)) return kBadKind;
  const cedar::CollapseCall call = {stream, dtype,        n,   copies, width,   pre,
                                    weight, weight_dtype, eps, out,    nthreads};
  return cedar::run::hc_collapse(call);
}

CEDAR_API int cedar_hc_expand(const void* y, const void* stream, int32_t dtype, int64_t n,
                              int64_t copies, int64_t width, const float* post, const float* comb,
                              void* out, int32_t nthreads) {
  if (!is_activation(dtype)) return kBadKind;
  if (copies < 1 || copies > 8) return kBadWidth;
  const cedar::ExpandCall call = {y, stream, dtype, n, copies, width, post, comb, out, nthreads};
  return cedar::run::hc_expand(call);
}

CEDAR_API int cedar_pool_groups(const float* kv, const float* gate, int64_t groups, int64_t ratio,
                                int64_t width, float* out, int32_t nthreads) {
  const cedar::PoolCall call = {kv, gate, groups, ratio, width, out, nthreads};
  return cedar::run::pool_groups(call);
}

CEDAR_API int cedar_moe(const void* x, int32_t dtype, int64_t n, int64_t width, int64_t inner,
                        int64_t experts, int64_t chosen, const int64_t* ids, const float* weights,
                        int32_t kind, const void* const* w1, const uint8_t* const* s1,
                        const void* const* w3, const uint8_t* const* s3, const void* const* w2,
                        const uint8_t* const* s2, int32_t shared_kind, const void* const* shared,
                        const uint8_t* const* shared_scales, float limit, void* out,
                        int32_t nthreads) {
  if (!is_activation(dtype) || kind < 0 || kind > 3 || shared_kind < 0 || shared_kind > 3) {
    return kBadKind;
  }
  if ((kind > 1 || shared_kind > 1) && (width % 32 != 0 || inner % 32 != 0)) return kBadWidth;
  for (int64_t s = 0; s < n * chosen; ++s) {
    if (ids[s] < 0 || ids[s] >= experts) return kOutOfRange;
  }
  const cedar::MoeCall call = {
      x, dtype, n, width, inner, experts, chosen, ids, weights, kind,
      {w1, s1}, {w3, s3}, {w2, s2}, shared_kind,
      {shared_kind, shared[0], shared_scales[0], inner, width},
      {shared_kind, shared[1], shared_scales[1], inner, width},
      {shared_kind, shared[2], shared_scales[2], width, inner},
      limit, out, nthreads};
  return cedar::run::moe(call);
}

CEDAR_API int cedar_route(const void* x, int32_t dtype, int64_t n, int64_t width, const void* gate,
                          int32_t gate_dtype, const float* bias, int64_t bias_stride,
                          int64_t experts, int64_t chosen, int32_t scoring, int32_t normalise,
                          float scale, int64_t* ids, float* weights, int32_t nthreads) {
  if (!is_activation(dtype) || !is_activation(gate_dtype) || scoring < 0 || scoring > 2) {
    return kBadKind;
  }
  if (chosen < 1 || chosen > experts) return kOutOfRange;
  const cedar::RouteCall call = {x,           dtype,   n,      width,   gate,           gate_dtype,
                                 bias,        bias_stride, experts, chosen, scoring, normalise != 0,
                                 scale,       ids,     weights, nthreads};
  return cedar::run::route(call);
}

CEDAR_API int cedar_project(const void* x, int32_t dtype, int64_t n, int64_t in, const void* values,
                            const uint8_t* scales, int32_t kind, int64_t out, int32_t quantise,
                            const void* norm_weight, int32_t norm_dtype, float eps,
                            const float* cos_sin, int64_t rope, int64_t per_row, void* y,
                            int32_t nthreads) {
  if (!is_activation(dtype) || !is_activation(norm_dtype) || kind < 0 || kind > 3) return kBadKind;
  if ((kind > 1 && in % 32 != 0) || per_row < 1 || out % per_row != 0 || rope > out / per_row) {
    return kBadWidth;
  }
  if (n == 0) return 0;
  const cedar::ProjectCall call = {
      {x, dtype, in, n, {kind, values, scales, out, in}, quantise != 0, y, dtype, out, nthreads},
      norm_weight, norm_dtype, eps, cos_sin, rope, per_row};
  return cedar::run::project(call);
}

CEDAR_API int cedar_project_output(const void* o, int32_t dtype, int64_t n, int64_t heads,
                                   int64_t dim, const float* cos_sin, int64_t rope, int64_t groups,
                                   const void* grouped, const uint8_t* grouped_scales,
                                   int32_t grouped_kind, int64_t inner, const void* last,
                                   const uint8_t* last_scales, int32_t last_kind, int64_t width,
                                   void* y, int32_t nthreads) {
  if (!is_activation(dtype)) return kBadKind;
  // A block of fp8 rows must start on a whole scale tile.
  if (inner % groups != 0 || (grouped_kind == 2 && inner / groups % 32 != 0)) return kBadWidth;
  const int64_t in = heads / groups * dim;
  const cedar::OutputCall call = {o, dtype, n, heads, dim, cos_sin, rope, groups,
                                  {grouped_kind, grouped, grouped_scales, inner, in},
                                  {last_kind, last, last_scales, width, inner}, y, nthreads};
  return cedar::run::project_output(call);
}
