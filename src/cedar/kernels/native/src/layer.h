// Arguments of the chains of a layer: weights and constants that stay, gathered once per layer.
// Mirrored field by field in `kernels/native/layer_weights.py`.
#pragma once

#include <cstdint>

#include "linear.h"
#include "moe.h"

namespace cedar {

// What predicts the mixes of one sublayer, see MixesCall.
struct HyperWeights {
  const float *fn, *base, *scale;
  int32_t iterations;
  float eps, norm_eps;
};

// Second half of a layer: from the attention output to the stream leaving the layer.
struct FeedForwardWeights {
  int64_t copies, width, inner, experts, chosen;
  HyperWeights attention, ffn;   // mixes of the sublayer before, and of this one
  const void* norm;              // [width], of this sublayer's input
  int32_t norm_dtype;
  int32_t gate_dtype;
  const void* gate;              // [experts, width]
  const float* bias;             // [experts]
  int32_t scoring, normalise;
  float route_scale, limit;
  int32_t kind;                  // of the routed experts
  ExpertWeights w1, w3, w2;
  Weight shared_w1, shared_w3, shared_w2;
};

// Projections of a layer's attention.
struct AttentionWeights {
  int64_t heads, groups;
  Weight wkv;                    // [dim, width]
  Weight wq_a;                   // [rank, width]
  Weight wq_b;                   // [heads * dim, rank]
  Weight wo_a;                   // [groups * inner, heads / groups * dim]
  Weight wo_b;                   // [width, groups * inner]
  const void* kv_norm;           // [dim]
  const void* q_norm;            // [rank]
  int32_t kv_norm_dtype, q_norm_dtype;
  float eps;
  const float* sink;             // [heads]
};

// What an index source searches with.
struct IndexWeights {
  int64_t heads, width;
  Weight wq_b;                   // [heads * width, rank]
  Weight head_weights;           // [heads, hidden width]
  float scale;                   // of the head weights
};

// A whole layer.
struct LayerWeights {
  const void* norm;              // [width], of the attention input
  int32_t norm_dtype;
  float eps;
  AttentionWeights attention;
  IndexWeights index;            // of an index source, else zeros
  FeedForwardWeights feed_forward;
};

// One token of each of n sequences: stored in the rings and attending there, see SparseAttentionCall.
struct RingCall {
  const void* x;                 // window rows [n, dim]
  const void* q;                 // [n, heads, dim]
  int32_t dtype, n;
  uint8_t* ring;
  int64_t ring_stride, ring_rows;
  const int64_t* where;          // [n] ring row of each token
  const int64_t* base;
  const int32_t *lo, *hi;
  int64_t modulus;
  const uint8_t* rows;
  int64_t row_stride;
  const int32_t* tables;
  int64_t table_stride;
  int32_t rows_per_block;
  const int32_t* sequences;
  const int32_t* selected;
  int32_t topk;
  float scale;
  const float* cos_sin;
  int64_t rope;
  void* y;                       // [n, width]
  int32_t threads;
};

// The search of an index source, see IndexTopkCall.
struct SearchCall {
  const void* latent;            // [n, rank]
  const void* x;                 // [n, width]
  int32_t dtype, n;
  const float* cos_sin;
  int64_t rope;
  int64_t row_bytes;             // of a packed query
  const uint8_t* keys;
  int64_t key_stride;
  const int32_t* tables;
  int64_t table_stride;
  int32_t rows_per_block;
  const int32_t* sequences;
  const int32_t* visible;
  int32_t topk;
  const int32_t* pool;
  int32_t* pool_out;
  int32_t pool_capacity, pool_block;
  int32_t* out;                  // [n, topk]
  int32_t threads;
};

}  // namespace cedar
