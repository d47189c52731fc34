// Attention kernel for a block of queries of one key/value head.
//
// Knows: `V`, `AttentionTask`. Must not know: caches, threads.
//
// The result of a query is computed in an order that does not depend on the rest of the batch:
//
//   score     sixteen lanes along key_dim, reduced in a tree (`sum`), times scale, then softcap
//   weight    e^(score - largest visible score), and 0 below e^-80. For the sum of the weights,
//             absolute position p is added in lane p mod 16; then the same tree, then the sink
//   out       weight times value, added up from the oldest visible position to the newest, divided
//             by the sum of the weights
//
// Unlike flash attention, the kernel subtracts the final maximum and not a running maximum. The
// scores of a block of queries fit into scratch memory, and the result does not depend on the
// boundaries of key blocks. The queries and the heads of a group are the rows of a tile, which
// share loads of keys and values. If enough rows share the keys, they are transposed in scratch
// memory: one register holds lane i of the scores of sixteen keys, and the tree adds registers
// instead of lanes. Keys and values of a 16-bit type are converted in registers if there is only
// one tile, and otherwise once for all tiles. Because of causality or a window, some keys are
// visible to only some rows. These keys are processed before and after the keys that all rows
// share.
#pragma once

#include <type_traits>

#include "kv_rows.hpp"
#include "vmath.hpp"

namespace mlxrunner::ISA {

inline i64 round_up_16(i64 n) { return (n + 15) / 16 * 16; }

inline constexpr i64 kKeysPerBlock = 16;    // keys that all rows process before the next block
inline constexpr i64 kValuesPerBlock = 64;  // the same for values
// Keys of at most this many numbers per row are transposed.
inline constexpr i64 kMaxNumbersPerRow = 12;

// The number of keys, or of registers of value columns, in a tile of `rows` rows.
constexpr int tile_keys(int rows) {
  int keys = 8;
  while (keys > 1 && keys * rows > kTileSums) keys /= 2;
  return keys;
}

// The keys that query i of a task attends to, [from, to), counted from the oldest stored position.
struct KeyRange {
  i64 from, to;
};
inline KeyRange visible_keys(const AttentionTask& a, i64 i) {
  KeyRange range{0, a.length};
  if (!a.causal) return range;
  const i64 end = a.position + i - a.first_position + 1;
  if (end < a.length) range.to = end > 0 ? end : 0;
  if (a.window && end > a.window) range.from = end - a.window;
  if (range.from > range.to) range.from = range.to;
  return range;
}

// The scratch memory of a task.
struct Workspace {
  i64 rows, key_dim, value_dim;  // the dims are rounded up to whole vectors
  i64 begin, end;                // the keys that any query of the task sees
  i64 key_floats, value_floats;  // of the blocks of keys and of converted values
  i64 pad, columns;  // in a row of scores, position p is in a column that is p modulo 16
  float *queries, *keys, *values, *scores, *sums, *totals;

