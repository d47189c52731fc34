#include <algorithm>
#include <memory>
#include <utility>

#include "blocks.hpp"
#include "gated.hpp"
#include "residual.hpp"

namespace mlxrunner {

namespace {

struct ForPieces;

void work(const MlpParts& parts, const View& x, std::int64_t count, float* out) {
  const Factor gate = parts.gate.factor(), up = parts.up.factor(), down = parts.down.factor();
  const std::int64_t hidden = gate.w.width, inner = gate.w.rows;
  const std::int64_t all = Pieces::padded(count * hidden), middle = Pieces::padded(count * inner);
  Pieces pieces(scratch<ForPieces>(static_cast<std::size_t>(2 * all + middle)));
  const float* rows = x.rows(pieces.of(count * hidden));
  float *normed = pieces.of(count * hidden), *gated = pieces.of(count * inner);
  normalise(parts.norm, rows, count, hidden, normed);
  multiply_gated(parts.activation, gate, up, normed, count, gated);
  multiply(down.w, gated, count, down.bias, out);
  add(rows, count, hidden, out);
}

class MlpBlockPrimitive : public CpuPrimitive {
 public:
  MlpBlockPrimitive(mx::Stream stream, std::shared_ptr<const MlpParts> parts)
      : CpuPrimitive(stream), parts_(std::move(parts)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const std::int64_t count = static_cast<std::int64_t>(in[0].size()) / in[0].shape(-1);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [parts = parts_, x = View(in[0]), count, out = outs[0].data<float>()] {
          if (count) work(*parts, x, count, out);
        });
  }

  const char* name() const override { return "mlxrunner::MlpBlock"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  std::shared_ptr<const MlpParts> parts_;
};

}  // namespace

MlpBlock::MlpBlock(MlpParts parts) {
  const Product &gate = parts.gate.product, &down = parts.down.product;
  parts.norm = checked(std::move(parts.norm), gate.inputs());
  want(gate.alike(parts.up.product), "gate and up must be matrices of one shape and format");
  want(gate.outputs() > 0 && down.inputs() == gate.outputs() && down.outputs() == gate.inputs(),
       "down must take gate's outputs and return gate's inputs");
  awaited_.add(parts.norm.weight);
  for (const Constant* one : {&parts.gate, &parts.up, &parts.down}) awaited_.add(*one);
  parts_ = std::make_shared<const MlpParts>(std::move(parts));
}

mx::array MlpBlock::operator()(const mx::array& x) {
  want(x.dtype() == mx::float32 && x.ndim() > 0 && x.shape(-1) == parts_->gate.product.inputs(),
       "x must be [..., hidden] of float32");
  std::vector<mx::array> in{x};
  awaited_.join(in);
  return mx::array(x.shape(), mx::float32, std::make_shared<MlpBlockPrimitive>(cpu(), parts_),
                   std::move(in));
}

}  // namespace mlxrunner
