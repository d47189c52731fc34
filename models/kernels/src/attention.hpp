// Attention of a few queries of one key/value head.
//
// Knows: `V`, `Attending`. Must not know: caches, threads.
//
// What one query gets is made in an order that nothing beside it changes:
//
//   score     sixteen lanes along the depth, then a tree (`sum`), times scale, squashed by softcap
//   weight    e^(score - largest visible score); in the weights' total, that of absolute position p
//             goes to lane p mod 16, then comes the same tree, then the sink
//   out       weight times value, added up from the oldest visible position to the newest, divided
//             by the total
//
// Not the largest so far, as flash attention has it: the scores of a few queries find room, and so
// nothing depends on where blocks of keys begin. Queries and the heads of a group are the rows of a
// tile, which read keys and values together; each row's own ends (what is causal, what a window
// hides) come on either side of what all see.
#pragma once

#include "curves.hpp"

namespace mlxrunner::ISA {

inline i64 up16(i64 n) { return (n + 15) / 16 * 16; }

inline constexpr i64 kKeys = 8;     // keys that all rows meet before the next ones
inline constexpr i64 kValues = 64;  // values likewise

// Keys and columns that a tile of so many rows has.
constexpr int tile_keys(int rows) {
  int keys = 8;
  while (keys > 1 && keys * rows > kTileSums) keys /= 2;
  return keys;
}

// What query i of a block sees, [from, to), counted from the oldest position that is there.
struct Range {
  i64 from, to;
};
inline Range seen(const Attending& a, i64 i) {
  Range all{0, a.length};
  if (!a.causal) return all;
  const i64 end = a.position + i - a.first + 1;
  if (end < a.length) all.to = end > 0 ? end : 0;
  if (a.window && end > a.window) all.from = end - a.window;
  if (all.from > all.to) all.from = all.to;
  return all;
}

// Where what a block needs lies.
struct Room {
  i64 rows, depth, width;  // the latter two in whole vectors
  i64 begin, end;          // what any query of the block sees
  i64 pad, columns;        // a row of scores: position p lies at a column that is p modulo 16
  float *queries, *keys, *scores, *sums, *totals;