  Workspace(const AttentionTask& a, float* scratch)
      : rows(a.queries * a.group), key_dim(round_up_16(a.key_dim)),
        value_dim(round_up_16(a.value_dim)), begin(visible_keys(a, 0).from),
        end(visible_keys(a, a.queries - 1).to),
        key_floats((transposes(a) ? 2 : 1) * kKeysPerBlock * key_dim),
        value_floats(widens(a) ? kValuesPerBlock * value_dim : 0),
        pad((a.first_position + begin) % 16),
        columns(round_up_16(pad + (end > begin ? end - begin : 0))) {
    queries = scratch;
    keys = queries + rows * key_dim;
    values = keys + key_floats;
    scores = values + value_floats;
    sums = scores + rows * columns;
    totals = sums + rows * value_dim;
  }
  i64 floats() const {
    return rows * (key_dim + columns + value_dim + 1) + key_floats + value_floats;
  }
  // Whether blocks of keys and values are converted to float32 in scratch memory.
  static bool widens(const AttentionTask& a) {
    return a.kv_type != KVType::f32 && a.queries * a.group > kTileRows;
  }
  // Whether blocks of keys are transposed. This takes time for each number of a key, and saves time
  // for each row.
  static bool transposes(const AttentionTask& a) {
    const i64 rows = a.queries * a.group;
    return rows > kTileRows && a.key_dim <= kMaxNumbersPerRow * rows;
  }
  float* score_at(i64 row, i64 index) const { return scores + row * columns + pad + index - begin; }
};

// Calls function(index, slot, count) for each part of [from, to) that is contiguous in memory. Each
// call gets at most max_count keys.
template <class F>
inline void for_contiguous_slots(const AttentionTask& a, i64 from, i64 to, i64 max_count,
                                 F function) {
  while (from < to) {
    i64 slot = a.head_slot + from;
    if (slot >= a.capacity) slot -= a.capacity;
    i64 count = to - from < max_count ? to - from : max_count;
    if (count > a.capacity - slot) count = a.capacity - slot;
    function(from, slot, count);
    from += count;
  }
}

// ---- scores ----------------------------------------------------------------------------------

template <class T, int R, int M>
inline void dot_tile(const typename T::Number* keys, i64 step, const float* queries, i64 key_dim,
                     float* out, i64 columns) {
  V sums[M][R];
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) sums[m][r] = zero();
  constexpr i64 kBytes = sizeof(typename T::Number);
  const auto next =
      reinterpret_cast<std::uintptr_t>(keys) + R * step * kBytes;  // may point past the end
  for (i64 k = 0; k < key_dim; k += 16) {
    V key[R];
    for (int r = 0; r < R; r++) {
      // with few rows this loop is bound by memory bandwidth
      if constexpr (M <= 2)
        if (k * kBytes % 64 == 0) prefetch(next + (r * step + k) * kBytes);
      key[r] = T::load_16(keys + r * step + k);
    }
    for (int m = 0; m < M; m++) {
      const V q = load(queries + m * key_dim + k);
      for (int r = 0; r < R; r++) sums[m][r] = fma(key[r], q, sums[m][r]);
    }
  }
  for (int m = 0; m < M; m++) {
    float* to = out + m * columns;
    if constexpr (R % 4 == 0) {
      for (int r = 0; r < R; r += 4)
        sum4(sums[m][r], sums[m][r + 1], sums[m][r + 2], sums[m][r + 3], to + r);
    } else {
      for (int r = 0; r < R; r++) to[r] = sum(sums[m][r]);
    }
  }
}

// The scores of rows from `row` on and `count` keys.
template <class T, int M>
inline void score_tile(const Workspace& ws, i64 row, const typename T::Number* keys, i64 step,
                       i64 count, i64 index) {
  for (; row + M <= ws.rows; row += M) {
    const float* q = ws.queries + row * ws.key_dim;
    i64 r = 0;
    for (; r + tile_keys(M) <= count; r += tile_keys(M))
      dot_tile<T, tile_keys(M), M>(keys + r * step, step, q, ws.key_dim,
                                   ws.score_at(row, index + r), ws.columns);
    for (; r < count; r++)
      dot_tile<T, 1, M>(keys + r * step, step, q, ws.key_dim, ws.score_at(row, index + r),
                        ws.columns);
  }
  if constexpr (M > 1)
    if (row < ws.rows) score_tile<T, M - 1>(ws, row, keys, step, count, index);
}

// ---- scores of transposed keys ---------------------------------------------------------------

// Writes a block of keys to `panel` [key_dim, kKeysPerBlock]. Columns from `count` on repeat the
// last key.
inline void transpose_keys(const float* keys, i64 step, i64 count, i64 key_dim, float* panel) {
  for (i64 r = 0; r < kKeysPerBlock; r += 4) {
    const float* rows[4];
    for (i64 i = 0; i < 4; i++) rows[i] = keys + (r + i < count ? r + i : count - 1) * step;
    for (i64 k = 0; k < key_dim; k += 4) {
      transpose_4x4(rows, panel + k * kKeysPerBlock + r, kKeysPerBlock);
      for (const float*& row : rows) row += 4;
    }
  }
}

