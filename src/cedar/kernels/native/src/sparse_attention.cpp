// Attention of each query over its window and its selected rows, one KV head, a sink per head.
//
//     z_e = <q_h, v_e> * scale      den = sum_e exp(z_e - m) + exp(sink_h - m)
//     o_h = sum_e exp(z_e - m) v_e / den
//
// over the window rows, then the selected rows; keys are the values. The sink is in the denominator only;
// a query without entries gives zeros. A query's result depends on its own entries and their order,
// never on the queries next to it or on threads.
//
// Consecutive queries whose windows overlap form a tile: their window rows are unpacked once.
#include "sparse_attention.h"

#include <algorithm>
#include <initializer_list>

#include "attention_floats.h"
#include "attention_rows.h"
#include "thread_pool.h"
#if defined(CEDAR_AVX512) && defined(__AVX512BF16__)
#include "attention_pairs.h"
#define CEDAR_PAIRS 1
#endif

namespace cedar {
namespace CEDAR_ISA {
namespace {

constexpr int kTileQueries = 16;
constexpr int kTileSlot = 0;

// The longest tile that starts at query `first`.
WindowTile next_tile(const SparseAttentionCall& call, int first, int most) {
  WindowTile tile{first, 0, 0, 0};
  int64_t end = 0;  // one past the highest position seen; lo == end while nothing is
  for (int n = first; n < call.count && tile.count < most; ++n, ++tile.count) {
    if (call.window_base[n] != call.window_base[first]) break;
    const int64_t lo = call.window_lo[n], after = static_cast<int64_t>(call.window_hi[n]) + 1;
    if (lo >= after) continue;
    if (tile.lo == end) {
      tile.lo = lo;
      end = after;
      continue;
    }
    // No gap, and nothing a ring would hold twice.
    const int64_t new_lo = std::min(tile.lo, lo), new_end = std::max(end, after);
    if (lo > end || after < tile.lo || new_end - new_lo > call.window_modulus) break;
    // Rows far from each other are not shared: two windows' worth is enough.
    if (new_end - new_lo > 2 * (after - lo) + most) break;
    tile.lo = new_lo;
    end = new_end;
  }
  tile.rows = static_cast<int>(end - tile.lo);
  return tile;
}

void run_tile(const SparseAttentionCall& call, const WindowTile& tile) {
#ifdef CEDAR_PAIRS
  if (call.dtype == kBfloat16) {
    for (int h = 0; h < call.heads; h += kTileHeads) {
      PairAttention(call, h, std::min(call.heads - h, kTileHeads)).run(tile);
    }
    return;
  }
#endif
  FloatAttention(call).run(tile);
}

bool valid(const SparseAttentionCall& call) {
  return call.count >= 0 && call.heads >= 1 && call.dim >= kWindowGroup &&
         call.dim % kWindowGroup == 0 && call.heads <= kMostHeads && call.topk >= 0 && call.window_modulus >= 1 &&
         (call.dtype == kFloat32 || call.dtype == kBfloat16) &&
         (call.selected == nullptr || call.rows_per_block >= 1);
}

}  // namespace

int sparse_attention(const SparseAttentionCall& call) {
  if (!valid(call)) return -1;
  if (call.count == 0) return 0;
  const int threads = std::max(call.threads, 1);
  const int most = std::clamp((call.count + 2 * threads - 1) / (2 * threads), 1, kTileQueries);
  WindowTile* tiles = scratch_array<WindowTile>(kTileSlot, static_cast<size_t>(call.count));
  int64_t count = 0;
  for (int first = 0; first < call.count; first += tiles[count++].count) {
    tiles[count] = next_tile(call, first, most);
  }
  parallel_for(count, threads, [&](int64_t i) { run_tile(call, tiles[i]); });
  return 0;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
