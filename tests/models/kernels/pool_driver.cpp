// Runs the thread pool alone, for sanitizers: `pool_driver ROUNDS`. Prints an error and exits
// with 1.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "thread_pool.hpp"

namespace {

// Each part runs once, on any thread, and its writes are visible when `run` returns. The counters
// are not atomic, so that a sanitizer detects missing synchronisation.
void run_often(int rounds) {
  mlxrunner::ThreadPool& pool = mlxrunner::ThreadPool::shared();
  std::vector<int> done;
  for (int round = 0; round < rounds; round++) {
    const int count = round % 7 == 0 ? 200 : round % 5;
    done.assign(static_cast<std::size_t>(count) * 3, 0);
    pool.run(count, [&](std::int64_t i) {
      int* own = &done[static_cast<std::size_t>(i) * 3];
      // Runs on this thread or on several: if another thread was using the pool when this part
      // began, the pool may be free now. So each part writes its own counter.
      pool.run(i % 3, [&](std::int64_t j) { own[1 + j] += 1; });
      own[0] += 1;
    });
    for (int i = 0; i < count; i++)
      for (int j = 0; j < 3; j++)
        if (done[static_cast<std::size_t>(i) * 3 + static_cast<std::size_t>(j)] != (j <= i % 3)) {
          std::fprintf(stderr, "a part was not done once\n");
          std::exit(1);
        }
  }
}

// `run` rethrows the exception of a part after all parts have ended, and the pool can be used
// again.
void fail_often(int rounds) {
  mlxrunner::ThreadPool& pool = mlxrunner::ThreadPool::shared();
  for (int round = 0; round < rounds; round++) {
    std::vector<int> done(20, 0);
    try {
      pool.run(20, [&](std::int64_t i) {
        done[static_cast<std::size_t>(i)] = 1;
        if (i % 7 == round % 7) throw std::runtime_error("no memory");
      });
    } catch (const std::runtime_error&) {
      continue;
    }
    std::fprintf(stderr, "what a part threw was lost\n");
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc == 2 ? std::atoi(argv[1]) : 0;
  mlxrunner::ThreadPool::shared().set_num_threads(4);
  run_often(rounds);
  fail_often(rounds);
  std::thread other(run_often, rounds);
  run_often(rounds);
  other.join();
  mlxrunner::ThreadPool::shared().set_num_threads(1);
  run_often(rounds);
}
