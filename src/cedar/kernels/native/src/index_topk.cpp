// Index scoring with a streaming top-k, and the candidate pool.
//
//     score_j = sum over heads h, ascending, of fl(g_h * max(fl(<q_h, k_j>), 0)),    j < visible
//
// in float32, products rounded before they are added, dot products exact (index_strip.h says when
// and how). The k best positions come out ascending, ties go to the lowest position. Queries x keys is
// never stored: tiles of keys are unpacked once for a tile of queries, scored into a small buffer
// and offered to one running selection per query (topk_buffer.h). Neither tiles nor threads can
// change a bit: every score depends on one query and one key only, and a selection on its scores.
//
// Work is a list of (query tile, range of keys). Long ranges are split when there are too few query
// tiles to occupy the threads; the parts' selections are then merged in order.
#include "index_topk.h"

#include <algorithm>
#include <climits>

#include "index_strip.h"
#include "thread_pool.h"
#include "topk_buffer.h"
#ifdef __AMX_INT8__
#include "index_tiles.h"
#endif

namespace cedar {
namespace CEDAR_ISA {
namespace {

constexpr int kTileKeys = 256;
constexpr int kTileStrips = kTileKeys / kStrip;
constexpr int kMostQueries = 64;      // per tile of queries
constexpr int64_t kShortestPart = 2048;  // keys
constexpr int kPrefetch = 4;           // strips ahead
constexpr int kUnused = -1;

enum Slot {
  kItemsSlot, kPartsSlot, kStripSlot, kValuesSlot, kQuerySlot, kScoresSlot, kBufferSlot, kWorkSlot,
  kListSlot
};

// Queries [first, first + count), all of one sequence; keys [from, to) of their key list.
struct Item {
  int32_t first, count;
  int64_t from, to;
  int32_t part, parts;
  int64_t saved;  // first saved selection of the tile, if parts > 1
};

// Selections of one part, for merging.
struct Saved {
  int32_t size, pool_size;
};

struct Plan {
  const IndexTopkCall& call;
  int groups;
  int block_shift;  // log2(rows_per_block), or -1
  Item* items;
  int64_t item_count;
  Saved* saved;     // [saved selections]
  float* saved_scores;     // [saved selections][topk + pool]
  int32_t* saved_positions;

  int pool_k() const { return call.pool_out != nullptr ? call.pool_capacity : 0; }
  int64_t saved_stride() const { return call.topk + pool_k(); }

  const uint8_t* row(const int32_t* table, int32_t position) const {
    const int32_t rows = call.rows_per_block;
    int64_t block, offset;
    if (block_shift >= 0) {
      block = position >> block_shift;
      offset = position & (rows - 1);
    } else {
      block = position / rows;
      offset = position % rows;
    }
    return call.keys + (static_cast<int64_t>(table[block]) * rows + offset) * call.key_stride;
  }
};

// Up to kTileKeys unpacked keys.
struct KeyTile {
  Strip* strips;
  int32_t positions[kTileKeys];  // INT32_MAX behind the last
  int count;                     // keys
  int strip_count;
  bool all_plain;

  void load(const Plan& plan, const int32_t* table) {
    strip_count = (count + kStrip - 1) / kStrip;
    const int valid = count;
    for (int i = valid; i < strip_count * kStrip; ++i) positions[i] = INT32_MAX;
    all_plain = true;
    const uint8_t* rows[kTileKeys];
    for (int s = 0; s < strip_count; ++s) find_rows(plan, table, s * kStrip, rows + s * kStrip);
    for (int s = 0; s < strip_count; ++s) {
      const int ahead = std::min(s + kPrefetch, strip_count - 1) * kStrip;
      for (int i = 0; i < kStrip; ++i) __builtin_prefetch(rows[ahead + i]);
      load_strip(rows + s * kStrip, plan.groups, strips[s]);
      all_plain &= strips[s].plain;
    }
  }

  // Row addresses of one strip. Lanes behind the last key repeat it: no row is read that no query
  // sees.
  void find_rows(const Plan& plan, const int32_t* table, int from, const uint8_t** rows) const {
    const int32_t first = positions[from], last = positions[from + kStrip - 1];
    if (last == first + kStrip - 1 &&
        first % plan.call.rows_per_block + kStrip <= plan.call.rows_per_block) {
      const uint8_t* row = plan.row(table, first);
      for (int i = 0; i < kStrip; ++i) rows[i] = row + i * plan.call.key_stride;
      return;
    }
    for (int i = 0; i < kStrip; ++i) {
      rows[i] = plan.row(table, positions[std::min(from + i, count - 1)]);
    }
  }
};

// Best score of each block of consecutive positions, offered to the pool selection of one query.
struct PoolBlocks {
  TopK selection;
  int32_t open = kUnused;  // block being scored
  float best = -kInfinity;
  int32_t newest;          // always kept
  int32_t size;

