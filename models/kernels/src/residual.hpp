// The common parts of both halves of a block: the norm before the half, and the residual addition
// after it.
#pragma once

#include <optional>

#include "weights.hpp"
#include "isa_dispatch.hpp"
#include "thread_pool.hpp"

namespace mlxrunner {

// Divides scratch memory into parts that are aligned to cache lines.
class ScratchArena {
 public:
  static std::int64_t round_up(std::int64_t floats) { return (floats + 15) / 16 * 16; }

  explicit ScratchArena(float* first) : next_(first) {}
  float* allocate(std::int64_t floats) { return std::exchange(next_, next_ + round_up(floats)); }

 private:
  float* next_;
};

// x and out: contiguous rows.
inline void normalize(const RmsNorm& norm, const float* x, std::int64_t count, std::int64_t width,
                      float* out) {
  const float* weight = norm.weight.data<float>();
  parallel_for_rows(count, width, [&](std::int64_t row) {
    kernels().rms_norm(x + row * width, width, weight, norm.eps, out + row * width);
  });
}

inline void add(const float* x, std::int64_t count, std::int64_t width, float* out) {
  parallel_for_rows(count, width, [&](std::int64_t row) {
    for (std::int64_t i = row * width; i < (row + 1) * width; i++) out[i] = x[i] + out[i];
  });
}

// Ends a half: normalizes out, adds x, and multiplies by the scale, if there is one.
inline void finish(const std::optional<RmsNorm>& norm, const float* x,
                   const std::optional<mx::array>& scale, std::int64_t count, std::int64_t width,
                   float* out) {
  if (norm) normalize(*norm, out, count, width, out);
  add(x, count, width, out);
  if (!scale) return;
  const float factor = *scale->data<float>();
  for (std::int64_t i = 0; i < count * width; i++) out[i] *= factor;
}

inline std::optional<RmsNorm> check_norm(std::optional<RmsNorm> norm, int width) {
  if (norm) norm = check_norm(std::move(*norm), width);
  return norm;
}

inline std::optional<mx::array> check_scale(std::optional<mx::array> scale) {
  if (!scale) return scale;
  require(scale->dtype() == mx::float32 && scale->size() == 1, "a scale must be one float32");
  return contiguous_rows(*scale);
}

}  // namespace mlxrunner
