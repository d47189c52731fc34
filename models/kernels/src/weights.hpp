// The weights of an operation.
//
// Evaluated arrays need not be inputs of an operation. The operation keeps the owner of these
// arrays alive, so MLX has to track fewer arrays in each step.
#pragma once

#include <utility>
#include <vector>

#include "matmul_ops.hpp"

namespace mlxrunner {

struct RmsNorm {
  mx::array weight;  // [width] float32
  float eps;
};

inline RmsNorm check_norm(RmsNorm norm, int width) {
  require(norm.weight.dtype() == mx::float32 && norm.weight.shape() == mx::Shape{width},
          "a norm's weight must be float32, as long as what it normalizes");
  return {contiguous_rows(norm.weight), norm.eps};
}

// A matrix product with its arrays.
struct BoundMatmul {
  Matmul matmul;
  std::vector<mx::array> arrays;

  explicit BoundMatmul(Matmul source) : matmul(std::move(source)), arrays(matmul.arrays()) {
    require(!matmul.stacked(), "a stack of matrices needs gather");
  }
  // may only be called after the arrays are evaluated
  MatrixAndBias matrix_and_bias() const {
    return {matmul.matrix(arrays, 0), matmul.bias(arrays, 0)};
  }
};

// Weights that are not evaluated yet, for example weights that were never read.
class PendingInputs {
 public:
  void add(const mx::array& one) { arrays_.push_back(one); }
  void add(const BoundMatmul& one) {
    arrays_.insert(arrays_.end(), one.arrays.begin(), one.arrays.end());
  }
  // Appends the weights to the inputs of an operation, so that MLX evaluates them before the
  // operation.
  void append_pending(std::vector<mx::array>& in) {
    if (arrays_.empty()) return;
    std::erase_if(arrays_, [](const mx::array& one) { return one.is_available(); });
    in.insert(in.end(), arrays_.begin(), arrays_.end());
  }

 private:
  std::vector<mx::array> arrays_;
};

}  // namespace mlxrunner
