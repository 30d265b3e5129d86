// Implementation of thread_pool.h. Compiled once, for the baseline instruction set.
#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace cedar {
namespace {

// How long an idle worker looks for new work before it sleeps. Kernels of one decode step follow
// each other within microseconds; longer spinning would take the cores from torch's own threads.
constexpr auto kSpin = std::chrono::microseconds(20);
constexpr int kMaxWorkers = 255;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Waits, spinning, until `ready()` or until the spin time is over; says which.
template <class Ready>
bool spin_until(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 8; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

// One call of run_chunks. Lives on the caller's stack; linked into the pool while it wants helpers.
struct Job {
  ChunkFunction function;
  void* context;
  int64_t chunks;
  std::atomic<int64_t> next{0};
  int helpers_wanted = 0;            // guarded by Pool::mutex
  std::atomic<int> helpers_inside{0};  // incremented under Pool::mutex
  Job* following = nullptr;          // guarded by Pool::mutex

  void work() {
    for (;;) {
      const int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= chunks) return;
      function(context, chunk);
    }
  }
};

class Pool {
 public:
  void run(Job& job, int helpers) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start_workers(helpers);
      job.helpers_wanted = std::min(helpers, workers_);
      job.following = first_;
      first_ = &job;
      posted_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job.work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      unlink(job);  // no helper joins from here on
    }
    const auto finished = [&] { return job.helpers_inside.load(std::memory_order_acquire) == 0; };
    if (spin_until(finished)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, finished);
  }

 private:
  void start_workers(int wanted) {
    wanted = std::min(wanted, kMaxWorkers);
    while (workers_ < wanted) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // the process may not start more threads: fewer helpers, same result
      }
      ++workers_;
    }
  }

  void unlink(Job& job) {
    for (Job** link = &first_; *link != nullptr; link = &(*link)->following) {
      if (*link == &job) {
        *link = job.following;
        return;
      }
    }
  }

  // Joins a job that still wants helpers. Called with the mutex held.
  Job* join() {
    for (Job* job = first_; job != nullptr; job = job->following) {
      if (job->helpers_wanted > 0 && job->next.load(std::memory_order_relaxed) < job->chunks) {
        --job->helpers_wanted;
        job->helpers_inside.fetch_add(1, std::memory_order_relaxed);
        return job;
      }
    }
    return nullptr;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (Job* job = join()) {
        lock.unlock();
        job->work();
        lock.lock();
        // Under the mutex: the caller may not return (and free the job) before this thread has let
        // go of it, and a caller about to sleep cannot miss the notification.
        if (job->helpers_inside.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
        continue;
      }
      const uint64_t seen = posted_.load(std::memory_order_relaxed);
      lock.unlock();
      spin_until([&] { return posted_.load(std::memory_order_acquire) != seen; });
      lock.lock();
      wake_.wait(lock, [&] { return posted_.load(std::memory_order_relaxed) != seen; });
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;  // a job was posted
  std::condition_variable done_;  // a helper left a job
  std::atomic<uint64_t> posted_{0};
  Job* first_ = nullptr;
  int workers_ = 0;
};

// Never destroyed: workers are detached and may outlive static destruction. A forked child has none
// of the parent's threads, so it starts with a new pool.
std::atomic<Pool*> g_pool{nullptr};

Pool& pool() {
  Pool* found = g_pool.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  static std::once_flag at_fork;
  std::call_once(at_fork, [] {
    pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr, std::memory_order_release); });
  });
  Pool* made = new Pool;
  if (g_pool.compare_exchange_strong(found, made)) return *made;
  delete made;
  return *found;
}

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

void run_chunks(int64_t chunks, int threads, ChunkFunction function, void* context) {
  if (chunks <= 0) return;
  const int helpers = static_cast<int>(std::min<int64_t>(std::max(threads, 1), chunks)) - 1;
  if (helpers == 0) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) function(context, chunk);
    return;
  }
  Job job;
  job.function = function;
  job.context = context;
  job.chunks = chunks;
  pool().run(job, helpers);
}

int worthwhile_threads(int64_t weights, int threads) {
  constexpr int64_t kLeastWeights = 1 << 18;
  return static_cast<int>(std::clamp<int64_t>(weights / kLeastWeights, 1, std::max(threads, 1)));
}

void* scratch(int slot, size_t bytes) {
  static thread_local Buffer buffers[kScratchSlots];
  Buffer& buffer = buffers[slot];
  if (buffer.size < bytes) {
    std::free(buffer.data);
    const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, size);
    buffer.size = buffer.data == nullptr ? 0 : size;
    if (buffer.data == nullptr) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace cedar
