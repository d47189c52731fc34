// Both products of a gated layer, and what is between them, in one go.
#include <algorithm>
#include <memory>
#include <utility>

#include "cpu.hpp"
#include "gated.hpp"
#include "pool.hpp"

namespace mlxrunner {

namespace {

struct ForX;
struct ForUp;
struct ForProduct;

class GatedPrimitive : public CpuPrimitive {
 public:
  GatedPrimitive(mx::Stream stream, Product gate, Product up, Activation activation)
      : CpuPrimitive(stream), gate_(std::move(gate)), up_(std::move(up)), activation_(activation) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const std::size_t ups = 1 + gate_.arrays().size();
    const Matrix gate = gate_.matrix(in, 1), up = up_.matrix(in, ups);
    const float *gate_bias = gate_.bias(in, 1), *up_bias = up_.bias(in, ups);
    const std::int64_t width = gate.width;
    const std::int64_t count = static_cast<std::int64_t>(in[0].size()) / width;
    float* y = outs[0].data<float>();
    mx::cpu::get_command_encoder(stream()).dispatch([=, x = View(in[0]), kind = activation_] {
      if (!gate.rows) return;
      const float* packed = x.rows(scratch<ForX>(x.packed ? 0 : count * width));
      for_slabs(count, [&](std::int64_t from, std::int64_t many) {
        multiply_gated(kind, {gate, gate_bias}, {up, up_bias}, packed + from * width, many,
                       y + from * gate.rows);
      });
    });
  }

  const char* name() const override { return "mlxrunner::Gated"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Product gate_, up_;
  Activation activation_;
};

}  // namespace

void multiply_gated(Activation kind, const Factor& gate, const Factor& up, const float* x,
                    std::int64_t count, float* y) {
  const Kernels& k = kernels();
  const Rows rows = arranged(gate.w, x, count);
  const std::size_t room = static_cast<std::size_t>(
      std::max(k.product_scratch(gate.w), k.product_scratch(up.w)));
  const std::int64_t part = part_rows(gate.w, count), all = gate.w.rows;
  Pool::shared().run((all + part - 1) / part, [&](std::int64_t i) {
    const std::int64_t begin = i * part, end = std::min(all, begin + part);
    float* ups = scratch<ForUp>(static_cast<std::size_t>(count * part));
    float* free = scratch<ForProduct>(room);
    k.product(gate.w, rows, gate.bias, y, all, begin, end, free);
    // its first row goes where the part begins
    k.product(up.w, rows, up.bias, ups - begin, part, begin, end, free);
    for (std::int64_t m = 0; m < count; m++) {
      float* of_m = y + m * all + begin;
      k.gate(kind, of_m, ups + m * part, of_m, end - begin);
    }
  });
}

mx::array gated(const Product& gate, const Product& up, Activation activation,
                const mx::array& given) {
  if (gate.stacked() || !gate.alike(up))
    throw std::invalid_argument("gate and up must be matrices of one shape and format");
  std::vector<mx::array> in{widened(given, gate.inputs())};
  mx::Shape shape = given.shape();
  shape.back() = gate.outputs();
  for (const Product* one : {&gate, &up})
    for (mx::array& array : one->arrays()) in.push_back(std::move(array));
  const mx::array y(std::move(shape), mx::float32,
                    std::make_shared<GatedPrimitive>(cpu(), gate, up, activation), std::move(in));
  return mx::astype(y, given.dtype(), cpu());
}

}  // namespace mlxrunner
