// The attention half and the MLP half of a pre-norm decoder block, each as one operation.
//
// In a decode step of a small model, MLX's overhead per operation takes as long as the operation
// itself. Therefore all work between two additions to the residual stream is one operation. These
// operations are for a few rows only, because all intermediate results are in memory together. The
// results are bit-identical to those of the separate operations. For a single row, consecutive
// blocks are one operation.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "attention_ops.hpp"
#include "weights.hpp"
#include "rowwise.hpp"

namespace mlxrunner {

// The weights and parameters of grouped-query attention. q, k, v, o: the projections from and to
// hidden states. Without v, the values are the keys, before their norm and rotation. Without k and
// v, the keys and values are those of another layer. q_norm, k_norm: the norms of each head before
// the rotation. v_norm: the norm of each value. post_norm: the norm after o. The window is not
// included, because the caches determine it.
struct AttentionWeights {
  RmsNorm norm;
  BoundMatmul q;
  std::optional<BoundMatmul> k, v;
  BoundMatmul o;
  std::optional<RmsNorm> q_norm, k_norm, v_norm, post_norm;
  std::optional<RopeParams> rope;
  int heads, kv_heads;
  AttentionParams params;

  // The size of a key and of a value.
  int key_dim() const { return q.matmul.outputs() / heads; }
  int value_dim() const { return o.matmul.inputs() / heads; }
};

class AttentionBlock {
 public:
  // Raises if the shapes of the weights do not match.
  explicit AttentionBlock(AttentionWeights weights);

  // Returns x + o(attention(...)) of one new position per sequence, and the buffers with the new
  // positions, like `attend`. x: [B, 1, hidden] float32. The slot mapping determines the rotation
  // of a position.
  std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> operator()(
      const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
      const std::vector<SlotMapping>& slot_mappings, int window);

  // The same for a block without k and v, like `attend_shared`.
  mx::array attend_shared(const mx::array& x, const std::vector<mx::array>& keys,
                          const std::vector<mx::array>& values,
                          const std::vector<SlotMapping>& slot_mappings, int window);

 private:
  friend class DecoderLayers;
  std::shared_ptr<const AttentionWeights> weights_;
  PendingInputs pending_;
};

// post_norm: the norm after down. scale: [1] float32, a factor of the result.
struct MlpWeights {
  RmsNorm norm;
  Activation activation;
  BoundMatmul gate, up, down;
  std::optional<RmsNorm> post_norm;
  std::optional<mx::array> scale;
};

class MlpBlock {
 public:
  // Raises if the shapes of the weights do not match, or if gate and up differ in shape or format.
  explicit MlpBlock(MlpWeights weights);

  // Returns (x + post_norm(down(activation(gate(h)) * up(h)))) * scale with h = norm(x). x: [...,
  // hidden] float32.
  mx::array operator()(const mx::array& x);

 private:
  friend class DecoderLayers;
  std::shared_ptr<const MlpWeights> weights_;
  PendingInputs pending_;
};

// The weights of each block.
using DecoderLayerWeights = std::vector<
    std::pair<std::shared_ptr<const AttentionWeights>, std::shared_ptr<const MlpWeights>>>;

// Consecutive decoder blocks, for one new position of one sequence.
class DecoderLayers {
 public:
  // Raises if there is no block, if a block has no keys of its own, or if hidden states differ in
  // width.
  explicit DecoderLayers(std::vector<std::pair<AttentionBlock, MlpBlock>> blocks);

  // Returns the result of the last block, and the buffers of each block with the new position. x:
  // [1, 1, hidden] float32. keys, values, slot_mappings, windows: those of each block, see
  // `AttentionBlock`.
  std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> operator()(
      const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
      const std::vector<SlotMapping>& slot_mappings, const std::vector<int>& windows);

 private:
  std::vector<std::pair<AttentionBlock, MlpBlock>> blocks_;
  std::shared_ptr<const DecoderLayerWeights> weights_;
};

struct InputGateWeights {
  Activation activation;
  BoundMatmul gate, projection;
  RmsNorm post_norm;
  std::optional<mx::array> scale;
};

// A gated input that is added to the residual stream (per-layer embeddings).
class InputGateBlock {
 public:
  // Raises if the shapes of the weights do not match.
  explicit InputGateBlock(InputGateWeights weights);

  // Returns (x + post_norm(projection(activation(gate(x)) * input))) * scale. x: [..., hidden]
  // float32. input: [..., inner] float32, with any strides.
  mx::array operator()(const mx::array& x, const mx::array& input);

 private:
  std::shared_ptr<const InputGateWeights> weights_;
  PendingInputs pending_;
};

}  // namespace mlxrunner
