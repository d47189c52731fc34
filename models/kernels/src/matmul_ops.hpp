// Matrix products as MLX operations.
#pragma once

#include <algorithm>
#include <optional>

#include "arrays.hpp"
#include "kernels.hpp"

namespace mlxrunner {

// The matrix of a layer. It is [out, in] of float32, bfloat16 or float16, or has MLX's affine
// packing in 4 or 8 bits with scales and biases [out, in / group]. All arrays are in panels
// (repack.hpp). bias: [out] float32, added to the product. The object can also be a stack of such
// matrices, with an additional first axis. activations: the number of bits to which a product with
// a quantized matrix rounds the elements of x: 8, 16 or 24. On tiles, a product with a bfloat16
// matrix rounds them to 16 bits unless it is 24.
class Matmul {
 public:
  Matmul(mx::array weight, std::optional<mx::array> scales, std::optional<mx::array> biases,
         std::optional<mx::array> bias, int group, int bits, int activations);

  // A matrix, or a stack of matrices, with a block type of GGUF. panels: the result of repack_blocks
  // for matrices of [outputs, inputs] and this type.
  static Matmul from_blocks(mx::array panels, int type_id, int outputs, int inputs,
                            std::optional<mx::array> bias, int activations);

  // Maps x [..., in] to [..., out], in the type of x. The sums are float32.
  mx::array operator()(const mx::array& x) const;

  // Computes the same product by its definition, in plain C++, to test the kernels; with a bfloat16
  // matrix, the product on tiles. Raises if the matrix has a different format, if it is a stack, or
  // if there is a bias.
  mx::array multiply_by_reference(const mx::array& x) const;

  // Multiplies x [..., 1, in] by the matrices indices [..., k] of a stack. Returns [..., k, 1, out]
  // in the type of x. Leading axes are broadcast.
  mx::array gather(const mx::array& x, const mx::array& indices) const;

  // Returns activation(gate(x)) * up(x), in the type of x. Raises if gate and up differ in shape or
  // format.
  friend mx::array gate_up(const Matmul& gate, const Matmul& up, Activation, const mx::array& x);

  // Returns rows [..., in] as float32. ids: the row numbers [...].
  mx::array dequantize_rows(const mx::array& ids) const;

  int outputs() const { return outputs_; }
  int inputs() const { return inputs_; }
  int stacked() const { return stacked_; }
  bool has_same_format(const Matmul& other) const;

  // Returns the arrays of the matrix, with contiguous rows, to be used as inputs of an operation.
  // The functions below read evaluated inputs, in which the arrays of the matrix begin at `first`.
  // They return the matrix and the bias with number `index` of a stack.
  std::vector<mx::array> arrays() const;
  Matrix matrix(const std::vector<mx::array>& arrays, std::size_t first, int index = 0) const;
  const float* bias(const std::vector<mx::array>& arrays, std::size_t first) const;

 private:
  explicit Matmul(mx::array weight) : weight_(std::move(weight)) {}

  mx::array weight_;
  std::optional<mx::array> scales_, biases_, bias_;
  WeightFormat format_;
  ScaleType scale_type_ = ScaleType::f32;
  int group_ = 0, planes_ = 0, stacked_ = 0, outputs_ = 0, inputs_ = 0;
};

// Multiplies on the thread pool. x: contiguous rows [count, width].
void multiply(const Matrix& w, const float* x, std::int64_t count, const float* bias, float* y);

// The steps of `multiply`. pack_rows returns rows of x in the layout that the matrix needs. They
// are valid until the next call on this thread. rows_per_task returns the number of rows of the
// matrix per task.
PackedRows pack_rows(const Matrix& w, const float* x, std::int64_t count);
std::int64_t rows_per_task(const Matrix& w, std::int64_t count);

// A matrix and its bias, [rows] or nullptr.
struct MatrixAndBias {
  Matrix w;
  const float* bias;
};

// Returns the maximum number of rows of x per batch. Without this limit, packed rows and
// intermediate results would grow with the length of a prompt.
std::int64_t max_input_rows(const Matrix& w);

// Divides `count` rows into as few batches as possible and calls function(from, num_rows) for each.
template <class F>
void for_input_batches(const Matrix& w, std::int64_t count, F function) {
  const std::int64_t max_rows = max_input_rows(w), batches = (count + max_rows - 1) / max_rows;
  for (std::int64_t i = 0, from = 0; i < batches; i++) {
    const std::int64_t to = count * (i + 1) / batches;
    function(from, to - from);
    from = to;
  }
}

// Returns x as float32. Raises if its last axis does not have the length `width`, or if a matrix
// cannot have its type.
mx::array to_float32(const mx::array& x, int width);

mx::array gate_up(const Matmul& gate, const Matmul& up, Activation, const mx::array& x);

}  // namespace mlxrunner
