// The threads that products and attention are shared among.
//
// Knows: work that comes in numbered parts. Must not know: what the parts are. MLX evaluates a
// stream on a thread of its own; that thread calls `run` and works too. Helpers look for work for a
// little while after the last (a decode step has a product every few microseconds) and then sleep.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mlxrunner {

// So few multiplications are done before a second thread has noticed.
inline constexpr std::int64_t kAlone = 1 << 16;
// And of numbers that something simple happens to, one thread takes so many at a time.
inline constexpr std::int64_t kSimple = 1 << 14;

// More are no help: each job waits for all. As MOST in models/cpu_backend.py.
inline constexpr int kMost = 256;

class Pool {
 public:
  // The one pool of this process; its helpers are started by the first work that is worth them.
  static Pool& shared();

  // How many threads work, the caller among them.
  int threads() const;
  // So many from now on, one to kMost; not while anything runs. One until it is called: how many
  // this machine has for us is known in models/cpu_backend.py.
  void use(int threads);

  // Calls part(context, i) once for every i in [0, count), in any order, on any of the threads, and
  // returns when all have returned. Where some throw, for want of memory, one of their exceptions
  // is thrown again here, and some parts may never have been called. One `run` at a time works in
  // parallel; what comes meanwhile from another thread is done by that thread alone.
  void run(std::int64_t count, void (*part)(void*, std::int64_t), void* context);

  template <class F>
  void run(std::int64_t count, F part) {
    run(count, [](void* f, std::int64_t i) { (*static_cast<F*>(f))(i); }, &part);
  }

 private:
  Pool();
  ~Pool() = delete;  // lives as long as the process: its threads do
  struct State;
  State* state_;
};

// Calls each(row) for all rows of something simple, on the threads that are worth it.
template <class F>
void for_all(std::int64_t rows, std::int64_t width, F each) {
  const std::int64_t part = std::max<std::int64_t>(1, kSimple / std::max<std::int64_t>(1, width));
  Pool::shared().run((rows + part - 1) / part, [&](std::int64_t i) {
    for (std::int64_t row = i * part; row < std::min(rows, (i + 1) * part); row++) each(row);
  });
}

}  // namespace mlxrunner