  Room(const Attending& a, float* scratch)
      : rows(a.queries * a.group), depth(up16(a.depth)), width(up16(a.width)),
        begin(seen(a, 0).from), end(seen(a, a.queries - 1).to), pad((a.first + begin) % 16),
        columns(up16(pad + (end > begin ? end - begin : 0))) {
    queries = scratch;
    keys = queries + rows * depth;
    scores = keys + kKeys * depth;
    sums = scores + rows * columns;
    totals = sums + rows * width;
  }
  i64 floats() const { return rows * (depth + columns + width + 1) + kKeys * depth; }
  float* score(i64 row, i64 index) const { return scores + row * columns + pad + index - begin; }
};

// Calls each(index, slot, count) for the runs of [from, to) that lie in memory without a break.
template <class F>
inline void runs(const Attending& a, i64 from, i64 to, i64 most, F each) {
  while (from < to) {
    i64 slot = a.head + from;
    if (slot >= a.capacity) slot -= a.capacity;
    i64 count = to - from < most ? to - from : most;
    if (count > a.capacity - slot) count = a.capacity - slot;
    each(from, slot, count);
    from += count;
  }
}

// ---- scores ----------------------------------------------------------------------------------

template <int R, int M>
inline void dots(const float* keys, i64 step, const float* queries, i64 depth, float* out,
                 i64 columns) {
  V sums[M][R];
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) sums[m][r] = zero();
  const auto next = reinterpret_cast<std::uintptr_t>(keys) + R * step * 4;  // may be behind all
  for (i64 k = 0; k < depth; k += 16) {
    V wide[R];
    for (int r = 0; r < R; r++) {
      // with few rows the keys come as fast as memory gives them
      if constexpr (M <= 2) prefetch(next + (r * step + k) * 4);
      wide[r] = load(keys + r * step + k);
    }
    for (int m = 0; m < M; m++) {
      const V q = load(queries + m * depth + k);
      for (int r = 0; r < R; r++) sums[m][r] = fma(wide[r], q, sums[m][r]);
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

// `count` keys and all rows.
template <int M>
inline void score(const Room& room, i64 row, const float* keys, i64 step, i64 count, i64 index) {
  for (; row + M <= room.rows; row += M) {
    const float* q = room.queries + row * room.depth;
    i64 r = 0;
    for (; r + tile_keys(M) <= count; r += tile_keys(M))
      dots<tile_keys(M), M>(keys + r * step, step, q, room.depth, room.score(row, index + r),
                            room.columns);
    for (; r < count; r++)
      dots<1, M>(keys + r * step, step, q, room.depth, room.score(row, index + r), room.columns);
  }
  if constexpr (M > 1)
    if (row < room.rows) score<M - 1>(room, row, keys, step, count, index);
}

inline void score_all(const Attending& a, const Room& room) {
  for (i64 i = 0; i < a.queries; i++)
    for (i64 g = 0; g < a.group; g++) {
      const float* from = a.q + g * a.q_head + i * a.q_step;
      float* to = room.queries + (i * a.group + g) * room.depth;
      for (i64 k = 0; k < room.depth; k += 16)
        store(to + k, load(from + k, a.depth - k < 16 ? a.depth - k : 16));
    }
  runs(a, room.begin, room.end, kKeys, [&](i64 index, i64 slot, i64 count) {
    const float* keys = a.keys + slot * a.key_step;
    i64 step = a.key_step;
    if (room.depth != a.depth) {
      for (i64 r = 0; r < count; r++)
        for (i64 k = 0; k < room.depth; k += 16)
          store(room.keys + r * room.depth + k,
                load(keys + r * step + k, a.depth - k < 16 ? a.depth - k : 16));
      keys = room.keys, step = room.depth;
    }
    score<kTileRows>(room, 0, keys, step, count, index);
  });
}

// ---- weights ---------------------------------------------------------------------------------

inline float exp_of(float x) {
  float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

inline float largest(V a) {
  float lanes[16], most = -__builtin_inff();
  store(lanes, a);
  for (float one : lanes) most = one > most ? one : most;
  return most;
}

// Makes weights of a row's scores; returns their total.
inline float weigh(const Attending& a, const Room& room, i64 row, Range sees, const float* sink) {
  const float never = -__builtin_inff();
  float *from = room.score(row, sees.from), *to = room.score(row, sees.to);
  float* begin = room.scores + row * room.columns;
  float *first = begin + (from - begin) / 16 * 16, *last = begin + up16(to - begin);
  if (a.softcap > 0)
    for (float* s = first; s < last; s += 16)
      store(s, mul(set1(a.softcap), tanh(div(mul(load(s), set1(a.scale)), set1(a.softcap)))));
  // what is hidden in the outermost vectors weighs nothing
  for (float* s = first; s < from; s++) *s = never;
  for (float* s = to; s < last; s++) *s = never;
  const V scale = set1(a.softcap > 0 ? 1.0f : a.scale);
  V most = set1(never);
  for (float* s = first; s < last; s += 16) {
    const V scaled = mul(load(s), scale);
    most = max(most, scaled);
    store(s, scaled);
  }
  float top = largest(most);
  if (sink && *sink > top) top = *sink;
  V total = zero();
  for (float* s = first; s < last; s += 16) {
    const V weight = exp(sub(load(s), set1(top)));
    total = add(total, weight);
    store(s, weight);
  }
  return sum(total) + (sink ? exp_of(*sink - top) : 0.0f);
}

// ---- values ----------------------------------------------------------------------------------

// C vectors of the sums of M rows; of the last one `tail` lanes.
template <int M, int C, bool kTail>
inline void gather(const float* weights, i64 columns, const float* values, i64 step, i64 count,
                   float* sums, i64 width, i64 tail) {
  V to[M][C];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) to[m][c] = load(sums + m * width + 16 * c);
  for (i64 j = 0; j < count; j++) {
    V value[C];
    for (int c = 0; c < C; c++)
      value[c] = kTail ? load(values + j * step + 16 * c, tail) : load(values + j * step + 16 * c);
    for (int m = 0; m < M; m++) {
      const V weight = set1(weights[m * columns + j]);
      for (int c = 0; c < C; c++) to[m][c] = fma(weight, value[c], to[m][c]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) store(sums + m * width + 16 * c, to[m][c]);
}

template <int M, int C>
inline void columns_of(const Attending& a, const Room& room, const float* weights,
                       const float* values, i64 count, float* sums, i64 k) {
  for (; k + 16 * C <= a.width; k += 16 * C)
    gather<M, C, false>(weights, room.columns, values + k, a.value_step, count, sums + k,
                        room.width, 16);
  if constexpr (C > 1) columns_of<M, C / 2>(a, room, weights, values, count, sums, k);
  else if (k < a.width)
    gather<M, 1, true>(weights, room.columns, values + k, a.value_step, count, sums + k, room.width,
                       a.width - k);
}

template <int M>
inline void gather_rows(const Attending& a, const Room& room, i64 row, i64 end, i64 index,
                        const float* values, i64 count) {
  for (; row + M <= end; row += M)
    columns_of<M, tile_keys(M)>(a, room, room.score(row, index), values, count,
                                room.sums + row * room.width, 0);
  if constexpr (M > 1)
    if (row < end) gather_rows<M - 1>(a, room, row, end, index, values, count);
}

// Rows [row, end) and what all of them see of [from, to).
inline void gather_range(const Attending& a, const Room& room, i64 row, i64 end, i64 from, i64 to) {
  runs(a, from, to, kValues, [&](i64 index, i64 slot, i64 count) {
    gather_rows<kTileRows>(a, room, row, end, index, a.values + slot * a.value_step, count);
  });
}

inline void gather_all(const Attending& a, const Room& room) {
  for (i64 k = 0; k < room.rows * room.width; k += 16) store(room.sums + k, zero());
  // the newest query's window begins last, the oldest query's view ends first
  Range all{seen(a, a.queries - 1).from, seen(a, 0).to};
  const bool shared = all.from < all.to;
  const auto each = [&](auto part) {
    for (i64 i = 0; i < a.queries; i++) {
      const Range part_of = part(seen(a, i));
      gather_range(a, room, i * a.group, (i + 1) * a.group, part_of.from, part_of.to);
    }
  };
  if (!shared) return each([](Range r) { return r; });
  each([&](Range r) { return Range{r.from, all.from}; });
  gather_range(a, room, 0, room.rows, all.from, all.to);
  each([&](Range r) { return Range{all.to, r.to}; });
}

// ---- all of it -------------------------------------------------------------------------------

inline i64 attend_scratch(const Attending& a) { return Room(a, nullptr).floats(); }

inline void attend(const Attending& a, float* scratch) {
  const Room room(a, scratch);
  score_all(a, room);
  for (i64 row = 0; row < room.rows; row++) {
    const Range sees = seen(a, row / a.group);
    const float* sink = a.sinks ? a.sinks + row % a.group : nullptr;
    room.totals[row] = sees.from < sees.to ? weigh(a, room, row, sees, sink) : 1.0f;
  }
  gather_all(a, room);
  for (i64 row = 0; row < room.rows; row++) {
    const float* sums = room.sums + row * room.width;
    float* out = a.out + row % a.group * a.out_head + row / a.group * a.out_step;
    const V total = set1(room.totals[row]);
    for (i64 k = 0; k < a.width; k += 16)
      store(out + k, div(load(sums + k), total), a.width - k < 16 ? a.width - k : 16);
  }
}

}  // namespace mlxrunner::ISA
