#include "pool.hpp"

#include <sched.h>

#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "waiting.hpp"

namespace mlxrunner {

struct Pool::State {
  std::atomic<int> threads{1};
  int started = 1;
  // no mutex: what is run from within a part asks for it on the thread that has it
  std::atomic<bool> busy{false};

  // One job. `turn` counts jobs; a helper takes part in a job at most once.
  std::atomic<std::uint32_t> turn{0};
  std::atomic<std::int64_t> next{0};
  std::atomic<int> inside{0};
  std::atomic<int> open{0};  // helpers below this number may enter
  std::int64_t count = 0;
  void (*part)(void*, std::int64_t) = nullptr;
  void* context = nullptr;
  std::atomic<bool> failed{false};
  std::exception_ptr why;  // of the first that failed

  // The context is on the stack of whoever runs the job, so nothing may unwind that before all are
  // done with it; and on a helper nobody would catch what is thrown.
  void work() noexcept {
    try {
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
        part(context, i);
    } catch (...) {
      next.store(count, std::memory_order_relaxed);
      if (!failed.exchange(true, std::memory_order_relaxed)) why = std::current_exception();
    }
  }

  void help(int worker) {
    std::uint32_t seen = 0;
    for (;;) {
      if (!changed(turn, seen)) turn.wait(seen, std::memory_order_acquire);
      seen = turn.load(std::memory_order_acquire);
      // Who is inside before the job is closed is waited for, who comes later finds it closed: that
      // takes one order of these two and the two at the end of `run`.
      inside.fetch_add(1, std::memory_order_seq_cst);
      if (open.load(std::memory_order_seq_cst) > worker) work();
      inside.fetch_sub(1, std::memory_order_release);
    }
  }

  void start() {
    try {
      for (; started < threads; started++) std::thread([this, w = started] { help(w); }).detach();
    } catch (const std::exception&) {
      threads = started;  // a container may count threads; those that we have do the work
    }
  }
};

Pool::Pool() : state_(new State) {}

Pool& Pool::shared() {
  // never destroyed: helpers outlive static objects
  static Pool* pool = new Pool;
  return *pool;
}

int Pool::threads() const { return state_->threads; }

void Pool::use(int threads) {
  if (threads < 1 || threads > kMost)
    throw std::invalid_argument(std::to_string(threads) + " is not a number of threads up to " +
                                std::to_string(kMost));
  state_->threads = threads;
}

void Pool::run(std::int64_t count, void (*part)(void*, std::int64_t), void* context) {
  State& s = *state_;
  if (count < 2 || s.threads < 2 || s.busy.exchange(true, std::memory_order_acquire)) {
    for (std::int64_t i = 0; i < count; i++) part(context, i);
    return;
  }
  s.start();
  s.count = count, s.part = part, s.context = context;
  s.next.store(0, std::memory_order_relaxed);
  s.open.store(s.threads, std::memory_order_release);
  s.turn.fetch_add(1, std::memory_order_acq_rel);
  s.turn.notify_all();
  s.work();
  s.open.store(0, std::memory_order_seq_cst);
  for (int i = 1; s.inside.load(std::memory_order_seq_cst); i++)
    // whoever is inside may have lost its CPU
    if (i % 1024) pause();
    else sched_yield();
  std::exception_ptr why;
  if (s.failed.exchange(false, std::memory_order_relaxed)) why = std::exchange(s.why, nullptr);
  s.busy.store(false, std::memory_order_release);
  if (why) std::rethrow_exception(why);
}

}  // namespace mlxrunner
