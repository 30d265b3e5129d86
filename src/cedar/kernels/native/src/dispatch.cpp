// Picks the instruction-set variant, and the exported entry points of index_topk and
// sparse_attention. Compiled once, for the baseline instruction set.
#include <atomic>
#include <cstring>
#include <initializer_list>

#include "cedar_native.h"
#include "index_topk.h"
#include "sparse_attention.h"

#if defined(CEDAR_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cedar {
namespace {

constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "amx"};
constexpr int kUndecided = -1;
std::atomic<int> g_active{kUndecided};

#ifdef CEDAR_X86
// What the processor has and the system saves on a context switch. Asked directly: the compilers'
// __builtin_cpu_supports knows no AMX before gcc 14 and nothing at all in Zig.
struct Processor {
  bool avx2, avx512, amx;

  Processor() : avx2(false), avx512(false), amx(false) {
    if (cpuid(0, 0).a < 7) return;
    const Registers basic = cpuid(1, 0), extended = cpuid(7, 0);
    if (!has(basic.c, {27})) return;  // OSXSAVE: the next instruction exists
    unsigned saved = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    // FMA; AVX2; state of SSE and AVX.
    avx2 = has(basic.c, {12, 28}) && has(extended.b, {5}) && has(saved, {1, 2});
    // F, DQ, BW, VL; VBMI, VNNI; BF16 (a leaf that exists if leaf 7 says so); their state.
    const bool bf16 = extended.a >= 1 && has(cpuid(7, 1).a, {5});
    avx512 = avx2 && bf16 && has(extended.b, {16, 17, 30, 31}) && has(extended.c, {1, 11}) &&
             has(saved, {5, 6, 7});
    // BF16, TILE, INT8; their state.
    amx = avx512 && has(extended.d, {22, 24, 25}) && has(saved, {17, 18});
  }

 private:
  struct Registers {
    unsigned a, b, c, d;
  };

  static Registers cpuid(unsigned leaf, unsigned part) {
    Registers r = {leaf, 0, part, 0};
    __asm__ volatile("cpuid" : "+a"(r.a), "=b"(r.b), "+c"(r.c), "=d"(r.d));
    return r;
  }

  static bool has(unsigned bits, std::initializer_list<int> numbers) {
    for (const int number : numbers) {
      if ((bits >> number & 1u) == 0) return false;
    }
    return true;
  }
};

// Linux hands out tile registers on request only, once per process.
bool tiles_permitted() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

bool available(Isa isa) {
#ifdef CEDAR_X86
  static const Processor processor;
  switch (isa) {
    case Isa::scalar: return true;
    case Isa::avx2: return processor.avx2;
    case Isa::avx512: return processor.avx512;
    case Isa::amx: return processor.amx && tiles_permitted();
  }
  return false;
#else
  return isa == Isa::scalar;
#endif
}

Isa best() {
  if (available(Isa::amx)) return Isa::amx;
  if (available(Isa::avx512)) return Isa::avx512;
  return available(Isa::avx2) ? Isa::avx2 : Isa::scalar;
}

}  // namespace

Isa active_isa() {
  int active = g_active.load(std::memory_order_relaxed);
  if (active == kUndecided) {
    active = static_cast<int>(best());
    g_active.store(active, std::memory_order_relaxed);
  }
  return static_cast<Isa>(active);
}

}  // namespace cedar

CEDAR_API int cedar_set_isa(const char* name) {
  using namespace cedar;
  if (std::strcmp(name, "auto") == 0) {
    g_active.store(static_cast<int>(best()), std::memory_order_relaxed);
    return 0;
  }
  for (int i = 0; i < 4; ++i) {
    if (std::strcmp(name, kNames[i]) == 0 && available(static_cast<Isa>(i))) {
      g_active.store(i, std::memory_order_relaxed);
      return 0;
    }
  }
  return -1;
}

CEDAR_API const char* cedar_isa() { return cedar::kNames[static_cast<int>(cedar::active_isa())]; }

CEDAR_VARIANTS_AMX(int, index_topk, (const cedar::IndexTopkCall& call))
CEDAR_VARIANTS_AMX(int, sparse_attention, (const cedar::SparseAttentionCall& call))

CEDAR_API int cedar_index_topk(
    const uint8_t* iq, const float* g, const uint8_t* keys, int64_t key_stride,
    const int32_t* tables, int64_t table_stride, int32_t rows_per_block, const int32_t* seq,
    const int32_t* n_vis, int32_t N, int32_t Hi, int32_t di, int32_t k, const int32_t* cand_in,
    int32_t* cand_out, int32_t cand_cap, int32_t cand_block_size, int32_t* out,
    int32_t nthreads) {
  const cedar::IndexTopkCall call = {
      iq, g,  keys, key_stride, tables,   table_stride, rows_per_block,  seq, n_vis, N,
      Hi, di, k,    cand_in,    cand_out, cand_cap,     cand_block_size, out, nthreads};
  CEDAR_CALL_AMX(index_topk, (call));
}

CEDAR_API int cedar_sparse_attention(
    const void* q, const void* q_sel, int32_t dtype, const uint8_t* win, int64_t win_stride,
    const int64_t* win_base, const int32_t* win_lo, const int32_t* win_hi, int64_t win_modulus,
    const uint8_t* main_rows, int64_t main_stride, const int32_t* tables, int64_t table_stride,
    int32_t rows_per_block, const int32_t* seq, const int32_t* sel, int32_t k, const float* sink,
    float scale, int32_t N, int32_t H, int32_t d, void* out, void* out_sel, int32_t nthreads) {
  const cedar::SparseAttentionCall call = {
      q,      q_sel,        dtype,          win, win_stride, win_base, win_lo, win_hi, win_modulus,
      main_rows, main_stride, tables, table_stride, rows_per_block, seq, sel, k, sink, scale,
      N,      H,            d,              out, out_sel,    nthreads};
  CEDAR_CALL_AMX(sparse_attention, (call));
}
