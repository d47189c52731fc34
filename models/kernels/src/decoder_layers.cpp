#include <memory>
#include <utility>

#include "block_runs.hpp"
#include "in_flight.hpp"

namespace mlxrunner {

namespace {

struct ForHidden;

// Its inputs are x, the key buffers, the value buffers, and then the pending inputs.
class DecoderLayersPrimitive : public CpuPrimitive {
 public:
  DecoderLayersPrimitive(mx::Stream stream, std::shared_ptr<const DecoderLayerWeights> weights,
                         std::vector<SlotMapping> slot_mappings, std::vector<int> windows)
      : CpuPrimitive(stream), weights_(std::move(weights)),
        slot_mappings_(std::move(slot_mappings)), windows_(std::move(windows)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    WritableBuffers writable(in, 1, outs);
    std::vector<KVBuffers> buffers = get_buffers(outs, slot_mappings_);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [weights = weights_, writable = std::move(writable), buffers = std::move(buffers),
         windows = windows_, x = View(in[0]), hidden = outs[0].shape(-1),
         out = outs[0].data<float>()]() mutable {
          writable.copy_shared();
          float* between = scratch<ForHidden>(static_cast<std::size_t>(hidden));
          for (std::size_t i = 0; i < weights->size(); i++) {
            const auto& [attention, mlp] = (*weights)[i];
            run_attention_block(*attention, i ? View(out, 1, 1, hidden) : x, {buffers[i]},
                                windows[i], between);
            run_mlp_block(*mlp, View(between, 1, 1, hidden), 1, out);
          }
          writable.release();
        });
  }

  const char* name() const override { return "mlxrunner::DecoderLayers"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  std::shared_ptr<const DecoderLayerWeights> weights_;
  std::vector<SlotMapping> slot_mappings_;
  std::vector<int> windows_;
};

}  // namespace

DecoderLayers::DecoderLayers(std::vector<std::pair<AttentionBlock, MlpBlock>> blocks)
    : blocks_(std::move(blocks)) {
  require(!blocks_.empty(), "decoder layers need a block");
  DecoderLayerWeights weights;
  const int hidden = blocks_[0].first.weights_->q.matmul.inputs();
  for (const auto& [attention, mlp] : blocks_) {
    require(attention.weights_->k.has_value(), "a block without keys needs attend_shared");
    require(attention.weights_->q.matmul.inputs() == hidden &&
                mlp.weights_->gate.matmul.inputs() == hidden,
            "hidden states must be of one width");
    weights.emplace_back(attention.weights_, mlp.weights_);
  }
  weights_ = std::make_shared<const DecoderLayerWeights>(std::move(weights));
}

std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> DecoderLayers::operator()(
    const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
    const std::vector<SlotMapping>& slot_mappings, const std::vector<int>& windows) {
  const std::size_t count = blocks_.size();
  require(keys.size() == count && values.size() == count && slot_mappings.size() == count &&
              windows.size() == count,
          "each block needs buffers and a slot mapping");
  std::vector<mx::array> in{x};
  std::vector<mx::Shape> shapes{x.shape()};
  std::vector<mx::Dtype> types{mx::float32};
  for (std::size_t i = 0; i < count; i++)
    check_attention_inputs(*(*weights_)[i].first, x, {keys[i]}, {values[i]}, {slot_mappings[i]},
                           windows[i], 1);
  for (const auto* all : {&keys, &values})
    for (const mx::array& one : *all)
      in.push_back(one), shapes.push_back(one.shape()), types.push_back(one.dtype());
  for (auto& [attention, mlp] : blocks_)
    attention.pending_.append_pending(in), mlp.pending_.append_pending(in);
  auto outs = mx::array::make_arrays(
      std::move(shapes), types,
      std::make_shared<DecoderLayersPrimitive>(cpu(), weights_, slot_mappings, windows), in);
  const auto middle = outs.begin() + 1 + static_cast<std::ptrdiff_t>(count);
  return {outs[0], {outs.begin() + 1, middle}, {middle, outs.end()}};
}

}  // namespace mlxrunner
