// The two halves of a decoder block that has its norms in front, as one operation each.
//
// In a decode step of a small model MLX takes as long for an operation as the operation itself. So
// what stands between two additions to the residual stream is one. It is for few rows: all that is
// made on the way is held at once. To the bit what the operations it stands for would return.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "attending.hpp"
#include "constants.hpp"
#include "rowwise.hpp"

namespace mlxrunner {

// Of grouped-query attention. q, k, v, o: of hidden states; q_norm, k_norm: of each head, before it
// is rotated. A window is not among it: that is the caches' affair.
struct AttentionParts {
  RmsNorm norm;
  Constant q, k, v, o;
  std::optional<RmsNorm> q_norm, k_norm;
  std::optional<Rotary> rotary;
  int heads, kv_heads;
  Attention by;

  // Of a key, of a value.
  int depth() const { return q.product.outputs() / heads; }
  int width() const { return v.product.outputs() / kv_heads; }
};

class AttentionBlock {
 public:
  // Raises where parts do not fit each other.
  explicit AttentionBlock(AttentionParts parts);

  // x + o(attention(...)) of one new position of each sequence, x [B, 1, hidden] float32; and the
  // buffers with it in them, as `attend` takes and returns them. It stands behind what its place
  // says is there, and is rotated by that.
  std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> operator()(
      const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
      const std::vector<Place>& places, int window);

 private:
  std::shared_ptr<const AttentionParts> parts_;
  Awaited awaited_;
};

struct MlpParts {
  RmsNorm norm;
  Activation activation;
  Constant gate, up, down;
};

class MlpBlock {
 public:
  // Raises where parts do not fit each other, and where gate and up differ in shape or format.
  explicit MlpBlock(MlpParts parts);

  // x + down(activation(gate(h)) * up(h)), h = norm(x), of x [..., hidden] float32.
  mx::array operator()(const mx::array& x);

 private:
  std::shared_ptr<const MlpParts> parts_;
  Awaited awaited_;
};

}  // namespace mlxrunner
