// Helpers for MLX arrays that all primitives use.
#pragma once

#include <mlx/allocator.h>
#include <mlx/array.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>
#include <mlx/primitives.h>
#include <mlx/utils.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <stdexcept>
#include <vector>

namespace mlxrunner {

namespace mx = mlx::core;

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

// The layout of a float32 array. It remains usable after the array object is destroyed.
struct View {
  const float* data;
  mx::Shape shape;
  mx::Strides strides;
  bool contiguous;  // rows follow each other without gaps

  explicit View(const mx::array& a)
      : data(a.data<float>()), shape(a.shape()), strides(a.strides()),
        contiguous(a.flags().row_contiguous) {}
  // Contiguous rows of shape [batch, heads, 1, width].
  View(const float* first_row, int batch, int heads, int width)
      : data(first_row), shape{batch, heads, 1, width},
        strides{static_cast<std::int64_t>(heads) * width, width, width, 1}, contiguous(true) {}

  // Returns all rows as contiguous memory. The result is the data itself if it is contiguous, and a
  // copy in `buffer` otherwise.
  const float* rows(float* buffer) const {
    if (contiguous) return data;
    const std::int64_t width = shape.back(), step = strides.back();
    for_rows(shape, strides, [&](std::int64_t row, std::int64_t offset) {
      for (std::int64_t k = 0; k < width; k++) buffer[row * width + k] = data[offset + k * step];
    });
    return buffer;
  }
};

// Returns the array with contiguous rows. If the array is evaluated and row-contiguous, no
// operation is added to the graph.
inline mx::array contiguous_rows(const mx::array& a) {
  if (a.is_available() && a.flags().row_contiguous) return a;
  return mx::contiguous(a, false, cpu());
}

inline void allocate(mx::array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

}  // namespace mlxrunner
