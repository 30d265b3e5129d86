// Mixture of experts (specification 4.10). Rows are grouped by expert; all experts run side by side.
//
//   gather   rows of each group as operands of its first projections
//   hidden   silu(gate) * up * routing weight, per block of hidden channels
//   gather   hidden rows as operands of the last projection
//   sum      per block of output channels: experts in ascending id, then the shared one, one rounding
//
// A row's bits do not depend on the other rows: the products are batch-invariant and the order of the
// sum is the order of expert ids. So a long call is cut into batches that bound its memory.
//
// With matrix tiles and enough rows, each thread takes batches of its own through all experts instead, and
// nothing but their sums leaves its caches (moe_tiles.h): the same products, roundings and order of sums.
#include "moe.h"

#include "cedar_native.h"
#include "matmul.h"
#include "moe_swiglu.h"
#include "quant.h"
#include "thread_pool.h"
#include "values.h"
#if defined(__AMX_BF16__)
#include "moe_tiles.h"
#endif

namespace cedar {
namespace CEDAR_ISA {
namespace {

enum Slot { kPlanSlot = kFreeSlot, kInputSlot, kHiddenSlot, kInnerSlot, kUpSlot, kSumSlot };

constexpr int64_t kStripColumns = 256;         // rows of a group handled together
constexpr int64_t kBatchValues = 1ll << 26;    // bound of gathered and hidden values of one batch

// The rows one expert works on: positions [first, first + count) of the batch.
struct Group {
  Weight gate, up, down;
  int64_t first, count;
  void* input;  // operand of gate and up
  void* inner;  // operand of down
};

// A piece of a group small enough for one chunk.
struct Strip {
  int32_t group;
  int64_t first, count;  // columns of the group's operand
};

// One batch of rows, sorted by expert. Positions count slots in order of (expert, row), then the rows
// again for the shared expert.
struct Plan {
  const MoeCall* call;
  int64_t row, rows;  // the call's rows of this batch
  int64_t positions;
  int32_t* row_of;    // position -> row of the batch
  float* weight_of;   // position -> routing weight
  Group* groups;
  int64_t num_groups;
  Strip* strips;
  int64_t num_strips;
  char* hidden;       // [positions, inner] in the call's dtype
  int threads;
};

bool is_packed(int32_t kind) { return kind == kFp8Weight || kind == kFp4Weight; }

Path path_of(const MoeCall& call, int32_t kind) {
  return choose_path(kind, call.dtype, is_packed(kind));
}

// Memory handed out piece by piece, aligned; sized by a first walk without memory.
struct Arena {
  char* base;
  size_t used;

