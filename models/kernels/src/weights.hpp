// What an operation holds that is the same whenever it is called: weights.
//
// Arrays that are there need not be an operation's inputs: who works keeps them by keeping the
// object that they belong to, and MLX has so many fewer to look after in each step.
#pragma once

#include <utility>
#include <vector>

#include "products.hpp"

namespace mlxrunner {

struct RmsNorm {
  mx::array weight;  // [width] float32
  float eps;
};

inline RmsNorm checked(RmsNorm norm, int width) {
  want(norm.weight.dtype() == mx::float32 && norm.weight.shape() == mx::Shape{width},
       "a norm's weight must be float32, as long as what it normalises");
  return {lined(norm.weight), norm.eps};
}

// A product with the arrays that make it up.
struct Constant {
  Product product;
  std::vector<mx::array> arrays;

  explicit Constant(Product given) : product(std::move(given)), arrays(product.arrays()) {
    want(!product.stacked(), "a stack of matrices needs gather");
  }
  // Once they are evaluated.
  Factor factor() const { return {product.matrix(arrays, 0), product.bias(arrays, 0)}; }
};

// Those that are not there yet, as weights are not that nobody has read.
class Awaited {
 public:
  void add(const mx::array& one) { arrays_.push_back(one); }
  void add(const Constant& one) {
    arrays_.insert(arrays_.end(), one.arrays.begin(), one.arrays.end());
  }
  // Puts them among an operation's inputs, which are evaluated before it is.
  void join(std::vector<mx::array>& in) {
    if (arrays_.empty()) return;
    std::erase_if(arrays_, [](const mx::array& one) { return one.is_available(); });
    in.insert(in.end(), arrays_.begin(), arrays_.end());
  }

 private:
  std::vector<mx::array> arrays_;
};

}  // namespace mlxrunner
