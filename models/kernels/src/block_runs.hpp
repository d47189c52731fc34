// The computation of each half of a block, when its inputs are evaluated.
//
// Knows: weights, memory. Must not know: the graph.
#pragma once

#include <vector>

#include "attention_job.hpp"
#include "blocks.hpp"

namespace mlxrunner {

// Computes `AttentionBlock` for one new position per sequence. out: [count, hidden], not x.
void run_attention_block(const AttentionWeights& weights, const View& x,
                         const std::vector<KVBuffers>& buffers, int window, float* out);

// Computes `MlpBlock` for `count` rows. out: not x.
void run_mlp_block(const MlpWeights& weights, const View& x, std::int64_t count, float* out);

// Raises if the inputs of `AttentionBlock` are not valid. new_positions: the number of positions
// that the block writes per sequence.
void check_attention_inputs(const AttentionWeights& weights, const mx::array& x,
                            const std::vector<mx::array>& keys,
                            const std::vector<mx::array>& values,
                            const std::vector<SlotMapping>& slot_mappings, int window,
                            int new_positions);

}  // namespace mlxrunner