template <int M>
struct PanelSums {
  V of_row[M];
};

// The lanes kLane, kLane + kStride, ... of the sums of dot_tile, added in the tree of `sum`, for M
// rows and sixteen keys.
template <int M, int kLane, int kStride>
[[gnu::always_inline]] inline PanelSums<M> sum_lanes(const float* panel, const float* queries,
                                                     i64 key_dim) {
  PanelSums<M> sums;
  if constexpr (kStride < 16) {
    sums = sum_lanes<M, kLane, 2 * kStride>(panel, queries, key_dim);
    const auto others = sum_lanes<M, kLane + kStride, 2 * kStride>(panel, queries, key_dim);
    for (int m = 0; m < M; m++) sums.of_row[m] = add(sums.of_row[m], others.of_row[m]);
  } else {
    for (int m = 0; m < M; m++) sums.of_row[m] = zero();
    for (i64 k = kLane; k < key_dim; k += 16) {
      const V keys = load(panel + k * kKeysPerBlock);
      for (int m = 0; m < M; m++)
        sums.of_row[m] = fma(keys, set1(queries[m * key_dim + k]), sums.of_row[m]);
    }
  }
  return sums;
}

// The scores of rows from `row` on and `count` keys of a panel.
template <int M>
inline void score_panel(const Workspace& ws, i64 row, const float* panel, i64 count, i64 index) {
  for (; row + M <= ws.rows; row += M) {
    const auto sums = sum_lanes<M, 0, 1>(panel, ws.queries + row * ws.key_dim, ws.key_dim);
    for (int m = 0; m < M; m++)
      if (count == kKeysPerBlock)
        store(ws.score_at(row + m, index), sums.of_row[m]);
      else
        store(ws.score_at(row + m, index), sums.of_row[m], count);
  }
  if constexpr (M > 1)
    if (row < ws.rows) score_panel<M - 1>(ws, row, panel, count, index);
}

// ---- scores of a task ------------------------------------------------------------------------

template <class T>
inline void score_all(const AttentionTask& a, const Workspace& ws) {
  for (i64 i = 0; i < a.queries; i++)
    for (i64 g = 0; g < a.group; g++) {
      const float* from = a.q + g * a.q_head + i * a.q_step;
      float* to = ws.queries + (i * a.group + g) * ws.key_dim;
      for (i64 k = 0; k < ws.key_dim; k += 16)
        store(to + k, load(from + k, a.key_dim - k < 16 ? a.key_dim - k : 16));
    }
  const bool whole = ws.key_dim == a.key_dim, transposes = Workspace::transposes(a);
  for_contiguous_slots(a, ws.begin, ws.end, kKeysPerBlock, [&](i64 index, i64 slot, i64 count) {
    const auto* stored = static_cast<const typename T::Number*>(a.keys) + slot * a.key_step;
    if (whole && !transposes && !Workspace::widens(a))
      return score_tile<T, kTileRows>(ws, 0, stored, a.key_step, count, index);
    float* panel = ws.keys + kKeysPerBlock * ws.key_dim;
    if constexpr (std::is_same_v<T, StoredF32>)
      if (whole) {
        transpose_keys(stored, a.key_step, count, a.key_dim, panel);
        return score_panel<kTileRows>(ws, 0, panel, count, index);
      }
    widen_rows<T>(stored, a.key_step, count, a.key_dim, ws.keys, ws.key_dim);
    if (!transposes)
      return score_tile<StoredF32, kTileRows>(ws, 0, ws.keys, ws.key_dim, count, index);
    transpose_keys(ws.keys, ws.key_dim, count, ws.key_dim, panel);
    score_panel<kTileRows>(ws, 0, panel, count, index);
  });
}

