// Memory that ends at a guard page, so that out-of-bounds accesses are detected even if sanitizers
// do not check them (masked loads). It starts at its size before the page: in general aligned only to
// the size of a number.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

template <class T>
class Guarded {
 public:
  explicit Guarded(std::size_t count, std::size_t alignment = sizeof(T)) : count_(count) {
    const std::size_t page = page_size();
    const std::size_t bytes = (count * sizeof(T) + alignment - 1) / alignment * alignment;
    length_ = (bytes + page - 1) / page * page + page;
    base_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) std::abort();
    auto* end = static_cast<std::byte*>(base_) + length_ - page;
    if (mprotect(end, page, PROT_NONE) != 0) std::abort();
    data_ = reinterpret_cast<T*>(end - bytes);
  }
  ~Guarded() { munmap(base_, length_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  // Make the memory read-only, like the mapped pages of a file.
  void seal() { mprotect(base_, length_ - page_size(), PROT_READ); }

  T* data() { return data_; }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) { return data_[i]; }

 private:
  static std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

  std::size_t count_, length_;
  void* base_;
  T* data_;
};

// Random numbers that are the same on every machine.
class Draw {
 public:
  explicit Draw(std::uint32_t seed) : engine_(seed) {}
  std::int64_t in(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  template <class T>
  T of(std::initializer_list<T> all) {
    return *(all.begin() + in(0, static_cast<std::int64_t>(all.size()) - 1));
  }
  float number() { return static_cast<float>(in(-1000, 1000)) * 0.001f; }
  std::uint8_t byte() { return static_cast<std::uint8_t>(engine_()); }

 private:
  std::mt19937 engine_;
};

inline void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Hash of the bits of all numbers. All NaNs count as the same value.
class Fingerprint {
 public:
  void see(const float* p, std::size_t count) {
    for (std::size_t i = 0; i < count; i++) {
      std::uint32_t bits;
      std::memcpy(&bits, p + i, 4);
      if (p[i] != p[i]) bits = 0x7fc00000;
      value_ = (value_ ^ bits) * 1099511628211u;
    }
  }
  unsigned long long value() const { return value_; }

 private:
  std::uint64_t value_ = 1469598103934665603u;
};
