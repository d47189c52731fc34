// The state-space layer of Mamba-2 (Dao and Gu 2024), one position after another.
//
// Knows: rows of float32. A state, an output and a convolved number depend only on the sequence, not
// on the number of positions in a call.
#pragma once

#include "pointwise.hpp"

namespace mlxrunner::ISA {

inline void convolve(const float* const* taps, std::int64_t width, const float* weight,
                     const float* bias, i64 channels, float* out) {
  for (i64 k = 0; k < channels; k += 16) {
    const i64 n = min(channels - k, 16);
    V y = bias ? load(bias + k, n) : zero();
    for (i64 j = 0; j < width; j++)
      y = fma(load(taps[j] + k, n), load(weight + j * channels + k, n), y);
    store(out + k, activate<Activation::silu>(y), n);
  }
}

// Advances kRows rows of the state from `n` on, sixteen columns from `p` on, and adds their part of
// the outputs. The rows stay in registers for all positions.
template <int kRows>
inline void scan_tile(const ScanTask& task, i64 n, i64 p, i64 lanes) {
  V rows[kRows];
  float* state = task.state + n * task.head_dim + p;
  for (int i = 0; i < kRows; i++) rows[i] = load(state + i * task.head_dim, lanes);
  for (i64 t = 0; t < task.length; t++) {
    const float *keys = task.keys + t * task.row_step + n, *queries = task.queries + t * task.row_step + n;
    const V decay = set1(task.decays[t * task.step_step]);
    const V x = mul(load(task.x + t * task.row_step + p, lanes), set1(task.steps[t * task.step_step]));
    // two sums, because each addition waits for the one before it
    V sums[2] = {zero(), zero()};
    for (int i = 0; i < kRows; i++) {
      rows[i] = fma(set1(keys[i]), x, mul(rows[i], decay));
      sums[i % 2] = fma(rows[i], set1(queries[i]), sums[i % 2]);
    }
    float* out = task.out + t * task.out_step + p;
    store(out, add(load(out, lanes), add(sums[0], sums[1])), lanes);
  }
  for (int i = 0; i < kRows; i++) store(state + i * task.head_dim, rows[i], lanes);
}

inline void scan(const ScanTask& task) {
  for (i64 p = 0; p < task.head_dim; p += 16) {
    const i64 lanes = min(task.head_dim - p, 16);
    const V skip = set1(task.skip);
    for (i64 t = 0; t < task.length; t++)
      store(task.out + t * task.out_step + p,
            mul(skip, load(task.x + t * task.row_step + p, lanes)), lanes);
    i64 n = 0;
    for (; n + 8 <= task.state_size; n += 8) scan_tile<8>(task, n, p, lanes);
    for (; n < task.state_size; n++) scan_tile<1>(task, n, p, lanes);
  }
}

}  // namespace mlxrunner::ISA
