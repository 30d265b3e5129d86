// Exported entry points of the chains of a layer (`composed.py`): one call for what a layer always runs
// together. Each part is the kernel that a call of its own would run, on the same values, so the bits are
// the same. What lies between the parts stays in scratch memory of the calling thread. Compiled once.
#include "bfloat16.h"
#include "layer.h"
#include "thread_pool.h"
#include "variants.h"

using namespace cedar::status;

namespace cedar {
namespace {

// Scratch slots from here on belong to chains; kernels use those below.
constexpr int kMixesSlot = 16, kRoutingSlot = 17, kInputSlot = 18, kOutputSlot = 19, kPackedSlot = 20,
              kLayerSlot = 21;

char* activations(int slot, int64_t count, int32_t dtype) {
  return static_cast<char*>(scratch(slot, static_cast<size_t>(count * (dtype == 0 ? 4 : 2))));
}

bool is_weight(const Weight& weight) { return weight.kind >= 0 && weight.kind <= 3; }

bool is_packed(int32_t kind) { return kind == kFp8Weight || kind == kFp4Weight; }

// What `linear` cannot see for itself.
int check(const Weight& weight) {
  if (!is_weight(weight)) return kBadKind;
  return is_packed(weight.kind) && weight.in % 32 != 0 ? kBadWidth : 0;
}

int check(const FeedForwardWeights& w, int32_t dtype) {
  if (!is_activation(dtype) || !is_activation(w.norm_dtype) || !is_activation(w.gate_dtype) ||
      w.scoring < 0 || w.scoring > 2 || w.kind < 0 || w.kind > 3 || !is_weight(w.shared_w1)) {
    return kBadKind;
  }
  const bool packed = is_packed(w.kind) || is_packed(w.shared_w1.kind);
  if (packed && (w.width % 32 != 0 || w.inner % 32 != 0)) return kBadWidth;
  if (w.copies < 1 || w.copies > 8) return kBadWidth;
  return w.chosen < 1 || w.chosen > w.experts ? kOutOfRange : 0;
}

MixesCall mixes_of(const HyperWeights& weights, const void* stream, int32_t dtype, int64_t n,
                   int64_t copies, int64_t width, float* pre, float* post, float* comb,
                   int32_t threads) {
  return {stream,        dtype,           n,           copies,           width,
          weights.fn,    weights.base,    weights.scale, weights.iterations, weights.eps,
          weights.norm_eps, pre,          post,        comb,             threads};
}

// y = x W^T, packed weights on rounded input.
LinearCall product(const void* x, int32_t dtype, int64_t n, const Weight& weight, void* y,
                   int32_t threads) {
  return {x,     dtype,      weight.in, n, weight, is_packed(weight.kind), y, dtype,
          weight.out, threads};
}

int check_projection(const Weight& weight, int32_t norm_dtype, int64_t vectors, int64_t rope) {
  if (!is_activation(norm_dtype)) return kBadKind;
  if (vectors < 1 || weight.out % vectors != 0 || rope > weight.out / vectors) return kBadWidth;
  return check(weight);
}

// What storing as bfloat16 and loading again gives, with the one NaN that torch stores.
float as_bfloat16(float x) { return x != x ? float_of_bits(0x7fc00000u) : bf16_to_float(float_to_bf16(x)); }

// Scales products of type `dtype` in that type; float32 out.
void scale_products(const char* products, int32_t dtype, int64_t count, float scale, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    if (dtype == kFloat32) {
      out[i] = reinterpret_cast<const float*>(products)[i] * scale;
      continue;
    }
    out[i] = as_bfloat16(bf16_to_float(reinterpret_cast<const uint16_t*>(products)[i]) * scale);
  }
}

// `y [n, width]` and `stream [n, copies, width]` to the next stream and its pre mix `[n, copies]`.
int feed_forward(const FeedForwardWeights& w, const void* y, const void* stream, int32_t dtype,
                 int64_t n, void* next_stream, float* next_pre, int32_t threads) {
  if (const int bad = check(w, dtype)) return bad;
  const int64_t copies = w.copies, width = w.width;
  float* pre = scratch_array<float>(kMixesSlot, static_cast<size_t>(n * copies * (2 + copies)));
  float *post = pre + n * copies, *comb = post + n * copies;
  int64_t* ids = scratch_array<int64_t>(kRoutingSlot, static_cast<size_t>(2 * n * w.chosen));
  float* shares = reinterpret_cast<float*>(ids + n * w.chosen);
  char* x = activations(kInputSlot, n * width, dtype);
  char* out = activations(kOutputSlot, n * width, dtype);

  run::hc_mixes(mixes_of(w.attention, stream, dtype, n, copies, width, pre, post, comb, threads));
  run::hc_expand({y, stream, dtype, n, copies, width, post, comb, next_stream, threads});
  run::hc_collapse({next_stream, dtype, n, copies, width, pre, w.norm, w.norm_dtype,
                    w.ffn.norm_eps, x, threads});
  run::hc_mixes(
      mixes_of(w.ffn, next_stream, dtype, n, copies, width, next_pre, post, comb, threads));
  run::route({x, dtype, n, width, w.gate, w.gate_dtype, w.bias, 0, w.experts, w.chosen, w.scoring,
              w.normalise != 0, w.route_scale, ids, shares, threads});
  if (const int bad = run::moe({x, dtype, n, width, w.inner, w.experts, w.chosen, ids, shares, w.kind,
                                w.w1, w.w3, w.w2, w.shared_w1.kind, w.shared_w1, w.shared_w3,
                                w.shared_w2, w.limit, out, threads})) {
    return bad;
  }
  return run::hc_expand(
      {out, next_stream, dtype, n, copies, width, post, comb, next_stream, threads});
}

// Window rows `[n, dim]` of `x`, and its query rows: latent `[n, rank]`, heads `[n, heads * dim]`. Either
// is left out where its address is null.
int project_attention(const AttentionWeights& w, const void* x, int32_t dtype, int64_t n,
                      const float* cos_sin, int64_t rope, void* window, void* latent, void* q,
                      int32_t threads) {
  if (!is_activation(dtype)) return kBadKind;
  if (const int bad = check_projection(w.wkv, w.kv_norm_dtype, 1, rope)) return bad;
  if (const int bad = check_projection(w.wq_a, w.q_norm_dtype, 1, 0)) return bad;
  if (const int bad = check_projection(w.wq_b, 0, w.heads, rope)) return bad;
  if (n == 0) return 0;
  int status = 0;
  if (window != nullptr) {
    status = run::project({product(x, dtype, n, w.wkv, window, threads), w.kv_norm, w.kv_norm_dtype,
                           w.eps, cos_sin, rope, 1});
  }
  if (q == nullptr || status != 0) return status;
  status = run::project({product(x, dtype, n, w.wq_a, latent, threads), w.q_norm, w.q_norm_dtype,
                         w.eps, nullptr, 0, 1});
  if (status != 0) return status;
  return run::project(
      {product(latent, dtype, n, w.wq_b, q, threads), nullptr, 0, 0.f, cos_sin, rope, w.heads});
}

int attend_ring(const AttentionWeights& w, const RingCall& call) {
  const int64_t dim = w.wkv.out, n = call.n;
  if (!is_activation(call.dtype)) return kBadKind;
  if (const int bad = check(w.wo_a)) return bad;
  if (const int bad = check(w.wo_b)) return bad;
  if (w.wo_a.out % w.groups != 0 || dim % 32 != 0) return kBadWidth;
  // A block of fp8 rows must start on a whole scale tile.
  if (w.wo_a.kind == kFp8Weight && w.wo_a.out / w.groups % 32 != 0) return kBadWidth;
  for (int64_t i = 0; i < n; ++i) {
    if (call.where[i] < 0 || call.where[i] >= call.ring_rows) return kOutOfRange;
  }
  run::store_rows({const_cast<void*>(call.x), call.dtype, dim, n, kWindowRow, dim, call.ring,
                   call.ring_stride, call.where, call.threads});
  char* o = activations(kInputSlot, n * w.heads * dim, call.dtype);
  const SparseAttentionCall attend = {
      call.q, nullptr, call.dtype, call.ring, call.ring_stride, call.base, call.lo, call.hi,
      call.modulus, call.rows, call.row_stride, call.tables, call.table_stride, call.rows_per_block,
      call.sequences, call.selected, call.topk, w.sink, call.scale, call.n,
      static_cast<int32_t>(w.heads), static_cast<int32_t>(dim), o, nullptr, call.threads};
  if (const int bad = run::sparse_attention(attend)) return bad;
  return run::project_output({o, call.dtype, n, w.heads, dim, call.cos_sin, call.rope, w.groups,
                              w.wo_a, w.wo_b, call.y, call.threads});
}

int select_rows(const IndexWeights& w, const SearchCall& call) {
  if (!is_activation(call.dtype)) return kBadKind;
  if (const int bad = check_projection(w.wq_b, 0, w.heads, call.rope)) return bad;
  if (const int bad = check(w.head_weights)) return bad;
  if (w.width % 32 != 0) return kBadWidth;
  if (call.n == 0) return 0;
  const int32_t dtype = call.dtype, threads = call.threads;
  const int64_t vectors = call.n * w.heads;
  char* queries = activations(kInputSlot, vectors * w.width, dtype);
  char* products = activations(kOutputSlot, vectors, dtype);
  float* head_weights = scratch_array<float>(kMixesSlot, static_cast<size_t>(vectors));
  uint8_t* packed = scratch_array<uint8_t>(kPackedSlot, static_cast<size_t>(vectors * call.row_bytes));
  if (const int bad =
          run::project({product(call.latent, dtype, call.n, w.wq_b, queries, threads), nullptr, 0,
                        0.f, call.cos_sin, call.rope, w.heads})) {
    return bad;
  }
  run::store_rows({queries, dtype, w.width, vectors, kIndexRow, w.width, packed, call.row_bytes,
                   nullptr, threads});
  if (const int bad =
          run::linear(product(call.x, dtype, call.n, w.head_weights, products, threads))) {
    return bad;
  }
  scale_products(products, dtype, vectors, w.scale, head_weights);
  return run::index_topk({packed, head_weights, call.keys, call.key_stride, call.tables,
                          call.table_stride, call.rows_per_block, call.sequences, call.visible,
                          call.n, static_cast<int32_t>(w.heads), static_cast<int32_t>(w.width),
                          call.topk, call.pool, call.pool_out, call.pool_capacity, call.pool_block,
                          call.out, threads});
}

}  // namespace
}  // namespace cedar