  void flush() {
    if (open == kUnused) return;
    selection.offer(open == newest ? kInfinity : best, open);
    open = kUnused;
  }

  // Scores of consecutive positions from `first`.
  void add(const float* scores, int32_t first, int count) {
    for (int i = 0; i < count;) {
      const int32_t block = (first + i) / size;
      const int end = static_cast<int>(std::min<int64_t>(
          count, static_cast<int64_t>(block + 1) * size - first));
      float highest = scores[i];
      for (++i; i < end; ++i) highest = scores[i] > highest ? scores[i] : highest;
      if (block != open) {
        flush();
        open = block;
        best = highest;
      } else {
        best = highest > best ? highest : best;
      }
    }
  }
};

// One query of the tile being worked on.
struct State {
  Query query;
  TopK selection;
  PoolBlocks pool;
  int32_t visible;
};

// Blocks of a candidate list that hold visible positions: returns how many, and copies them.
int64_t usable_blocks(const IndexTopkCall& call, int32_t query, int32_t* blocks) {
  const int32_t* list = call.pool + static_cast<int64_t>(query) * call.pool_capacity;
  int64_t count = 0;
  for (int32_t i = 0; i < call.pool_capacity; ++i) {
    const bool seen = list[i] >= 0 &&
                      static_cast<int64_t>(list[i]) * call.pool_block < call.visible[query];
    if (!seen) continue;
    if (blocks != nullptr) blocks[count] = list[i];
    ++count;
  }
  return count;
}

class Worker {
 public:
  Worker(const Plan& plan, const Item& item) : plan_(plan), call_(plan.call), item_(item) {
    prepare_queries();
    prepare_tile();
  }

  void run() {
    const int32_t* table =
        call_.tables + call_.sequences[item_.first] * call_.table_stride;
    int32_t* blocks = nullptr;
    if (call_.pool != nullptr) {
      blocks = scratch_array<int32_t>(kListSlot, static_cast<size_t>(call_.pool_capacity) + 1);
      usable_blocks(call_, item_.first, blocks);
    }
    for (int64_t at = item_.from; at < item_.to; at += kTileKeys) {
      const int64_t end = std::min<int64_t>(at + kTileKeys, item_.to);
      if (blocks != nullptr) {
        list_candidates(blocks, at, end);
      } else {
        tile_.count = static_cast<int>(end - at);
        for (int i = 0; i < tile_.count; ++i) tile_.positions[i] = static_cast<int32_t>(at) + i;
      }
      if (tile_.count == 0) continue;
      tile_.load(plan_, table);
      score_tile();
    }
    finish();
  }

