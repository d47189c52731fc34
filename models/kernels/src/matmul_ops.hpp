// Products with a matrix, as operations of MLX.
#pragma once

#include <algorithm>
#include <optional>

#include "arrays.hpp"
#include "kernels.hpp"

namespace mlxrunner {

// A matrix as a layer holds it: [out, in] of float32, bfloat16 or float16, or MLX's affine packing
// of one in 4 or 8 bits, with scales and biases [out, in / group]; all in strips (stripped.hpp).
// bias: [out] float32, added to the sum. Or a stack of such, one behind the other, with an axis more
// in front of each.
class Product {
 public:
  Product(mx::array weight, std::optional<mx::array> scales, std::optional<mx::array> biases,
          std::optional<mx::array> bias, int group, int bits);

  // x [..., in] -> [..., out], in x's type; sums are made in float32.
  mx::array operator()(const mx::array& x) const;

  // Of a stack, x [..., 1, in] with the matrices chosen [..., k], axes in front that broadcast ->
  // [..., k, 1, out], in x's type.
  mx::array choose(const mx::array& x, const mx::array& chosen) const;

  // activation(gate(x)) * up(x), in x's type. Raises where the two differ in shape or format.
  friend mx::array gated(const Product& gate, const Product& up, Activation, const mx::array& x);

  // ids [...] of rows -> [..., in] float32.
  mx::array rows(const mx::array& ids) const;

  int outputs() const { return outputs_; }
  int inputs() const { return inputs_; }
  int stacked() const { return stacked_; }
  bool alike(const Product& other) const;

  // The arrays that make it up, each row after row, and how they are read once they are evaluated:
  // those from `first` on. Matrix and bias of the stack's `index`.
  std::vector<mx::array> arrays() const;
  Matrix matrix(const std::vector<mx::array>& arrays, std::size_t first, int index = 0) const;
  const float* bias(const std::vector<mx::array>& arrays, std::size_t first) const;

 private:
  mx::array weight_;
  std::optional<mx::array> scales_, biases_, bias_;
  Weight kind_;
  Float scale_ = Float::f32;
  int group_, stacked_ = 0, outputs_, inputs_;
};

// Multiplies on the threads of the pool. x: packed rows [count, width].
void multiply(const Matrix& w, const float* x, std::int64_t count, const float* bias, float* y);

// What `multiply` consists of. Rows of x as the matrix takes them, valid until the next call on
// this thread; and how many rows of the matrix one thread takes at a time.
Rows arranged(const Matrix& w, const float* x, std::int64_t count);
std::int64_t part_rows(const Matrix& w, std::int64_t count);

// A matrix and what is added to the sums: [rows], or nullptr.
struct Factor {
  Matrix w;
  const float* bias;
};

// Rows of x that are taken together: what is arranged, and what threads make on the way, would else
// be as long as a prompt.
inline constexpr std::int64_t kSlab = 768;

// Calls each(from, many) for all `count` rows, as few times as that allows.
template <class F>
void for_slabs(std::int64_t count, F each) {
  const std::int64_t slabs = (count + kSlab - 1) / kSlab;
  for (std::int64_t i = 0, from = 0; i < slabs; i++) {
    const std::int64_t to = count * (i + 1) / slabs;
    each(from, to - from);
    from = to;
  }
}

// x as float32. Raises where its last axis is not `width` long, and for other types than a matrix
// may have.
mx::array widened(const mx::array& x, int width);

mx::array gated(const Product& gate, const Product& up, Activation, const mx::array& x);

}  // namespace mlxrunner
