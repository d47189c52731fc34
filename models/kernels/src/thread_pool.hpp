// The thread pool that products and attention share.
//
// Knows: numbered tasks. Must not know: the computations of the tasks. MLX evaluates a stream on
// its own thread. This thread calls `run` and also executes tasks. After the last job, workers poll
// for work for a short time and then sleep. In a decode step, there is a product every few
// microseconds.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mlxrunner {

// fewer multiplications than this take less time than waking a second thread
inline constexpr std::int64_t kMinParallelWork = 1 << 16;
// the number of elements per task of a row-wise operation
inline constexpr std::int64_t kElementsPerTask = 1 << 14;

// More threads do not help, because each job waits for all of them. MAX_THREADS in
// models/cpu_backend.py must be equal.
inline constexpr int kMaxThreads = 256;

class ThreadPool {
 public:
  // Returns the pool of this process. Workers are started by the first job that is large enough.
  static ThreadPool& shared();

  // Returns the number of threads, including the caller.
  int num_threads() const;
  // Sets the number of threads, from 1 to kMaxThreads. It must not be called while a job runs. The
  // default is 1. models/cpu_backend.py determines the number for this machine.
  void set_num_threads(int count);

  // Calls task(context, i) once for every i in [0, count), in any order, on any of the threads.
  // Returns when all calls have returned. If some calls throw (out of memory), one of the
  // exceptions is rethrown here, and some tasks may not have been called. Only one `run` at a time
  // is parallel. A concurrent `run` on another thread executes only on that thread.
  void run(std::int64_t count, void (*task)(void*, std::int64_t), void* context);

  template <class F>
  void run(std::int64_t count, F task) {
    run(count, [](void* f, std::int64_t i) { (*static_cast<F*>(f))(i); }, &task);
  }

 private:
  ThreadPool();
  ~ThreadPool() = delete;  // lives as long as the process, like its threads
  struct State;
  State* state_;
};

// Calls function(row) for all rows of a row-wise operation, on as many threads as are useful.
template <class F>
void parallel_for_rows(std::int64_t rows, std::int64_t width, F function) {
  const std::int64_t task_rows =
      std::max<std::int64_t>(1, kElementsPerTask / std::max<std::int64_t>(1, width));
  ThreadPool::shared().run((rows + task_rows - 1) / task_rows, [&](std::int64_t i) {
    for (std::int64_t row = i * task_rows; row < std::min(rows, (i + 1) * task_rows); row++)
      function(row);
  });
}

}  // namespace mlxrunner
