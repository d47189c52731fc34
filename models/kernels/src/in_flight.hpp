// Tracks the memory that work in flight uses, and when it may be written again.
//
// MLX passes arrays to a primitive before the work of earlier primitives is done, and retains their
// arrays until then. Therefore a buffer appears to be shared until the last step that wrote it is
// finished. For a buffer of keys, waiting is cheaper than copying. The computing stream never waits
// for the thread that waits here, and it still has all but one layer of a step to compute.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "arrays.hpp"

namespace mlxrunner {

// The arrays of one unit of work. Copies share their state. The last copy releases the remaining
// arrays, so that work that failed or never started does not block a waiting thread.
class InFlightArrays {
 public:
  explicit InFlightArrays(std::size_t arrays);
  void add(const mx::array& a);
  // Call this when the work is done, which is before MLX releases the arrays.
  void release();

 private:
  struct Memory;
  std::shared_ptr<Memory> memory_;
};

// Returns whether `a` may be written. If only work in flight uses `a`, waits until that work is
// done.
bool wait_until_writable(const mx::array& a);

// The buffers that a primitive writes. They are the inputs themselves if these have no other
// reference, and copies otherwise. Their numbers have 16 or 32 bits.
class WritableBuffers {
 public:
  // Call this when the primitive receives its arrays. in[first..] are the buffers, and outs[1..]
  // are their updated versions. outs[0] is already allocated.
  WritableBuffers(const std::vector<mx::array>& in, std::size_t first,
                  std::vector<mx::array>& outs);
  // call copy_shared before the work and release after it
  void copy_shared() const;
  void release() { in_flight_.release(); }

 private:
  InFlightArrays in_flight_;
  std::vector<std::function<void()>> copies_;
};

// The buffers that a primitive reads, and that a later primitive may write. It could not wait for
// work that is not registered.
class ReadBuffers {
 public:
  // Call this when the primitive receives its arrays. in[first..] are the buffers.
  ReadBuffers(const std::vector<mx::array>& in, std::size_t first);
  // call this after the work
  void release() { in_flight_.release(); }

 private:
  InFlightArrays in_flight_;
};

}  // namespace mlxrunner