// ---- softmax ---------------------------------------------------------------------------------

inline float exp_scalar(float x) {
  float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

inline float max_lane(V a) {
  float lanes[16], largest = -__builtin_inff();
  store(lanes, a);
  for (float one : lanes) largest = one > largest ? one : largest;
  return largest;
}

// Replaces the scores of a row with weights, and returns the sum of the weights.
inline float softmax_row(const AttentionTask& a, const Workspace& ws, i64 row, KeyRange visible,
                         const float* sink) {
  const float minus_infinity = -__builtin_inff();
  float *from = ws.score_at(row, visible.from), *to = ws.score_at(row, visible.to);
  float* begin = ws.scores + row * ws.columns;
  float *first = begin + (from - begin) / 16 * 16, *last = begin + round_up_16(to - begin);
  if (a.softcap > 0)
    for (float* s = first; s < last; s += 16)
      store(s, mul(set1(a.softcap), tanh(div(mul(load(s), set1(a.scale)), set1(a.softcap)))));
  // mask the hidden positions in the first and last vector
  for (float* s = first; s < from; s++) *s = minus_infinity;
  for (float* s = to; s < last; s++) *s = minus_infinity;
  // the scale is positive and rounding is monotonic, so the largest product belongs to the largest
  // score
  const float scale = a.softcap > 0 ? 1.0f : a.scale;
  V largest = set1(minus_infinity);
  for (float* s = first; s < last; s += 16) largest = max(largest, load(s));
  float max_score = max_lane(largest) * scale;
  if (sink && *sink > max_score) max_score = *sink;
  V total = zero();
  for (float* s = first; s < last; s += 16) {
    const V weight = exp_or_zero(sub(mul(load(s), set1(scale)), set1(max_score)));
    total = add(total, weight);
    store(s, weight);
  }
  return sum(total) + (sink ? exp_scalar(*sink - max_score) : 0.0f);
}

// ---- values ----------------------------------------------------------------------------------

// Adds to C registers of the sums of M rows. With kTail, only `tail` lanes of a register are
// loaded.
template <class T, int M, int C, bool kTail>
inline void accumulate_values(const float* weights, i64 columns, const typename T::Number* values,
                              i64 step, i64 count, float* sums, i64 value_dim, i64 tail) {
  V to[M][C];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) to[m][c] = load(sums + m * value_dim + 16 * c);
  for (i64 j = 0; j < count; j++) {
    V value[C];
    for (int c = 0; c < C; c++)
      value[c] = kTail ? T::load_first(values + j * step + 16 * c, tail)
                       : T::load_16(values + j * step + 16 * c);
    for (int m = 0; m < M; m++) {
      const V weight = set1(weights[m * columns + j]);
      for (int c = 0; c < C; c++) to[m][c] = fma(weight, value[c], to[m][c]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) store(sums + m * value_dim + 16 * c, to[m][c]);
}

template <class T, int M, int C>
inline void accumulate_columns(const Workspace& ws, i64 value_dim, const float* weights,
                               const typename T::Number* values, i64 step, i64 count, float* sums,
                               i64 k) {
  for (; k + 16 * C <= value_dim; k += 16 * C)
    accumulate_values<T, M, C, false>(weights, ws.columns, values + k, step, count, sums + k,
                                      ws.value_dim, 16);
  if constexpr (C > 1)
    accumulate_columns<T, M, C / 2>(ws, value_dim, weights, values, step, count, sums, k);
  else if (k < value_dim)
    accumulate_values<T, M, 1, true>(weights, ws.columns, values + k, step, count, sums + k,
                                     ws.value_dim, value_dim - k);
}

template <class T, int M>
inline void accumulate_rows(const Workspace& ws, i64 value_dim, i64 row, i64 end, i64 index,
                            const typename T::Number* values, i64 step, i64 count) {
  for (; row + M <= end; row += M)
    accumulate_columns<T, M, tile_keys(M)>(ws, value_dim, ws.score_at(row, index), values, step,
                                           count, ws.sums + row * ws.value_dim, 0);
  if constexpr (M > 1)
    if (row < end)
      accumulate_rows<T, M - 1>(ws, value_dim, row, end, index, values, step, count);
}

// Accumulates rows [row, end) over the keys [from, to), which all these rows attend to.
template <class T>
inline void accumulate_range(const AttentionTask& a, const Workspace& ws, i64 row, i64 end,
                             i64 from, i64 to) {
  const bool widen = Workspace::widens(a) && end - row > kTileRows;
  for_contiguous_slots(a, from, to, kValuesPerBlock, [&](i64 index, i64 slot, i64 count) {
    const auto* values = static_cast<const typename T::Number*>(a.values) + slot * a.value_step;
    if (!widen)
      return accumulate_rows<T, kTileRows>(ws, a.value_dim, row, end, index, values, a.value_step,
                                           count);
    widen_rows<T>(values, a.value_step, count, a.value_dim, ws.values, ws.value_dim);
    accumulate_rows<StoredF32, kTileRows>(ws, a.value_dim, row, end, index, ws.values,
                                          ws.value_dim, count);
  });
}

template <class T>
inline void accumulate_all(const AttentionTask& a, const Workspace& ws) {
  for (i64 k = 0; k < ws.rows * ws.value_dim; k += 16) store(ws.sums + k, zero());
  // the window of the newest query begins last, and the visible range of the oldest query ends
  // first
  KeyRange shared{visible_keys(a, a.queries - 1).from, visible_keys(a, 0).to};
  const bool overlap = shared.from < shared.to;
  const auto for_each_query = [&](auto select) {
    for (i64 i = 0; i < a.queries; i++) {
      const KeyRange part = select(visible_keys(a, i));
      accumulate_range<T>(a, ws, i * a.group, (i + 1) * a.group, part.from, part.to);
    }
  };
  if (!overlap) return for_each_query([](KeyRange r) { return r; });
  for_each_query([&](KeyRange r) { return KeyRange{r.from, shared.from}; });
  accumulate_range<T>(a, ws, 0, ws.rows, shared.from, shared.to);
  for_each_query([&](KeyRange r) { return KeyRange{shared.to, r.to}; });
}

// ---- attention -------------------------------------------------------------------------------

template <class T>
inline void attend_stored(const AttentionTask& a, float* scratch) {
  const Workspace ws(a, scratch);
  score_all<T>(a, ws);
  for (i64 row = 0; row < ws.rows; row++) {
    const KeyRange visible = visible_keys(a, row / a.group);
    const float* sink = a.sinks ? a.sinks + row % a.group : nullptr;
    ws.totals[row] = visible.from < visible.to ? softmax_row(a, ws, row, visible, sink) : 1.0f;
  }
  accumulate_all<T>(a, ws);
  for (i64 row = 0; row < ws.rows; row++) {
    const float* sums = ws.sums + row * ws.value_dim;
    float* out = a.out + row % a.group * a.out_head + row / a.group * a.out_step;
    const V total = set1(ws.totals[row]);
    for (i64 k = 0; k < a.value_dim; k += 16)
      store(out + k, div(load(sums + k), total), a.value_dim - k < 16 ? a.value_dim - k : 16);
  }
}

inline i64 attend_scratch(const AttentionTask& a) { return Workspace(a, nullptr).floats(); }

inline void attend(const AttentionTask& a, float* scratch) {
  switch (a.kv_type) {
    case KVType::f32:
      return attend_stored<StoredF32>(a, scratch);
    case KVType::bf16:
      return attend_stored<StoredBf16>(a, scratch);
    case KVType::f16:
      return attend_stored<StoredF16>(a, scratch);
  }
}

}  // namespace mlxrunner::ISA
