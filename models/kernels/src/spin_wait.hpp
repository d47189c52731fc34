// Waiting for another thread that is about to do something.
//
// To sleep and be woken takes tens of microseconds, longer than most of what is waited for in a
// decode step.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>

namespace mlxrunner {

// How long to keep looking: first without letting go of the CPU, then letting others have it, who
// may be building the next step.
inline constexpr auto kEager = std::chrono::microseconds(10);
inline constexpr auto kPatient = std::chrono::microseconds(300);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns true as soon as `word` is no longer `known`, false where that does not happen for long.
template <class T>
bool changed(const std::atomic<T>& word, T known, std::chrono::microseconds patient = kPatient) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0;; i++) {
    if (word.load(std::memory_order_acquire) != known) return true;
    if (i % 16 != 15) {
      pause();
      continue;
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited > patient) return false;
    if (waited > kEager) sched_yield();
  }
}

}  // namespace mlxrunner
