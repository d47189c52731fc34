// One attention, cut into parts for the threads of the pool.
//
// Knows: how arrays lie in memory, where a cache keeps its positions. Must not know: the graph, who
// owns a buffer. A part is a key/value head of one sequence and a block of queries.
#pragma once

#include <vector>

#include "attending.hpp"

namespace mlxrunner {

// One sequence's buffers: [Hkv, capacity, D or Dv].
struct Buffers {
  float *keys, *values;
  std::int64_t capacity;
  Place place;
};

// Of each place, where outs[1..] are all buffers of keys and then all of values.
std::vector<Buffers> buffers_of(std::vector<mx::array>& outs, const std::vector<Place>& places);

// What is the same for all parts. depth, width: of a key, of a value. out: [B, L, Hq, Dv].
struct AttentionJob {
  std::int64_t batch, heads, kv_heads, length, depth, width;
  bool causal;
  std::int64_t window;
  float scale, softcap;
  const float* sinks;
  float* out;
};

// q [B, Hq, L, D], keys [B, Hkv, S, D], values [B, Hkv, S, Dv].
void attend(const AttentionJob& job, const View& q, const View& keys, const View& values);

// The same of what each sequence's buffers hold, once k and v of the new positions are written to
// them.
void append_and_attend(const AttentionJob& job, const View& q, const View& k, const View& v,
                       const std::vector<Buffers>& rows);

}  // namespace mlxrunner
