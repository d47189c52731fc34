// Sampling of tokens from processed logits: temperature, top_k, top_p, min_p and seeded noise, as
// app/engine/sampling/draw.py defines them.
#pragma once

#include "arrays.hpp"

namespace mlxrunner {

// Samples one token per row. Returns [rows] uint32.
//
// logits: [rows, V] float32. settings: [rows, 4] float32: temperature > 0, top_k (0: off), top_p
// (infinity: off), and the logarithm of min_p (-infinity: off). words: [rows, 5] uint32: the two
// start words and the two odd strides of the seed, and the number of earlier draws. step: is added
// to the number of earlier draws. If a row contains NaN or has no finite maximum, its token is
// arbitrary, but in the vocabulary.
mx::array sample(const mx::array& logits, const mx::array& settings, const mx::array& words,
                 int step);

}  // namespace mlxrunner
