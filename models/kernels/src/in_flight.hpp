// Memory that work under way still needs, and when it may be written to again.
//
// MLX gives a primitive its arrays before the work of the primitives ahead of it is done, and keeps
// what those use until then: so a buffer looks as if somebody shared it, if the step that wrote to
// it last is not yet through. A buffer of keys is worth waiting for, since the other way is to copy
// it. The stream that works never waits for the thread that asks, and what it works on meanwhile is
// a whole step but one layer.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "arrays.hpp"

namespace mlxrunner {

// Belongs to one piece of work. Copies are one and the same, and the last of them lets go of what
// is still held: work that failed, or was never begun, keeps nobody waiting.
class Held {
 public:
  explicit Held(std::size_t arrays);
  void add(const mx::array& a);
  // When the work is done, which is before MLX lets go of it.
  void release();

 private:
  struct Memory;
  std::shared_ptr<Memory> memory_;
};

// Whether `a` may be written to, now or, if only work under way keeps it, once that is done.
bool released(const mx::array& a);

// Buffers that a primitive writes to: those that it was given where nobody else holds them, else
// copies.
class Lent {
 public:
  // When it gets its arrays: in[first..] are the buffers, and outs[1..] what becomes of them.
  // outs[0] has its memory already.
  Lent(const std::vector<mx::array>& in, std::size_t first, std::vector<mx::array>& outs);
  // Around the work.
  void begin() const;
  void end() { held_.release(); }

 private:
  Held held_;
  std::vector<std::pair<View, float*>> copies_;
};

}  // namespace mlxrunner
