// Spin-waiting for another thread.
//
// A sleep and a wake-up take tens of microseconds, which is longer than most waits in a decode
// step.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>

namespace mlxrunner {

// The time to spin. Until kPauseTime, the thread does not yield the CPU. After that, it yields,
// because another thread may be building the next step.
inline constexpr auto kPauseTime = std::chrono::microseconds(10);
inline constexpr auto kSpinTimeout = std::chrono::microseconds(300);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns true as soon as `word` differs from `old_value`. Returns false after the timeout.
template <class T>
bool spin_until_changed(const std::atomic<T>& word, T old_value,
                        std::chrono::microseconds timeout = kSpinTimeout) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0;; i++) {
    if (word.load(std::memory_order_acquire) != old_value) return true;
    if (i % 16 != 15) {
      pause();
      continue;
    }
    const auto elapsed = std::chrono::steady_clock::now() - start;
    if (elapsed > timeout) return false;
    if (elapsed > kPauseTime) sched_yield();
  }
}

}  // namespace mlxrunner
