// Helpers for MLX arrays that all primitives use.
#pragma once

#include <mlx/allocator.h>
#include <mlx/array.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>
#include <mlx/primitives.h>
#include <mlx/utils.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "scratch.hpp"

namespace mlxrunner {

namespace mx = mlx::core;

inline constexpr std::uintptr_t kCacheLine = 64;

// The base class of the primitives. They run only on the CPU and have no gradients.
class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("mlxrunner's kernels run on the CPU");
  }
};

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

inline mx::Stream cpu() { return mx::default_stream(mx::Device::cpu); }

// Calls visit(row, offset) for every row (last axis) of an array with this shape and these strides,
// in order. offset: the index of the row's first element, in elements.
template <class F>
void for_rows(const mx::Shape& shape, const mx::Strides& strides, F visit) {
  const int axes = static_cast<int>(shape.size()) - 1;
  std::int64_t rows = 1;
  for (int i = 0; i < axes; i++) rows *= shape[i];
  std::vector<std::int64_t> index(axes > 0 ? axes : 0, 0);
  std::int64_t offset = 0;
  for (std::int64_t row = 0; row < rows; row++) {
    visit(row, offset);
    for (int i = axes - 1; i >= 0; i--) {
      offset += strides[i];
      if (++index[i] < shape[i]) break;
      offset -= index[i] * strides[i];
      index[i] = 0;
    }
  }
}

// The layout of an array of `Number`. It remains usable after the array object is destroyed.
template <class Number>
struct ArrayView {
  const Number* data;
  mx::Shape shape;
  mx::Strides strides;
  bool contiguous;  // rows follow each other without gaps

  explicit ArrayView(const mx::array& a)
      : data(a.data<Number>()), shape(a.shape()), strides(a.strides()),
        contiguous(a.flags().row_contiguous) {}
  // Contiguous rows of shape [batch, heads, 1, width].
  ArrayView(const Number* first_row, int batch, int heads, int width)
      : data(first_row), shape{batch, heads, 1, width},
        strides{static_cast<std::int64_t>(heads) * width, width, width, 1}, contiguous(true) {}

  // Returns all rows as contiguous memory. The result is the data itself if it is contiguous, and a
  // copy in `buffer` otherwise.
  const Number* rows(Number* buffer) const {
    if (contiguous) return data;
    const std::int64_t width = shape.back(), step = strides.back();
    for_rows(shape, strides, [&](std::int64_t row, std::int64_t offset) {
      for (std::int64_t k = 0; k < width; k++) buffer[row * width + k] = data[offset + k * step];
    });
    return buffer;
  }
};

using View = ArrayView<float>;

// Returns the array with contiguous rows. If the array is evaluated and row-contiguous, no
// operation is added to the graph.
inline mx::array contiguous_rows(const mx::array& a) {
  if (a.is_available() && a.flags().row_contiguous) return a;
  return mx::contiguous(a, false, cpu());
}

inline void allocate(mx::array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

// Allocates memory that begins at a cache line, for matrices. MLX's buffers begin 8 or 24 bytes
// after one, so each load of 64 bytes would read two lines.
inline void allocate_aligned(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes() + kCacheLine));
  const auto padding = -reinterpret_cast<std::uintptr_t>(out.data<char>()) % kCacheLine;
  out.copy_shared_buffer(out, out.strides(), out.flags(), out.data_size(),
                         static_cast<std::int64_t>(padding / out.itemsize()));
}

}  // namespace mlxrunner
