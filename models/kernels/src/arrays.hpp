// What all primitives need of MLX's arrays.
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

// Primitives here run on the CPU, and nobody takes gradients of them.
class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("mlxrunner's kernels run on the CPU");
  }
};

inline void want(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

inline mx::Stream cpu() { return mx::default_stream(mx::Device::cpu); }

// Memory that begins with a line of the cache, and holds anything.
class Room {
 public:
  Room() = default;
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room() { release(); }

  // At least so many floats; what was there is gone where there were fewer.
  float* of(std::size_t floats) {
    if (floats > size_) {
      // half as much again: a sequence needs a little more with each position
      const std::size_t size = std::max(floats, size_ + size_ / 2);
      release();  // first: never both at once
      data_ = static_cast<float*>(::operator new(size * sizeof(float), kLine));
      size_ = size;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kLine{64};

  void release() {
    if (data_) ::operator delete(data_, kLine);
    data_ = nullptr, size_ = 0;
  }

  float* data_ = nullptr;
  std::size_t size_ = 0;
};

// Memory of this thread, valid until the next call on this thread with the same `Which`: each place
// that needs some has its own. It is kept while the thread lives.
template <class Which>
float* scratch(std::size_t floats) {
  static thread_local Room room;
  return room.of(floats);
}

// Calls each(index, offset) for every row (last axis) of what has this shape and these strides, in
// order; offset: of its first number, in numbers.
template <class F>
void for_rows(const mx::Shape& shape, const mx::Strides& strides, F each) {
  const int axes = static_cast<int>(shape.size()) - 1;
  std::int64_t rows = 1;
  for (int i = 0; i < axes; i++) rows *= shape[i];
  std::vector<std::int64_t> at(axes > 0 ? axes : 0, 0);
  std::int64_t offset = 0;
  for (std::int64_t row = 0; row < rows; row++) {
    each(row, offset);
    for (int i = axes - 1; i >= 0; i--) {
      offset += strides[i];
      if (++at[i] < shape[i]) break;
      offset -= at[i] * strides[i];
      at[i] = 0;
    }
  }
}

// How a float32 array's rows lie, kept for when the array itself is gone.
struct View {
  const float* data;
  mx::Shape shape;
  mx::Strides strides;
  bool packed;  // row after row without gaps

  explicit View(const mx::array& a)
      : data(a.data<float>()), shape(a.shape()), strides(a.strides()),
        packed(a.flags().row_contiguous) {}
  // [batch, heads, 1, width] that lies packed.
  View(const float* rows, int batch, int heads, int width)
      : data(rows), shape{batch, heads, 1, width},
        strides{static_cast<std::int64_t>(heads) * width, width, width, 1}, packed(true) {}

  // All of it as packed rows: in place where it is that, else copied into `room`.
  const float* rows(float* room) const {
    if (packed) return data;
    const std::int64_t width = shape.back(), step = strides.back();
    for_rows(shape, strides, [&](std::int64_t row, std::int64_t offset) {
      for (std::int64_t k = 0; k < width; k++) room[row * width + k] = data[offset + k * step];
    });
    return room;
  }
};

// The same numbers row after row, without an operation where they are known to lie so.
inline mx::array lined(const mx::array& a) {
  if (a.is_available() && a.flags().row_contiguous) return a;
  return mx::contiguous(a, false, cpu());
}

inline void allocate(mx::array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

}  // namespace mlxrunner
