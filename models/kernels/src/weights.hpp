// The weights of an operation.
//
// Evaluated arrays need not be inputs of an operation: the operation keeps their owner alive, so
// MLX has fewer arrays to track in each step.
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
          "a norm's weight must be float32, as long as what it normalises");
  return {contiguous_rows(norm.weight), norm.eps};
}

// A matrix product with its arrays.
struct BoundMatmul {
  Matmul matmul;
  std::vector<mx::array> arrays;

  explicit BoundMatmul(Matmul source) : matmul(std::move(source)), arrays(matmul.arrays()) {
    require(!matmul.stacked(), "a stack of matrices needs gather");
  }
  // Only after the arrays are evaluated.
  MatrixAndBias matrix_and_bias() const {
    return {matmul.matrix(arrays, 0), matmul.bias(arrays, 0)};
  }
};

// Weights that are not evaluated yet, such as weights that were never read.
class PendingInputs {
 public:
  void add(const mx::array& one) { arrays_.push_back(one); }
  void add(const BoundMatmul& one) {
    arrays_.insert(arrays_.end(), one.arrays.begin(), one.arrays.end());
  }
  // Appends them to an operation's inputs, so that MLX evaluates them before the operation.
  void append_pending(std::vector<mx::array>& in) {
    if (arrays_.empty()) return;
    std::erase_if(arrays_, [](const mx::array& one) { return one.is_available(); });
    in.insert(in.end(), arrays_.begin(), arrays_.end());
  }

 private:
  std::vector<mx::array> arrays_;
};

}  // namespace mlxrunner