CEDAR_API int cedar_feed_forward(const cedar::FeedForwardWeights* weights, const void* y,
                                 const void* stream, int32_t dtype, int64_t n, void* next_stream,
                                 float* next_pre, int32_t nthreads) {
  return cedar::feed_forward(*weights, y, stream, dtype, n, next_stream, next_pre, nthreads);
}

CEDAR_API int cedar_project_attention(const cedar::AttentionWeights* weights, const void* x,
                                      int32_t dtype, int64_t n, const float* cos_sin, int64_t rope,
                                      void* window, void* latent, void* q, int32_t nthreads) {
  return cedar::project_attention(*weights, x, dtype, n, cos_sin, rope, window, latent, q, nthreads);
}

CEDAR_API int cedar_attend_ring(const cedar::AttentionWeights* weights, const void* x, const void* q,
                                int32_t dtype, int32_t n, uint8_t* ring, int64_t ring_stride,
                                int64_t ring_rows, const int64_t* where, const int64_t* base,
                                const int32_t* lo, const int32_t* hi, int64_t modulus,
                                const uint8_t* rows, int64_t row_stride, const int32_t* tables,
                                int64_t table_stride, int32_t rows_per_block,
                                const int32_t* sequences, const int32_t* selected, int32_t topk,
                                float scale, const float* cos_sin, int64_t rope, void* y,
                                int32_t nthreads) {
  return cedar::attend_ring(
      *weights, {x, q, dtype, n, ring, ring_stride, ring_rows, where, base, lo, hi, modulus, rows,
                 row_stride, tables, table_stride, rows_per_block, sequences, selected, topk, scale,
                 cos_sin, rope, y, nthreads});
}