 private:
  void prepare_queries() {
    const int heads = call_.heads, padded = padded_dim(plan_.groups);
    // Tile products read whole groups of queries: room for one more group.
    const size_t rows = static_cast<size_t>(item_.count + 16) * static_cast<size_t>(heads);
    Element* values = scratch_array<Element>(kValuesSlot, rows * static_cast<size_t>(padded));
    const size_t state_bytes = sizeof(State) * static_cast<size_t>(item_.count);
    char* memory = static_cast<char*>(
        scratch(kQuerySlot, state_bytes + rows * (sizeof(float) + kMaxGroups)));
    states_ = reinterpret_cast<State*>(memory);
    float* plain_weights = reinterpret_cast<float*>(memory + state_bytes);
    uint8_t* units = reinterpret_cast<uint8_t*>(plain_weights + rows);
    const int64_t row_bytes = plan_.groups * (kGroup / 2 + 1);

    const int64_t range = item_.to - item_.from;
    const int pool_k = plan_.pool_k();
    const int limit = limit_for(call_.topk, range);
    const int pool_limit = pool_k > 0 ? limit_for(pool_k, range / call_.pool_block + 1) : 0;
    const size_t room = TopK::room(limit) + (pool_k > 0 ? TopK::room(pool_limit) : 0);
    int32_t* buffers = scratch_array<int32_t>(
        kBufferSlot, 2 * room * static_cast<size_t>(item_.count));
    float* work =
        scratch_array<float>(kWorkSlot, TopK::work_size(std::max(limit, pool_limit)));

    for (int i = 0; i < item_.count; ++i) {
      const int64_t n = item_.first + i;
      State& state = states_[i];
      state.query.values = values + static_cast<int64_t>(i) * heads * padded;
      state.query.plain_weights = plain_weights + static_cast<int64_t>(i) * heads;
      state.query.units = units + static_cast<int64_t>(i) * heads * kMaxGroups;
      load_query(call_.queries + n * heads * row_bytes, call_.weights + n * heads, heads,
                 plan_.groups, state.query);
      if (!on_tiles()) add_offset(state.query, heads, plan_.groups);
      state.visible = call_.visible[n];
      int32_t* mine = buffers + 2 * room * static_cast<size_t>(i);
      state.selection.reset(reinterpret_cast<float*>(mine), mine + TopK::room(limit), work,
                            call_.topk, limit);
      if (pool_k > 0) {
        mine += 2 * TopK::room(limit);
        state.pool.selection.reset(reinterpret_cast<float*>(mine), mine + TopK::room(pool_limit),
                                   work, pool_k, pool_limit);
        state.pool.open = kUnused;
        state.pool.size = call_.pool_block;
        state.pool.newest = (state.visible - 1) / call_.pool_block;
      }
    }
  }

  // A selection never needs more room than there are entries to offer.
  static int limit_for(int k, int64_t entries) {
    return static_cast<int>(std::min<int64_t>(TopK::capacity_for(k), entries));
  }

  void prepare_tile() {
    const size_t per_strip = static_cast<size_t>(padded_dim(plan_.groups)) * kStrip;
    Element* values = scratch_array<Element>(kStripSlot, per_strip * kTileStrips);
    for (int s = 0; s < kTileStrips; ++s) strips_[s].values = values + per_strip * static_cast<size_t>(s);
    tile_.strips = strips_;
    scores_ = scratch_array<float>(kScoresSlot, 16 * kTileKeys);
  }

  bool on_tiles() const {
#ifdef __AMX_INT8__
    return TilePlan::possible(call_.heads);
#else
    return false;
#endif
  }

  // Visible positions [from, to) of the candidate list, counted through its blocks.
  void list_candidates(const int32_t* blocks, int64_t from, int64_t to) {
    const int32_t visible = states_[0].visible;
    int count = 0;
    int64_t slot = from / call_.pool_block, offset = from % call_.pool_block;
    for (int64_t at = from; at < to; ++at) {
      const int64_t position = static_cast<int64_t>(blocks[slot]) * call_.pool_block + offset;
      if (position < visible) tile_.positions[count++] = static_cast<int32_t>(position);
      if (++offset == call_.pool_block) {
        offset = 0;
        ++slot;
      }
    }
    tile_.count = count;
  }

  void score_tile() {
    int i = 0;
#ifdef __AMX_INT8__
    if (on_tiles()) {
      const int together = TilePlan(call_.heads, plan_.groups).queries;
      for (; i < item_.count; i += together) {
        const int queries = std::min(together, item_.count - i);
        if (!any_sees(i, queries)) continue;
        score_on_tiles(states_[i].query, queries, call_.heads, plan_.groups, strips_,
                       tile_.strip_count, scores_, kTileKeys);
        for (int q = 0; q < queries; ++q) {
          float* scores = scores_ + q * kTileKeys;
          rescore(states_[i + q].query, scores, 0x80808080u);
          absorb(states_[i + q], scores);
        }
      }
      return;
    }
#endif
    for (; i < item_.count; ++i) {
      if (!any_sees(i, 1)) continue;
      if (states_[i].query.plain) {
        score_plain(states_[i].query, call_.heads, plan_.groups, strips_, tile_.strip_count, scores_);
      }
      rescore(states_[i].query, scores_, 0);
      absorb(states_[i], scores_);
    }
  }

  bool any_sees(int first, int count) const {
    for (int i = first; i < first + count; ++i) {
      if (states_[i].visible > tile_.positions[0]) return true;
    }
    return false;
  }

  // Scores by the general road what is not plain.
  void rescore(const Query& query, float* scores, uint32_t flip) {
    if (query.plain && tile_.all_plain) return;
    for (int s = 0; s < tile_.strip_count; ++s) {
      if (query.plain && strips_[s].plain) continue;
      score_general(query, call_.heads, plan_.groups, strips_[s], flip, scores + s * kStrip);
    }
  }

