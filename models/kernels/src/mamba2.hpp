// The state-space layer of Mamba-2 (Dao and Gu 2024), one position after another.
//
// Knows: rows of float32. A state, an output and a convolved number depend only on the sequence, not
// on the number of positions in a call.
#pragma once

#include "panels.hpp"
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

// Sixteen columns of a state, or the last ones.
struct WholeColumns {
  V load(const float* p) const { return ISA::load(p); }
  void store(float* p, V a) const { ISA::store(p, a); }
};
struct LastColumns {
  i64 count;

  V load(const float* p) const { return ISA::load(p, count); }
  void store(float* p, V a) const { ISA::store(p, a, count); }
};

// Calls function(p, columns) for the columns from p on.
template <class F>
inline void for_columns(i64 head_dim, F function) {
  i64 p = 0;
  for (; p + 16 <= head_dim; p += 16) function(p, WholeColumns{});
  if (p < head_dim) function(p, LastColumns{head_dim - p});
}

// Calls function.operator()<rows>(n) for the rows of a state from n on.
template <class F>
inline void for_rows_of_state(i64 state_size, F function) {
  i64 n = 0;
  for (; n + 8 <= state_size; n += 8) function.template operator()<8>(n);
  for (; n < state_size; n++) function.template operator()<1>(n);
}

// Advances a row of the state at position t, and adds its part of the output to one of two sums,
// because each addition waits for the one before it.
inline V advance(V row, V decay, V x, const float* keys, const float* queries, int i, V (&sums)[2]) {
  row = fma(set1(keys[i]), x, mul(row, decay));
  sums[i % 2] = fma(row, set1(queries[i]), sums[i % 2]);
  return row;
}

// Advances kRows rows of the state from `n` on, in the columns from `p` on, and adds their part of
// the outputs. The rows stay in registers for all positions.
template <int kRows, class Columns>
inline void scan_tile(const ScanTask& task, i64 n, i64 p, Columns columns) {
  V rows[kRows];
  float* state = task.state + n * task.head_dim + p;
  MLXRUNNER_UNROLL
  for (int i = 0; i < kRows; i++) rows[i] = columns.load(state + i * task.head_dim);
  for (i64 t = 0; t < task.length; t++) {
    const float *keys = task.keys + t * task.row_step + n,
                *queries = task.queries + t * task.row_step + n;
    const V decay = set1(task.decays[t * task.step_step]);
    const V x = mul(columns.load(task.x + t * task.row_step + p),
                    set1(task.steps[t * task.step_step]));
    V sums[2] = {zero(), zero()};
    MLXRUNNER_UNROLL
    for (int i = 0; i < kRows; i++) rows[i] = advance(rows[i], decay, x, keys, queries, i, sums);
    float* out = task.out + t * task.out_step + p;
    columns.store(out, add(columns.load(out), add(sums[0], sums[1])));
  }
  MLXRUNNER_UNROLL
  for (int i = 0; i < kRows; i++) columns.store(state + i * task.head_dim, rows[i]);
}

// The same for a single position, without keeping rows in registers.
template <int kRows, class Columns>
inline void step_tile(const ScanTask& task, i64 n, i64 p, Columns columns) {
  const float *keys = task.keys + n, *queries = task.queries + n;
  const V decay = set1(task.decays[0]), x = mul(columns.load(task.x + p), set1(task.steps[0]));
  V sums[2] = {zero(), zero()};
  float* row = task.state + n * task.head_dim + p;
  MLXRUNNER_UNROLL
  for (int i = 0; i < kRows; i++, row += task.head_dim)
    columns.store(row, advance(columns.load(row), decay, x, keys, queries, i, sums));
  float* out = task.out + p;
  columns.store(out, add(columns.load(out), add(sums[0], sums[1])));
}

// Each output is a sum over tiles of rows, in their order. A single position is bound by reading and
// writing the state, so it passes through the state in the order of the memory.
inline void scan(const ScanTask& task) {
  for_columns(task.head_dim, [&](i64 p, auto columns) {
    const V skip = set1(task.skip);
    for (i64 t = 0; t < task.length; t++)
      columns.store(task.out + t * task.out_step + p,
                    mul(skip, columns.load(task.x + t * task.row_step + p)));
  });
  if (task.length == 1)
    for_rows_of_state(task.state_size, [&]<int kRows>(i64 n) {
      for_columns(task.head_dim, [&](i64 p, auto columns) { step_tile<kRows>(task, n, p, columns); });
    });
  else
    for_columns(task.head_dim, [&](i64 p, auto columns) {
      for_rows_of_state(task.state_size,
                        [&]<int kRows>(i64 n) { scan_tile<kRows>(task, n, p, columns); });
    });
}

}  // namespace mlxrunner::ISA
