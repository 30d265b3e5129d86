// A small persistent thread pool and per-thread scratch memory, shared by every kernel.
//
// No OpenMP: torch brings its own runtime, and a wheel should not depend on a second one.
// Results never depend on how chunks are dealt to threads; kernels see to that.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cedar {

using ChunkFunction = void (*)(void* context, int64_t chunk);

// Calls `function(context, c)` for every c in [0, chunks), on at most `threads` threads, the caller
// being one of them; returns when all calls have returned. Safe to call from several threads at
// once and from inside a chunk: the caller works through its own chunks, so it never waits for
// a thread that is busy elsewhere. Chunks must not throw.
void run_chunks(int64_t chunks, int threads, ChunkFunction function, void* context);

// The same for a callable `body(int64_t chunk)`.
template <class Body>
inline void parallel_for(int64_t chunks, int threads, const Body& body) {
  run_chunks(
      chunks, threads,
      [](void* context, int64_t chunk) { (*static_cast<const Body*>(context))(chunk); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// How many of `threads` are worth waking for products that read `weights` weight values: each gets some
// tens of microseconds of them, else handing over costs more than it saves.
int worthwhile_threads(int64_t weights, int threads);

// A buffer of the calling thread, aligned to 64 bytes, at least `bytes` long, valid until the thread
// asks for the same slot again; contents are left from earlier use. Slots keep buffers of one call
// apart. Calls nested in a chunk run on the same thread: they must use other slots.
constexpr int kScratchSlots = 24;
void* scratch(int slot, size_t bytes);

template <class T>
inline T* scratch_array(int slot, size_t count) {
  return static_cast<T*>(scratch(slot, count * sizeof(T)));
}

}  // namespace cedar
