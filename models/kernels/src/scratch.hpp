// Thread-local memory for intermediate results.
//
// Knows: sizes. Must not know: MLX.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>

namespace mlxrunner {

// An uninitialized float buffer, aligned to a cache line.
class ScratchBuffer {
 public:
  ScratchBuffer() = default;
  ScratchBuffer(const ScratchBuffer&) = delete;
  ScratchBuffer& operator=(const ScratchBuffer&) = delete;
  ~ScratchBuffer() { release(); }

  // Returns room for at least `floats` floats. If the buffer has to grow, its contents are lost.
  float* resize(std::size_t floats) {
    if (floats > capacity_) {
      // grow by at least half, because each new position of a sequence needs a little more
      const std::size_t capacity = std::max(floats, capacity_ + capacity_ / 2);
      release();  // free the old buffer first, so that both are never allocated at once
      data_ = static_cast<float*>(::operator new(capacity * sizeof(float), kCacheLine));
      capacity_ = capacity;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kCacheLine{64};

  void release() {
    if (data_) ::operator delete(data_, kCacheLine);
    data_ = nullptr, capacity_ = 0;
  }

  float* data_ = nullptr;
  std::size_t capacity_ = 0;
};

// Returns thread-local scratch memory. It is valid until the next call on this thread with the same
// `Tag`, so each use has its own tag. The memory is freed when the thread ends.
template <class Tag>
float* scratch(std::size_t floats) {
  static thread_local ScratchBuffer buffer;
  return buffer.resize(floats);
}

}  // namespace mlxrunner
