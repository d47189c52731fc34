#include "thread_pool.hpp"

#include <sched.h>

#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "spin_wait.hpp"

namespace mlxrunner {

struct ThreadPool::State {
  std::atomic<int> num_threads{1};
  int num_started = 1;
  // not a mutex, because a nested `run` would lock it again on the same thread
  std::atomic<bool> busy{false};

  // The current job. job_number counts jobs. A worker takes part in a job at most once.
  std::atomic<std::uint32_t> job_number{0};
  std::atomic<std::int64_t> next{0};
  std::atomic<int> active_workers{0};
  std::atomic<int> open_workers{0};  // workers below this number may enter
  std::int64_t count = 0;
  void (*task)(void*, std::int64_t) = nullptr;
  void* context = nullptr;
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // of the first task that failed

  // noexcept: the context is on the stack of the caller of `run`, which must not unwind before all
  // workers are done with the context. No worker could catch an exception.
  void run_tasks() noexcept {
    try {
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
        task(context, i);
    } catch (...) {
      next.store(count, std::memory_order_relaxed);
      if (!failed.exchange(true, std::memory_order_relaxed)) error = std::current_exception();
    }
  }

  void worker_loop(int worker) {
    std::uint32_t known_job = 0;
    for (;;) {
      if (!spin_until_changed(job_number, known_job))
        job_number.wait(known_job, std::memory_order_acquire);
      known_job = job_number.load(std::memory_order_acquire);
      // `run` waits for workers that entered before it closed the job. Workers that enter later
      // find the job closed. This requires a total order of these two operations and the two at the
      // end of `run`.
      active_workers.fetch_add(1, std::memory_order_seq_cst);
      if (open_workers.load(std::memory_order_seq_cst) > worker) run_tasks();
      active_workers.fetch_sub(1, std::memory_order_release);
    }
  }

  void start() {
    try {
      for (; num_started < num_threads; num_started++)
        std::thread([this, w = num_started] { worker_loop(w); }).detach();
    } catch (const std::exception&) {
      num_threads = num_started;  // a container may limit threads; the started ones do the work
    }
  }
};

ThreadPool::ThreadPool() : state_(new State) {}

ThreadPool& ThreadPool::shared() {
  // never destroyed, because workers outlive static objects
  static ThreadPool* pool = new ThreadPool;
  return *pool;
}

int ThreadPool::num_threads() const { return state_->num_threads; }

void ThreadPool::set_num_threads(int count) {
  if (count < 1 || count > kMaxThreads)
    throw std::invalid_argument(std::to_string(count) + " is not a number of threads up to " +
                                std::to_string(kMaxThreads));
  state_->num_threads = count;
}

void ThreadPool::run(std::int64_t count, void (*task)(void*, std::int64_t), void* context) {
  State& s = *state_;
  if (count < 2 || s.num_threads < 2 || s.busy.exchange(true, std::memory_order_acquire)) {
    for (std::int64_t i = 0; i < count; i++) task(context, i);
    return;
  }
  s.start();
  s.count = count, s.task = task, s.context = context;
  s.next.store(0, std::memory_order_relaxed);
  s.open_workers.store(s.num_threads, std::memory_order_release);
  s.job_number.fetch_add(1, std::memory_order_acq_rel);
  s.job_number.notify_all();
  s.run_tasks();
  s.open_workers.store(0, std::memory_order_seq_cst);
  for (int i = 1; s.active_workers.load(std::memory_order_seq_cst); i++)
    // an active worker may have been preempted
    if (i % 1024) pause();
    else sched_yield();
  std::exception_ptr error;
  if (s.failed.exchange(false, std::memory_order_relaxed)) error = std::exchange(s.error, nullptr);
  s.busy.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

}  // namespace mlxrunner
