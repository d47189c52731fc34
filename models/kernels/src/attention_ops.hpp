// Attention as MLX operations, with and without appending to a cache.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "arrays.hpp"

namespace mlxrunner {

// The parameters of softmax(scale * Q K^T) V. window: the number of positions that a query attends
// to, including its own (0: all). softcap: scores become softcap * tanh(score / softcap) (0: off).
// sinks: [Hq], the logit of an additional key whose value is zero.
struct AttentionParams {
  float scale;
  int window;
  std::optional<mx::array> sinks;
  float softcap;
};

// The slots of one sequence's positions in its buffer, after the new positions are written. There
// are `length` positions. The oldest one has the absolute position `first_position` and is in slot
// `head_slot`. After the last slot, positions continue in slot 0. The new positions are the last
// ones and begin in slot `write_slot`. rope_delta: the position of the newest one for rope, minus its
// absolute position.
struct SlotMapping {
  int write_slot, length, head_slot, first_position, rope_delta = 0;
};

// The shape of a position's keys and values.
struct KVShape {
  int heads, key_dim, value_dim;
};

// Raises if a sequence's buffers do not have this shape, or if `slots` is not valid for `length`
// new positions in them.
void check_slots(const SlotMapping& slots, int length, const mx::array& keys,
                 const mx::array& values, const KVShape& shape);

// Appends k [B, Hkv, L, D] and v [B, Hkv, L, Dv] of the new positions, and computes attention from
// their queries q [B, Hq, L, D]. Each of the B sequences has a key buffer [1, Hkv, capacity, D] and
// a value buffer [1, Hkv, capacity, Dv], both float32, bfloat16 or float16. New keys and values are
// rounded to that type when they are written, and all queries see the rounded numbers. Returns [B, Hq, L, Dv], which is a view of [B, L, Hq, Dv],
// and the buffers with the new positions. A buffer without other references is written in place.
std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> attend(
    const mx::array& q, const mx::array& k, const mx::array& v, const std::vector<mx::array>& keys,
    const std::vector<mx::array>& values, const std::vector<SlotMapping>& slot_mappings,
    const AttentionParams& params);

// Computes attention from the queries q [B, Hq, L, D] of the last L positions to all positions in
// the buffers of each sequence, which are not written. `write_slot` has no meaning.
mx::array attend_shared(const mx::array& q, const std::vector<mx::array>& keys,
                        const std::vector<mx::array>& values,
                        const std::vector<SlotMapping>& slot_mappings,
                        const AttentionParams& params);

// Computes attention to given keys [B, Hkv, S, D] and values [B, Hkv, S, Dv]. causal: whether the
// last query has the position of the last key.
mx::array attention(const mx::array& q, const mx::array& keys, const mx::array& values, bool causal,
                    const AttentionParams& params);

}  // namespace mlxrunner