  void absorb(State& state, const float* scores) {
    state.selection.offer_strips(scores, tile_.positions, tile_.strip_count, state.visible);
    if (plan_.pool_k() > 0) {
      const int seen = std::min(tile_.count, state.visible - tile_.positions[0]);
      state.pool.add(scores, tile_.positions[0], seen);
    }
  }

  void finish() {
    const int pool_k = plan_.pool_k();
    for (int i = 0; i < item_.count; ++i) {
      State& state = states_[i];
      const int64_t n = item_.first + i;
      state.selection.cut();
      if (pool_k > 0) {
        state.pool.flush();
        state.pool.selection.cut();
      }
      if (item_.parts == 1) {
        write(state.selection.positions, state.selection.size, call_.out + n * call_.topk, call_.topk);
        if (pool_k > 0) {
          write(state.pool.selection.positions, state.pool.selection.size,
                call_.pool_out + n * pool_k, pool_k);
        }
        continue;
      }
      const int64_t slot = item_.saved + static_cast<int64_t>(item_.part) * item_.count + i;
      float* scores = plan_.saved_scores + slot * plan_.saved_stride();
      int32_t* positions = plan_.saved_positions + slot * plan_.saved_stride();
      plan_.saved[slot].size = copy(state.selection, scores, positions);
      plan_.saved[slot].pool_size =
          pool_k > 0 ? copy(state.pool.selection, scores + call_.topk, positions + call_.topk) : 0;
    }
  }

  static int32_t copy(const TopK& selection, float* scores, int32_t* positions) {
    std::memcpy(scores, selection.scores, sizeof(float) * static_cast<size_t>(selection.size));
    std::memcpy(positions, selection.positions,
                sizeof(int32_t) * static_cast<size_t>(selection.size));
    return selection.size;
  }

 public:
  static void write(const int32_t* positions, int size, int32_t* out, int width) {
    std::memcpy(out, positions, sizeof(int32_t) * static_cast<size_t>(size));
    for (int i = size; i < width; ++i) out[i] = kUnused;
  }

