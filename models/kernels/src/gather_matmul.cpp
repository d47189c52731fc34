// Products with the matrices of a stack. Each row of x has its own indices.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "matmul_ops.hpp"

namespace mlxrunner {

namespace {

class GatherMatmulPrimitive : public CpuPrimitive {
 public:
  GatherMatmulPrimitive(mx::Stream stream, Matmul matmul)
      : CpuPrimitive(stream), matmul_(std::move(matmul)) {}

  // x [..., 1, in] is broadcast to the shape of indices, with one matrix of the stack per row.
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    std::vector<Matrix> stack;
    for (int i = 0; i < matmul_.stacked(); i++) stack.push_back(matmul_.matrix(in, 2, i));
    auto* indices = in[1].data<std::int32_t>();
    const std::int64_t count = in[1].size();
    const float* bias = matmul_.bias(in, 2);
    float* y = outs[0].data<float>();
    mx::cpu::get_command_encoder(stream()).dispatch([=, x = View(in[0]), stack = std::move(stack)] {
      run_grouped(x, stack, indices, count, bias, y);
    });
  }

  const char* name() const override { return "mlxrunner::GatherMatmul"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  // Groups the rows by matrix, so that each matrix is read only once.
  static void run_grouped(const View& x, const std::vector<Matrix>& stack,
                          const std::int32_t* indices, std::int64_t count, const float* bias,
                          float* y) {
    if (!count) return;
    const std::int64_t width = stack[0].width, rows = stack[0].rows, step = x.strides.back();
    const auto num_matrices = static_cast<std::int32_t>(stack.size());
    std::vector<std::int64_t> offsets, order(count);
    for_rows(x.shape, x.strides, [&](std::int64_t, std::int64_t at) { offsets.push_back(at); });
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](auto a, auto b) { return indices[a] < indices[b]; });
    std::vector<float> group_x, group_y;
    for (std::int64_t from = 0, to; from < count; from = to) {
      const std::int32_t index = indices[order[from]];
      for (to = from; to < count && indices[order[to]] == index;) to++;
      const std::int64_t group_rows = to - from;
      if (index < 0 || index >= num_matrices) {  // undefined in MLX; here the output is zero
        for (std::int64_t i = from; i < to; i++) std::fill_n(y + order[i] * rows, rows, 0.0f);
        continue;
      }
      group_x.resize(group_rows * width), group_y.resize(group_rows * rows);
      for (std::int64_t i = 0; i < group_rows; i++)
        for (std::int64_t k = 0; k < width; k++)
          group_x[i * width + k] = x.data[offsets[order[from + i]] + k * step];
      multiply(stack[index], group_x.data(), group_rows, bias ? bias + index * rows : nullptr,
               group_y.data());
      for (std::int64_t i = 0; i < group_rows; i++)
        std::memcpy(y + order[from + i] * rows, &group_y[i * rows], rows * sizeof(float));
    }
  }

  Matmul matmul_;
};

}  // namespace

mx::array Matmul::gather(const mx::array& x, const mx::array& indices) const {
  if (!stacked_) throw std::invalid_argument("gather needs a stack of matrices");
  if (x.ndim() < 2 || x.shape(-2) != 1)
    throw std::invalid_argument("x must be [..., 1, " + std::to_string(inputs_) + "]");
  const mx::Shape outer(x.shape().begin(), x.shape().end() - 2);
  mx::Shape shape = mx::broadcast_shapes(outer, indices.shape());
  const mx::array ids =
      contiguous_rows(mx::broadcast_to(mx::astype(indices, mx::int32, cpu()), shape, cpu()));
  shape.push_back(1);
  shape.push_back(inputs_);
  const mx::array expanded = mx::broadcast_to(to_float32(x, inputs_), shape, cpu());
  shape.back() = outputs_;
  std::vector<mx::array> in{expanded, ids};
  for (mx::array& one : arrays()) in.push_back(std::move(one));
  const mx::array y(std::move(shape), mx::float32,
                    std::make_shared<GatherMatmulPrimitive>(cpu(), *this), std::move(in));
  return mx::astype(y, x.dtype(), cpu());
}

}  // namespace mlxrunner