  template <class T>
  T* take(int64_t count) {
    T* const at = reinterpret_cast<T*>(base + used);
    used += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return at;
  }
};

// ---- planning ----------------------------------------------------------------------------------

Weight routed_weight(const ExpertWeights& all, int64_t expert, int32_t kind, int64_t out, int64_t in) {
  return {kind, all.values[expert], all.scales[expert], out, in};
}

void lay_out(Plan& plan, Arena& arena) {
  const MoeCall& call = *plan.call;
  plan.positions = plan.rows * (call.chosen + 1);
  const int64_t groups = (call.experts < plan.rows * call.chosen ? call.experts
                                                                 : plan.rows * call.chosen) + 1;
  plan.row_of = arena.take<int32_t>(plan.positions);
  plan.weight_of = arena.take<float>(plan.positions);
  plan.groups = arena.take<Group>(groups);
  plan.strips = arena.take<Strip>(groups + plan.positions / kStripColumns + 1);
}

// Counting sort of the choices by expert, rows ascending; `next` has room for experts + 1.
void sort_rows(Plan& plan, int64_t* next) {
  const MoeCall& call = *plan.call;
  const int64_t slots = plan.rows * call.chosen;
  const int64_t* ids = call.ids + plan.row * call.chosen;
  const float* weights = call.weights + plan.row * call.chosen;
  for (int64_t e = 0; e <= call.experts; ++e) next[e] = 0;
  for (int64_t s = 0; s < slots; ++s) ++next[ids[s] + 1];
  plan.num_groups = 0;
  for (int64_t e = 0; e < call.experts; ++e) {
    const int64_t count = next[e + 1];
    next[e + 1] += next[e];
    if (count == 0) continue;
    plan.groups[plan.num_groups++] = {
        routed_weight(call.gate, e, call.kind, call.inner, call.width),
        routed_weight(call.up, e, call.kind, call.inner, call.width),
        routed_weight(call.down, e, call.kind, call.width, call.inner),
        next[e], count, nullptr, nullptr};
  }
  for (int64_t s = 0; s < slots; ++s) {
    const int64_t position = next[ids[s]]++;
    plan.row_of[position] = static_cast<int32_t>(s / call.chosen);
    plan.weight_of[position] = weights[s];
  }
  plan.groups[plan.num_groups++] = {call.shared_gate, call.shared_up, call.shared_down,
                                    slots, plan.rows, nullptr, nullptr};
  for (int64_t r = 0; r < plan.rows; ++r) {
    plan.row_of[slots + r] = static_cast<int32_t>(r);
    plan.weight_of[slots + r] = 1.f;
  }
  plan.num_strips = 0;
  for (int64_t g = 0; g < plan.num_groups; ++g) {
    const int64_t count = plan.groups[g].count;
    for (int64_t c = 0; c < count; c += kStripColumns) {
      plan.strips[plan.num_strips++] = {static_cast<int32_t>(g), c,
                                        count - c < kStripColumns ? count - c : kStripColumns};
    }
  }
}

// A batch sorted by expert, in the calling thread's scratch memory.
Plan plan_batch(const MoeCall& call, int64_t row, int64_t rows) {
  Plan plan = {};
  plan.call = &call;
  plan.row = row;
  plan.rows = rows;
  Arena sizes = {nullptr, 0};
  lay_out(plan, sizes);
  sizes.take<int64_t>(call.experts + 1);
  Arena memory = {static_cast<char*>(scratch(kPlanSlot, sizes.used)), 0};
  lay_out(plan, memory);
  sort_rows(plan, memory.take<int64_t>(call.experts + 1));
  return plan;
}

// ---- operands ----------------------------------------------------------------------------------

// Gives every group its operand memory; a single row has one input for all groups of a kind.
void place_operands(Plan& plan, bool inner, Arena& arena) {
  const MoeCall& call = *plan.call;
  for (int64_t g = 0; g < plan.num_groups; ++g) {
    Group& group = plan.groups[g];
    if (!inner && plan.rows == 1 && g > 0 && group.gate.kind == plan.groups[g - 1].gate.kind) {
      group.input = plan.groups[g - 1].input;
      continue;
    }
    const size_t bytes = operand_bytes(path_of(call, group.gate.kind), group.count,
                                       inner ? call.inner : call.width);
    (inner ? group.inner : group.input) = arena.take<char>(static_cast<int64_t>(bytes));
  }
}

void prepare_strip(const Plan& plan, const Strip& strip, bool inner) {
  const MoeCall& call = *plan.call;
  const Group& group = plan.groups[strip.group];
  if (!inner && strip.group > 0 && group.input == plan.groups[strip.group - 1].input) return;
  const int64_t size = value_bytes(call.dtype);
  const char* x = static_cast<const char*>(call.x) + plan.row * call.width * size;
  const Rows input = {x, call.dtype, call.width, plan.row_of + group.first, group.count, call.width};
  const Rows hidden = {plan.hidden + group.first * call.inner * size, call.dtype, call.inner, nullptr,
                       group.count, call.inner};
  const int32_t kind = group.gate.kind;
  prepare(inner ? hidden : input, is_packed(kind), path_of(call, kind), strip.first,
          strip.first + strip.count, inner ? group.inner : group.input);
}

void prepare_all(Plan& plan, bool inner) {
  Arena size = {nullptr, 0};
  place_operands(plan, inner, size);
  Arena memory = {static_cast<char*>(scratch(inner ? kInnerSlot : kInputSlot, size.used)), 0};
  place_operands(plan, inner, memory);
  parallel_for(plan.num_strips, plan.threads,
               [&](int64_t s) { prepare_strip(plan, plan.strips[s], inner); });
}

// ---- products ----------------------------------------------------------------------------------

// Rows of a weight per chunk: whole 32-row scale tiles, several chunks a thread, and many rows when
// there are columns to reuse them for.
int64_t block_rows(int64_t out, int64_t strips, int64_t most, int threads) {
  const int64_t wanted = (4 * threads + strips - 1) / strips;
  const int64_t even = ((out + wanted - 1) / wanted + 31) / 32 * 32;
  return even < most ? even : most;
}

// One row of hidden channels from float32 sums of both projections.
void swiglu_row(const MoeCall& call, const float* gate, const float* up, float weight, int64_t count,
                void* out, int64_t at) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = lanes_left(i, count);
    const F32 g = rounded(load_lanes(gate, kFloat32, i, n), call.dtype);
    const F32 u = rounded(load_lanes(up, kFloat32, i, n), call.dtype);
    store_lanes(swiglu(g, u, call.limit, F32::set(weight)), out, call.dtype, at + i, n);
  }
}

void make_hidden(const Plan& plan, const Strip& strip, int64_t first_row, int64_t rows) {
  const MoeCall& call = *plan.call;
  const Group& group = plan.groups[strip.group];
  const Operand operand = {path_of(call, group.gate.kind), group.count, call.width, group.input};
  float* gates = scratch_array<float>(kOutputSlot, strip.count * rows);
  float* ups = scratch_array<float>(kUpSlot, strip.count * rows);
  multiply(group.gate, first_row, rows, operand, strip.first, strip.count, gates, rows);
  multiply(group.up, first_row, rows, operand, strip.first, strip.count, ups, rows);
  for (int64_t c = 0; c < strip.count; ++c) {
    const int64_t position = group.first + strip.first + c;
    swiglu_row(call, gates + c * rows, ups + c * rows, plan.weight_of[position], rows, plan.hidden,
               position * call.inner + first_row);
  }
}

// Output channels [first_row, first_row + rows) of all rows of the batch.
void sum_experts(const Plan& plan, int64_t first_row, int64_t rows) {
  const MoeCall& call = *plan.call;
  float* sums = scratch_array<float>(kSumSlot, plan.rows * rows);
  std::memset(sums, 0, static_cast<size_t>(plan.rows * rows) * sizeof(float));
  for (int64_t s = 0; s < plan.num_strips; ++s) {
    const Strip& strip = plan.strips[s];
    const Group& group = plan.groups[strip.group];
    const Operand operand = {path_of(call, group.down.kind), group.count, call.inner, group.inner};
    float* block = scratch_array<float>(kOutputSlot, strip.count * rows);
    multiply(group.down, first_row, rows, operand, strip.first, strip.count, block, rows);
    for (int64_t c = 0; c < strip.count; ++c) {
      float* sum = sums + plan.row_of[group.first + strip.first + c] * rows;
      for (int64_t i = 0; i < rows; i += kLanes) {
        const int n = lanes_left(i, rows);
        const F32 term = rounded(load_lanes(block, kFloat32, c * rows + i, n), call.dtype);
        store_lanes(load_lanes(sum, kFloat32, i, n) + term, sum, kFloat32, i, n);
      }
    }
  }
  for (int64_t r = 0; r < plan.rows; ++r) {
    for (int64_t i = 0; i < rows; i += kLanes) {
      const int n = lanes_left(i, rows);
      store_lanes(load_lanes(sums, kFloat32, r * rows + i, n), call.out, call.dtype,
                  (plan.row + r) * call.width + first_row + i, n);
    }
  }
}

// Calls `body(strip or 0, first row, rows)` for every block of `out` weight rows.
template <class Body>
void for_blocks(int64_t out, int64_t strips, int64_t step, int threads, const Body& body) {
  const int64_t blocks = (out + step - 1) / step;
  parallel_for(strips * blocks, threads, [&](int64_t chunk) {
    const int64_t first = chunk % blocks * step;
    body(chunk / blocks, first, out - first < step ? out - first : step);
  });
}

void run_batch(const MoeCall& call, int64_t row, int64_t rows) {
  Plan plan = plan_batch(call, row, rows);
  const int64_t panels = (plan.positions + kPanel - 1) / kPanel;
  plan.threads = worthwhile_threads(
      (panels > plan.num_groups ? panels : plan.num_groups) * call.inner * call.width, call.threads);
  plan.hidden = static_cast<char*>(scratch(
      kHiddenSlot, static_cast<size_t>(plan.positions * call.inner * value_bytes(call.dtype))));
  prepare_all(plan, false);
  const int64_t step = block_rows(call.inner, plan.num_strips, rows > kPanel ? 128 : call.inner,
                                  plan.threads);
  for_blocks(call.inner, plan.num_strips, step, plan.threads,
             [&](int64_t strip, int64_t first, int64_t count) {
               make_hidden(plan, plan.strips[strip], first, count);
             });
  prepare_all(plan, true);
  const int64_t most = rows > kPanel ? 256 : call.width;
  for_blocks(call.width, 1, block_rows(call.width, 1, most, plan.threads), plan.threads,
             [&](int64_t, int64_t first, int64_t count) { sum_experts(plan, first, count); });
}

#if defined(__AMX_BF16__)

// ---- batches of a thread -----------------------------------------------------------------------

// Rows of a batch that one thread takes through all experts; 0 when the call does not suit that.
int64_t chain_rows(const MoeCall& call) {
  constexpr int64_t kWidest = 1024;         // a block of weights stays in the second-level cache
  constexpr int64_t kSums = 1 << 17;        // and so do a batch's sums
  constexpr int64_t kColumns = 2 * kPanel;  // of an expert, so that reading its weights pays
  const bool plain = call.kind == kBfloat16Weight && call.shared_kind == kBfloat16Weight;
  const bool whole = call.width % 32 == 0 && call.inner % 32 == 0;
  if (!plain || !whole || call.dtype != kBfloat16) return 0;
  if (call.width > kWidest || call.inner > kWidest) return 0;
  const int64_t least = (kColumns * call.experts + call.chosen - 1) / call.chosen;
  const int64_t threads = call.threads > 1 ? call.threads : 1;
  const int64_t even = (call.n + threads - 1) / threads;
  if (even < least) return 0;
  const int64_t most = kSums / call.width > least ? kSums / call.width : least;
  return even < most ? even : most;
}

void run_chains(const MoeCall& call, int64_t row, int64_t rows) {
  const Plan plan = plan_batch(call, row, rows);
  float* sums = scratch_array<float>(kSumSlot, rows * call.width);
  std::memset(sums, 0, static_cast<size_t>(rows * call.width) * sizeof(float));
  void* memory = scratch(kInputSlot, tiles::chain_bytes(call.width, call.inner));
  const uint16_t* x = static_cast<const uint16_t*>(call.x) + row * call.width;
  for (int64_t g = 0; g < plan.num_groups; ++g) {
    const Group& group = plan.groups[g];
    for (int64_t c = 0; c < group.count; c += tiles::kChainColumns) {
      const int64_t first = group.first + c, left = group.count - c;
      const int64_t count = left < tiles::kChainColumns ? left : tiles::kChainColumns;
      const Rows input = {x, kBfloat16, call.width, plan.row_of + first, count, call.width};
      tiles::run_chain({group.gate, group.up, group.down, input, plan.weight_of + first, call.limit,
                        sums}, memory);
    }
  }
  uint16_t* out = static_cast<uint16_t*>(call.out) + row * call.width;
  for (int64_t i = 0; i < rows * call.width; i += kLanes) F32::load(sums + i).store_bf16(out + i);
}

#endif

}  // namespace

int moe(const MoeCall& call) {
#if defined(__AMX_BF16__)
  if (const int64_t step = chain_rows(call)) {
    parallel_for((call.n + step - 1) / step, call.threads, [&](int64_t batch) {
      const int64_t row = batch * step;
      run_chains(call, row, call.n - row < step ? call.n - row : step);
    });
    return 0;
  }
#endif
  const int64_t per_row = (call.chosen + 1) * (call.width + 2 * call.inner);
  const int64_t most = kBatchValues / per_row > kPanel ? kBatchValues / per_row : kPanel;
  for (int64_t row = 0; row < call.n; row += most) {
    run_batch(call, row, call.n - row < most ? call.n - row : most);
  }
  return 0;
}

}  // namespace CEDAR_ISA
}  // namespace cedar