 private:
  const Plan& plan_;
  const IndexTopkCall& call_;
  const Item& item_;
  State* states_;
  KeyTile tile_;
  Strip strips_[kTileStrips];
  float* scores_;
};

void run_item(const Plan& plan, const Item& item) {
#ifdef __AMX_INT8__
  if (TilePlan::possible(plan.call.heads)) {
    const TileScope scope(index_tile_shapes(plan.call.heads, plan.groups));
    Worker(plan, item).run();
    return;
  }
#endif
  Worker(plan, item).run();
}

// Joins the parts' selections of one query; they are ascending and follow each other.
void merge_query(const Plan& plan, const Item& tile, int i, bool pool) {
  const IndexTopkCall& call = plan.call;
  const int k = pool ? plan.pool_k() : call.topk;
  const int limit = k * tile.parts;
  const size_t room = TopK::room(limit);
  int32_t* memory = scratch_array<int32_t>(kBufferSlot, 2 * room);
  TopK all;
  all.reset(reinterpret_cast<float*>(memory), memory + room,
            scratch_array<float>(kWorkSlot, TopK::work_size(limit)), k, limit);
  for (int part = 0; part < tile.parts; ++part) {
    const int64_t slot = tile.saved + static_cast<int64_t>(part) * tile.count + i;
    const int64_t at = slot * plan.saved_stride() + (pool ? call.topk : 0);
    const int32_t size = pool ? plan.saved[slot].pool_size : plan.saved[slot].size;
    std::memcpy(all.scores + all.size, plan.saved_scores + at, sizeof(float) * static_cast<size_t>(size));
    std::memcpy(all.positions + all.size, plan.saved_positions + at,
                sizeof(int32_t) * static_cast<size_t>(size));
    all.size += size;
  }
  all.cut();
  const int64_t n = tile.first + i;
  Worker::write(all.positions, all.size, (pool ? call.pool_out : call.out) + n * k, k);
}

int64_t key_count(const IndexTopkCall& call, int first, int count) {
  if (call.pool != nullptr) return usable_blocks(call, first, nullptr) * call.pool_block;
  int32_t most = 0;
  for (int i = first; i < first + count; ++i) most = std::max(most, call.visible[i]);
  return most;
}

// Queries from `first` that share a tile.
int tile_queries(const IndexTopkCall& call, int first, int most) {
  if (call.pool != nullptr) return 1;
  int count = 1;
  while (count < most && first + count < call.count &&
         call.sequences[first + count] == call.sequences[first]) {
    ++count;
  }
  return count;
}

// Lists the items; fills `items` if it is not null. Returns their number and, in `saved`, the number
// of selections to be merged.
int64_t list_items(const IndexTopkCall& call, int most, int64_t wanted, Item* items, int64_t* saved) {
  int64_t tiles = 0;
  for (int first = 0; first < call.count; ++tiles) first += tile_queries(call, first, most);
  const int64_t split = tiles >= wanted ? 1 : (wanted + tiles - 1) / tiles;
  // Parts begin at whole strips and whole candidate blocks.
  const int64_t grain = static_cast<int64_t>(kStrip) * std::max(call.pool_block, 1);
  int64_t count = 0;
  *saved = 0;
  for (int first = 0; first < call.count;) {
    const int queries = tile_queries(call, first, most);
    const int64_t keys = key_count(call, first, queries);
    const int64_t parts = std::max<int64_t>(1, std::min(split, keys / kShortestPart));
    const int64_t length = ((keys + parts - 1) / parts + grain - 1) / grain * grain;
    for (int64_t part = 0; part < parts; ++part, ++count) {
      if (items == nullptr) continue;
      items[count] = {first,
                      queries,
                      std::min(part * length, keys),
                      std::min((part + 1) * length, keys),
                      static_cast<int32_t>(part),
                      static_cast<int32_t>(parts),
                      *saved};
    }
    if (parts > 1) *saved += parts * queries;
    first += queries;
  }
  return count;
}

bool valid(const IndexTopkCall& call) {
  const bool pools = call.pool != nullptr || call.pool_out != nullptr;
  return call.count >= 0 && call.heads >= 1 && call.dim >= kGroup && call.dim % kGroup == 0 &&
         call.dim <= kMaxGroups * kGroup && call.topk >= 1 && call.rows_per_block >= 1 &&
         (!pools || (call.pool_capacity >= 1 && call.pool_block >= 1)) &&
         (call.pool == nullptr || call.pool_out == nullptr);
}

}  // namespace

int index_topk(const IndexTopkCall& call) {
  if (!valid(call)) return -1;
  if (call.count == 0) return 0;
  const int rows = call.rows_per_block;
  Plan plan{call, call.dim / kGroup, (rows & (rows - 1)) == 0 ? __builtin_ctz(static_cast<unsigned>(rows)) : -1,
            nullptr, 0, nullptr, nullptr, nullptr};

  // Enough items to even out their different lengths; one thread needs no splitting.
  const int64_t wanted = call.threads > 1 ? 4 * static_cast<int64_t>(call.threads) : 1;
  const int64_t even = (call.count + wanted - 1) / wanted;
  const int most = static_cast<int>(std::min<int64_t>(kMostQueries, (even + 15) / 16 * 16));
  int64_t saved = 0;
  plan.item_count = list_items(call, most, wanted, nullptr, &saved);
  plan.items = scratch_array<Item>(kItemsSlot, static_cast<size_t>(plan.item_count));
  list_items(call, most, wanted, plan.items, &saved);
  if (saved > 0) {
    const size_t entries = static_cast<size_t>(saved * plan.saved_stride());
    char* memory = static_cast<char*>(
        scratch(kPartsSlot, static_cast<size_t>(saved) * sizeof(Saved) + entries * 8));
    plan.saved = reinterpret_cast<Saved*>(memory);
    plan.saved_scores = reinterpret_cast<float*>(plan.saved + saved);
    plan.saved_positions = reinterpret_cast<int32_t*>(plan.saved_scores + entries);
  }
  // The last items first: under a causal mask they are the longest.
  parallel_for(plan.item_count, call.threads, [&](int64_t i) {
    run_item(plan, plan.items[plan.item_count - 1 - i]);
  });
  if (saved > 0) {
    parallel_for(plan.item_count, call.threads, [&](int64_t i) {
      const Item& tile = plan.items[i];
      if (tile.parts == 1 || tile.part != 0) return;
      for (int q = 0; q < tile.count; ++q) {
        merge_query(plan, tile, q, false);
        if (plan.pool_k() > 0) merge_query(plan, tile, q, true);
      }
    });
  }
  return 0;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
