// Runs the pool by itself, for sanitizers: `pool_driver ROUNDS`. Says what is wrong and exits
// with 1.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "thread_pool.hpp"

namespace {

// Every part is done once, by whoever; what the parts wrote is there when `run` returns. The
// numbers are plain ones: a sanitizer sees who writes without being waited for.
void run_often(int rounds) {
  mlxrunner::ThreadPool& pool = mlxrunner::ThreadPool::shared();
  std::vector<int> done;
  for (int round = 0; round < rounds; round++) {
    const int count = round % 7 == 0 ? 200 : round % 5;
    done.assign(static_cast<std::size_t>(count) * 3, 0);
    pool.run(count, [&](std::int64_t i) {
      int* own = &done[static_cast<std::size_t>(i) * 3];
      // Done there and then, or shared among threads: where the pool was another thread's when this
      // part began, it may be free now. So each writes a number of its own.
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

// What a part throws comes out where it was asked for, once nobody works at it any more; and then
// there is work as before.
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
