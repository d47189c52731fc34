// What the halves of a block have around them: rows are normalised, and added to what comes out.
#pragma once

#include "constants.hpp"
#include "cpu.hpp"
#include "pool.hpp"

namespace mlxrunner {

// A piece of scratch memory after the other, each beginning with a line of the cache.
class Pieces {
 public:
  static std::int64_t padded(std::int64_t floats) { return (floats + 15) / 16 * 16; }

  explicit Pieces(float* first) : next_(first) {}
  float* of(std::int64_t floats) { return std::exchange(next_, next_ + padded(floats)); }

 private:
  float* next_;
};

// x: packed rows, as out.
inline void normalise(const RmsNorm& norm, const float* x, std::int64_t count, std::int64_t width,
                      float* out) {
  const float* weight = norm.weight.data<float>();
  for_all(count, width, [&](std::int64_t row) {
    kernels().rms_norm(x + row * width, width, weight, norm.eps, out + row * width);
  });
}

inline void add(const float* x, std::int64_t count, std::int64_t width, float* out) {
  for_all(count, width, [&](std::int64_t row) {
    for (std::int64_t i = row * width; i < (row + 1) * width; i++) out[i] = x[i] + out[i];
  });
}

}  // namespace mlxrunner
