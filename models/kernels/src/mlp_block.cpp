#include <algorithm>
#include <memory>
#include <utility>

#include "block_runs.hpp"
#include "blocks.hpp"
#include "gate_up.hpp"
#include "isa_dispatch.hpp"
#include "residual.hpp"

namespace mlxrunner {

namespace {

struct ForArena;

}  // namespace

void run_mlp_block(const MlpWeights& weights, const View& x, std::int64_t count, float* out) {
  const MatrixAndBias gate = weights.gate.matrix_and_bias(), up = weights.up.matrix_and_bias(),
                      down = weights.down.matrix_and_bias();
  const std::int64_t hidden = gate.w.width, inner = gate.w.rows;
  const std::int64_t hidden_floats = ScratchArena::round_up(count * hidden),
                     inner_floats = ScratchArena::round_up(count * inner);
  ScratchArena arena(scratch<ForArena>(static_cast<std::size_t>(2 * hidden_floats + inner_floats)));
  const float* residual = x.rows(arena.allocate(count * hidden));
  float *normed = arena.allocate(count * hidden), *gated = arena.allocate(count * inner);
  normalize(weights.norm, residual, count, hidden, normed);
  multiply_gate_up(weights.activation, gate, up, normed, count, gated);
  multiply(down.w, gated, count, down.bias, out);
  finish(weights.post_norm, residual, weights.scale, count, hidden, out);
}

namespace {

void run_input_gate(const InputGateWeights& weights, const View& x, const View& input,
                    std::int64_t count, float* out) {
  const MatrixAndBias gate = weights.gate.matrix_and_bias(),
                      projection = weights.projection.matrix_and_bias();
  const std::int64_t hidden = gate.w.width, inner = gate.w.rows;
  const std::int64_t hidden_floats = ScratchArena::round_up(count * hidden),
                     inner_floats = ScratchArena::round_up(count * inner);
  ScratchArena arena(scratch<ForArena>(static_cast<std::size_t>(hidden_floats + 2 * inner_floats)));
  const float* residual = x.rows(arena.allocate(count * hidden));
  const float* given = input.rows(arena.allocate(count * inner));
  float* gated = arena.allocate(count * inner);
  multiply(gate.w, residual, count, gate.bias, gated);
  kernels().glu(weights.activation, gated, given, gated, count * inner);
  multiply(projection.w, gated, count, projection.bias, out);
  finish(weights.post_norm, residual, weights.scale, count, hidden, out);
}

// Its inputs are x and the input.
class InputGatePrimitive : public CpuPrimitive {
 public:
  InputGatePrimitive(mx::Stream stream, std::shared_ptr<const InputGateWeights> weights)
      : CpuPrimitive(stream), weights_(std::move(weights)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const std::int64_t count = static_cast<std::int64_t>(in[0].size()) / in[0].shape(-1);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [weights = weights_, x = View(in[0]), input = View(in[1]), count,
         out = outs[0].data<float>()] {
          if (count) run_input_gate(*weights, x, input, count, out);
        });
  }

  const char* name() const override { return "mlxrunner::InputGateBlock"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  std::shared_ptr<const InputGateWeights> weights_;
};

class MlpBlockPrimitive : public CpuPrimitive {
 public:
  MlpBlockPrimitive(mx::Stream stream, std::shared_ptr<const MlpWeights> weights)
      : CpuPrimitive(stream), weights_(std::move(weights)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const std::int64_t count = static_cast<std::int64_t>(in[0].size()) / in[0].shape(-1);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [weights = weights_, x = View(in[0]), count, out = outs[0].data<float>()] {
          if (count) run_mlp_block(*weights, x, count, out);
        });
  }

  const char* name() const override { return "mlxrunner::MlpBlock"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  std::shared_ptr<const MlpWeights> weights_;
};

}  // namespace

MlpBlock::MlpBlock(MlpWeights weights) {
  const Matmul &gate = weights.gate.matmul, &down = weights.down.matmul;
  weights.norm = check_norm(std::move(weights.norm), gate.inputs());
  require(gate.has_same_format(weights.up.matmul),
          "gate and up must be matrices of one shape and format");
  require(gate.outputs() > 0 && down.inputs() == gate.outputs() && down.outputs() == gate.inputs(),
          "down must take gate's outputs and return gate's inputs");
  weights.post_norm = check_norm(std::move(weights.post_norm), gate.inputs());
  weights.scale = check_scale(std::move(weights.scale));
  pending_.add(weights.norm.weight);
  if (weights.post_norm) pending_.add(weights.post_norm->weight);
  if (weights.scale) pending_.add(*weights.scale);
  for (const BoundMatmul* one : {&weights.gate, &weights.up, &weights.down}) pending_.add(*one);
  weights_ = std::make_shared<const MlpWeights>(std::move(weights));
}

mx::array MlpBlock::operator()(const mx::array& x) {
  require(x.dtype() == mx::float32 && x.ndim() > 0 && x.shape(-1) == weights_->gate.matmul.inputs(),
          "x must be [..., hidden] of float32");
  std::vector<mx::array> in{x};
  pending_.append_pending(in);
  return mx::array(x.shape(), mx::float32, std::make_shared<MlpBlockPrimitive>(cpu(), weights_),
                   std::move(in));
}

InputGateBlock::InputGateBlock(InputGateWeights weights) {
  const Matmul &gate = weights.gate.matmul, &projection = weights.projection.matmul;
  require(gate.outputs() > 0 && projection.inputs() == gate.outputs() &&
              projection.outputs() == gate.inputs(),
          "the projection must take the gate's outputs and return its inputs");
  weights.post_norm = check_norm(std::move(weights.post_norm), gate.inputs());
  weights.scale = check_scale(std::move(weights.scale));
  pending_.add(weights.post_norm.weight);
  if (weights.scale) pending_.add(*weights.scale);
  for (const BoundMatmul* one : {&weights.gate, &weights.projection}) pending_.add(*one);
  weights_ = std::make_shared<const InputGateWeights>(std::move(weights));
}

mx::array InputGateBlock::operator()(const mx::array& x, const mx::array& input) {
  const Matmul& gate = weights_->gate.matmul;
  require(x.dtype() == mx::float32 && x.ndim() > 0 && x.shape(-1) == gate.inputs(),
          "x must be [..., hidden] of float32");
  require(input.dtype() == mx::float32 && input.ndim() > 0 && input.shape(-1) == gate.outputs() &&
              input.size() / gate.outputs() == x.size() / gate.inputs(),
          "the input must be [..., inner] of float32, with the rows of x");
  std::vector<mx::array> in{x, input};
  pending_.append_pending(in);
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<InputGatePrimitive>(cpu(), weights_), std::move(in));
}

}  // namespace mlxrunner
