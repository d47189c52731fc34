// Attention, with and without writing to a cache first, as operations of MLX.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "arrays.hpp"

namespace mlxrunner {

// softmax(scale * Q K^T) V of what a query may see. window: how many positions, its own among them
// (0: all); softcap: scores become softcap * tanh(score / softcap) (0: they do not); sinks: [Hq],
// the logit of one more key, whose value is nothing.
struct Attention {
  float scale;
  int window;
  std::optional<mx::array> sinks;
  float softcap;
};

// Where the positions of one sequence lie in its buffer once the new ones are written: `length` of
// them, the oldest (absolute position `first`) in slot `head`, and behind the last slot it goes on
// at 0. The new ones are the last; `slot` is where they begin.
struct Place {
  int slot, length, head, first;
};

// What a position's keys and values are: so many of each, `depth` and `width` long.
struct PositionShape {
  int heads, depth, width;
};

// Raises where a sequence's buffers are not of that shape, or `length` new positions do not lie in
// them as `at` says.
void want_place(const Place& at, int length, const mx::array& keys, const mx::array& values,
                const PositionShape& shape);

// q [B, Hq, L, D], k [B, Hkv, L, D], v [B, Hkv, L, Dv] of new positions; for each of the B
// sequences a buffer of keys [1, Hkv, capacity, D] and one of values -> [B, Hq, L, Dv], a view of
// [B, L, Hq, Dv], and the buffers with the new positions in them. A buffer that nobody else holds
// is written to in place.
std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> attend(
    const mx::array& q, const mx::array& k, const mx::array& v, const std::vector<mx::array>& keys,
    const std::vector<mx::array>& values, const std::vector<Place>& places,
    const Attention& attention);

// Of keys [B, Hkv, S, D] and values [B, Hkv, S, Dv] that are there. causal: the last query stands
// where the last key does.
mx::array attention(const mx::array& q, const mx::array& keys, const mx::array& values, bool causal,
                    const Attention& attention);

}  // namespace mlxrunner