CEDAR_API int cedar_select_rows(const cedar::IndexWeights* weights, const void* latent, const void* x,
                                int32_t dtype, int32_t n, const float* cos_sin, int64_t rope,
                                int64_t row_bytes, const uint8_t* keys, int64_t key_stride,
                                const int32_t* tables, int64_t table_stride, int32_t rows_per_block,
                                const int32_t* sequences, const int32_t* visible, int32_t topk,
                                const int32_t* pool, int32_t* pool_out, int32_t pool_capacity,
                                int32_t pool_block, int32_t* out, int32_t nthreads) {
  return cedar::select_rows(
      *weights, {latent, x, dtype, n, cos_sin, rope, row_bytes, keys, key_stride, tables,
                 table_stride, rows_per_block, sequences, visible, topk, pool, pool_out,
                 pool_capacity, pool_block, out, nthreads});
}

// All of a layer for one token of each of n sequences. `found`: where its selection goes, `[n, wanted]`,
// if it is an index source; then it attends to what it found and not to `selected`.
CEDAR_API int cedar_layer_step(
    const cedar::LayerWeights* weights, const void* stream, const float* pre, int32_t dtype,
    int32_t n, const float* cos_sin, int64_t rope, uint8_t* ring, int64_t ring_stride,
    int64_t ring_rows, const int64_t* where, const int64_t* base, const int32_t* lo,
    const int32_t* hi, int64_t modulus, const uint8_t* rows, int64_t row_stride,
    const int32_t* tables, int64_t table_stride, int32_t rows_per_block, const int32_t* sequences,
    const int32_t* selected, int32_t topk, float scale, int64_t row_bytes, const uint8_t* keys,
    int64_t key_stride, const int32_t* key_tables, int64_t key_table_stride, int32_t keys_per_block,
    const int32_t* key_sequences, const int32_t* visible, int32_t wanted, const int32_t* pool,
    int32_t* pool_out, int32_t pool_capacity, int32_t pool_block, int32_t* found, void* next_stream,
    float* next_pre, int32_t nthreads) {
  using namespace cedar;
  const AttentionWeights& w = weights->attention;
  const int64_t copies = weights->feed_forward.copies, width = weights->feed_forward.width;
  const int64_t dim = w.wkv.out, rank = w.wq_a.out, bytes = dtype == 0 ? 4 : 2;
  if (!is_activation(dtype) || !is_activation(weights->norm_dtype)) return kBadKind;
  if (copies < 1 || copies > 8) return kBadWidth;
  char* x = activations(kLayerSlot, n * (2 * width + dim + rank + w.heads * dim), dtype);
  char* y = x + n * width * bytes;
  char* window = y + n * width * bytes;
  char* latent = window + n * dim * bytes;
  char* q = latent + n * rank * bytes;

  run::hc_collapse({stream, dtype, n, copies, width, pre, weights->norm, weights->norm_dtype,
                    weights->eps, x, nthreads});
  if (const int bad = project_attention(w, x, dtype, n, cos_sin, rope, window, latent, q, nthreads)) {
    return bad;
  }
  if (found != nullptr) {
    const SearchCall search = {latent, x, dtype, n, cos_sin, rope, row_bytes, keys, key_stride,
                               key_tables, key_table_stride, keys_per_block, key_sequences, visible,
                               wanted, pool, pool_out, pool_capacity, pool_block, found, nthreads};
    if (const int bad = select_rows(weights->index, search)) return bad;
    selected = found;
    topk = wanted;
  }
  const RingCall attend = {window, q, dtype, n, ring, ring_stride, ring_rows, where, base, lo, hi,
                           modulus, rows, row_stride, tables, table_stride, rows_per_block,
                           sequences, selected, topk, scale, cos_sin, rope, y, nthreads};
  if (const int bad = attend_ring(w, attend)) return bad;
  return feed_forward(weights->feed_forward, y, stream, dtype, n, next_stream, next_pre, nthreads);
}

// Two float32 products `[n, out]` of float32 copies of `x [n, in]`, with plain weights.
CEDAR_API int cedar_project_groups(const void* x, int32_t dtype, int64_t n, int64_t in, int64_t out,
                                   const void* kv_weight, const void* gate_weight, int32_t kind,
                                   float* kv, float* gate, int32_t nthreads) {
  using namespace cedar;
  if (!is_activation(dtype) || !is_activation(kind)) return kBadKind;
  const void* wide = x;
  if (dtype != kFloat32) {
    float* copies = reinterpret_cast<float*>(activations(kInputSlot, n * in, kFloat32));
    for (int64_t i = 0; i < n * in; ++i) copies[i] = bf16_to_float(static_cast<const uint16_t*>(x)[i]);
    wide = copies;
  }
  const Weight weights[2] = {{kind, kv_weight, nullptr, out, in}, {kind, gate_weight, nullptr, out, in}};
  float* const results[2] = {kv, gate};
  for (int i = 0; i < 2; ++i) {
    if (const int bad = run::linear(product(wide, kFloat32, n, weights[i], results[i], nthreads))) {
      return bad;
    }
  }
  return 0;
}
