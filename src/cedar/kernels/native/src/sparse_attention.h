// Arguments of sparse attention. The operator is explained in sparse_attention.cpp.
#pragma once

#include <cstdint>

namespace cedar {

enum : int32_t { kFloat32 = 0, kBfloat16 = 1 };

struct SparseAttentionCall {
  const void* q;             // [N, heads, dim], float32 or bfloat16
  const void* q_selected;    // the same for the selected rows, or null: q
  int32_t dtype;             // kFloat32 or kBfloat16, of q, q_selected and the outputs
  const uint8_t* window;     // window rows
  int64_t window_stride;
  const int64_t* window_base;  // [N]
  const int32_t* window_lo;    // [N] first token position seen
  const int32_t* window_hi;    // [N] last one; lo > hi: none
  int64_t window_modulus;      // row of position p = base + p % modulus
  const uint8_t* rows;       // compressed rows
  int64_t row_stride;
  const int32_t* tables;     // [S, table_stride] block ids
  int64_t table_stride;
  int32_t rows_per_block;
  const int32_t* sequences;  // [N] row of `tables`
  const int32_t* selected;   // [N, topk] positions, -1 = unused, or null
  int32_t topk;
  const float* sink;         // [heads]
  float scale;
  int32_t count;             // N
  int32_t heads;
  int32_t dim;               // a multiple of 32
  void* out;                 // [N, heads, dim]
  void* out_selected;        // the same or null
  int32_t threads;
};

}  // namespace cedar
