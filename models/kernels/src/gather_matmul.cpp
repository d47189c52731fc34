// Products with matrices out of a stack, of which each row of x meets those chosen for it.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "products.hpp"

namespace mlxrunner {

namespace {

class ChosenPrimitive : public CpuPrimitive {
 public:
  ChosenPrimitive(mx::Stream stream, Product product)
      : CpuPrimitive(stream), product_(std::move(product)) {}

  // x [..., 1, in], broadcast to the rows that chosen names, one of the stack each.
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    std::vector<Matrix> stack;
    for (int i = 0; i < product_.stacked(); i++) stack.push_back(product_.matrix(in, 2, i));
    auto* chosen = in[1].data<std::int32_t>();
    const std::int64_t count = in[1].size();
    const float* bias = product_.bias(in, 2);
    float* y = outs[0].data<float>();
    mx::cpu::get_command_encoder(stream()).dispatch(
        [=, x = View(in[0]), stack = std::move(stack)] { work(x, stack, chosen, count, bias, y); });
  }

  const char* name() const override { return "mlxrunner::Chosen"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  // All rows of one matrix side by side: each matrix is read once.
  static void work(const View& x, const std::vector<Matrix>& stack, const std::int32_t* chosen,
                   std::int64_t count, const float* bias, float* y) {
    if (!count) return;
    const std::int64_t width = stack[0].width, rows = stack[0].rows, step = x.strides.back();
    const auto number = static_cast<std::int32_t>(stack.size());
    std::vector<std::int64_t> offsets, order(count);
    for_rows(x.shape, x.strides, [&](std::int64_t, std::int64_t at) { offsets.push_back(at); });
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](auto a, auto b) { return chosen[a] < chosen[b]; });
    std::vector<float> of_x, of_y;
    for (std::int64_t from = 0, to; from < count; from = to) {
      const std::int32_t which = chosen[order[from]];
      for (to = from; to < count && chosen[order[to]] == which;) to++;
      const std::int64_t many = to - from;
      if (which < 0 || which >= number) {  // as in MLX nothing is promised; but nothing breaks
        for (std::int64_t i = from; i < to; i++) std::fill_n(y + order[i] * rows, rows, 0.0f);
        continue;
      }
      of_x.resize(many * width), of_y.resize(many * rows);
      for (std::int64_t i = 0; i < many; i++)
        for (std::int64_t k = 0; k < width; k++)
          of_x[i * width + k] = x.data[offsets[order[from + i]] + k * step];
      multiply(stack[which], of_x.data(), many, bias ? bias + which * rows : nullptr, of_y.data());
      for (std::int64_t i = 0; i < many; i++)
        std::memcpy(y + order[from + i] * rows, &of_y[i * rows], rows * sizeof(float));
    }
  }

  Product product_;
};

}  // namespace

mx::array Product::choose(const mx::array& given, const mx::array& chosen) const {
  if (!stacked_) throw std::invalid_argument("gather needs a stack of matrices");
  if (given.ndim() < 2 || given.shape(-2) != 1)
    throw std::invalid_argument("x must be [..., 1, " + std::to_string(inputs_) + "]");
  const mx::Shape outer(given.shape().begin(), given.shape().end() - 2);
  mx::Shape shape = mx::broadcast_shapes(outer, chosen.shape());
  const mx::array ids =
      lined(mx::broadcast_to(mx::astype(chosen, mx::int32, cpu()), shape, cpu()));
  shape.push_back(1);
  shape.push_back(inputs_);
  const mx::array x = mx::broadcast_to(widened(given, inputs_), shape, cpu());
  shape.back() = outputs_;
  std::vector<mx::array> in{x, ids};
  for (mx::array& one : arrays()) in.push_back(std::move(one));
  const mx::array y(std::move(shape), mx::float32,
                    std::make_shared<ChosenPrimitive>(cpu(), *this), std::move(in));
  return mx::astype(y, given.dtype(), cpu());
}

}  // namespace mlxrunner
