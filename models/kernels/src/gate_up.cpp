// Fused gate and up projections of a gated MLP.
#include <algorithm>
#include <memory>
#include <utility>

#include "isa_dispatch.hpp"
#include "gate_up.hpp"
#include "thread_pool.hpp"

namespace mlxrunner {

namespace {

struct ForX;
struct ForUp;
struct ForMatmul;

class GateUpPrimitive : public CpuPrimitive {
 public:
  GateUpPrimitive(mx::Stream stream, Matmul gate, Matmul up, Activation activation)
      : CpuPrimitive(stream), gate_(std::move(gate)), up_(std::move(up)), activation_(activation) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const std::size_t first_up = 1 + gate_.arrays().size();
    const Matrix gate = gate_.matrix(in, 1), up = up_.matrix(in, first_up);
    const float *gate_bias = gate_.bias(in, 1), *up_bias = up_.bias(in, first_up);
    const std::int64_t width = gate.width;
    const std::int64_t count = static_cast<std::int64_t>(in[0].size()) / width;
    float* y = outs[0].data<float>();
    mx::cpu::get_command_encoder(stream()).dispatch([=, x = View(in[0]), kind = activation_] {
      if (!gate.rows) return;
      const float* rows = x.rows(scratch<ForX>(x.contiguous ? 0 : count * width));
      for_input_batches(gate, count, [&](std::int64_t from, std::int64_t num_rows) {
        multiply_gate_up(kind, {gate, gate_bias}, {up, up_bias}, rows + from * width, num_rows,
                         y + from * gate.rows);
      });
    });
  }

  const char* name() const override { return "mlxrunner::GateUp"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Matmul gate_, up_;
  Activation activation_;
};

}  // namespace

void multiply_gate_up(Activation kind, const MatrixAndBias& gate, const MatrixAndBias& up,
                      const float* x, std::int64_t count, float* y) {
  const Kernels& k = kernels();
  const PackedRows rows = pack_rows(gate.w, x, count);
  const std::size_t scratch_size =
      static_cast<std::size_t>(std::max(k.matmul_scratch(gate.w), k.matmul_scratch(up.w)));
  const std::int64_t task_rows = rows_per_task(gate.w, count), outputs = gate.w.rows;
  ThreadPool::shared().run((outputs + task_rows - 1) / task_rows, [&](std::int64_t i) {
    const std::int64_t begin = i * task_rows, end = std::min(outputs, begin + task_rows);
    float* up_tile = scratch<ForUp>(static_cast<std::size_t>(count * task_rows));
    float* workspace = scratch<ForMatmul>(scratch_size);
    k.matmul(gate.w, rows, gate.bias, y, outputs, begin, end, workspace);
    // offset the pointer so that the first row of this task is at up_tile
    k.matmul(up.w, rows, up.bias, up_tile - begin, task_rows, begin, end, workspace);
    for (std::int64_t m = 0; m < count; m++) {
      float* gate_row = y + m * outputs + begin;
      k.glu(kind, gate_row, up_tile + m * task_rows, gate_row, end - begin);
    }
  });
}

mx::array gate_up(const Matmul& gate, const Matmul& up, Activation activation, const mx::array& x) {
  if (gate.stacked() || !gate.has_same_format(up))
    throw std::invalid_argument("gate and up must be matrices of one shape and format");
  std::vector<mx::array> in{to_float32(x, gate.inputs())};
  mx::Shape shape = x.shape();
  shape.back() = gate.outputs();
  for (const Matmul* one : {&gate, &up})
    for (mx::array& array : one->arrays()) in.push_back(std::move(array));
  const mx::array y(std::move(shape), mx::float32,
                    std::make_shared<GateUpPrimitive>(cpu(), gate, up, activation), std::move(in));
  return mx::astype(y, x.dtype(), cpu());
}

}  // namespace mlxrunner
