// Arguments of index scoring, and return codes. The operator is explained in index_topk.cpp.
#pragma once

#include <cstdint>

namespace cedar {

struct IndexTopkCall {
  const uint8_t* queries;    // [N, heads, row bytes], packed index rows
  const float* weights;      // [N, heads]
  const uint8_t* keys;       // pool rows
  int64_t key_stride;        // bytes from one pool row to the next
  const int32_t* tables;     // [S, table_stride] block ids
  int64_t table_stride;
  int32_t rows_per_block;
  const int32_t* sequences;  // [N] row of `tables`
  const int32_t* visible;    // [N] keys that exist for the query
  int32_t count;             // N
  int32_t heads;
  int32_t dim;               // a multiple of 32
  int32_t topk;
  const int32_t* pool;       // [N, pool_capacity] ascending block ids, -1 padded, or null
  int32_t* pool_out;         // [N, pool_capacity] or null
  int32_t pool_capacity;
  int32_t pool_block;        // keys per candidate block
  int32_t* out;              // [N, topk]
  int32_t threads;
};

}  // namespace cedar
