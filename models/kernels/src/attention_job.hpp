// An attention operation, divided into tasks for the thread pool.
//
// Knows: the memory layouts of arrays, the slots of a cache. Must not know: the graph, the owners
// of buffers. A task is one key/value head of one sequence and a block of queries.
#pragma once

#include <cstddef>
#include <vector>

#include "attention_ops.hpp"
#include "kernels.hpp"

namespace mlxrunner {

// The buffers of one sequence: [Hkv, capacity, D or Dv].
struct KVBuffers {
  KVType type;
  std::byte *keys, *values;
  std::int64_t capacity;
  SlotMapping slots;
};

// Returns the buffers for each slot mapping. arrays[1..] are all key buffers, then all value
// buffers.
std::vector<KVBuffers> get_buffers(std::vector<mx::array>& arrays,
                                   const std::vector<SlotMapping>& slot_mappings);

// The most queries, counted once per head of a group, whose scores of `keys` keys a thread stores
// at the same time. A single query may have more heads.
std::int64_t max_rows_per_task(std::int64_t keys);

// The parameters that all tasks share. out: [B, L, Hq, Dv].
struct AttentionJob {
  std::int64_t batch, heads, kv_heads, length, key_dim, value_dim;
  bool causal;
  std::int64_t window;
  float scale, softcap;
  const float* sinks;
  float* out;
};

// q [B, Hq, L, D], keys [B, Hkv, S, D], values [B, Hkv, S, Dv].
void attend(const AttentionJob& job, const View& q, const View& keys, const View& values);

// Writes k and v of the new positions to the buffers of each sequence, and then computes attention
// to all positions in the buffers.
void append_and_attend(const AttentionJob& job, const View& q, const View& k, const View& v,
                       const std::vector<KVBuffers>& buffers);

// Computes attention to the positions in the buffers. The queries belong to the last positions.
void attend_shared(const AttentionJob& job, const View& q, const std::vector<KVBuffers>& buffers);

}  // namespace mlxrunner
