#include "attention_job.hpp"

#include <algorithm>

#include "isa_dispatch.hpp"
#include "thread_pool.hpp"

namespace mlxrunner {

namespace {

// The rows of a task (queries times heads of a group) share the loads, the conversion and the
// transposition of keys and values. A task has at least the first number of rows if there are
// enough queries, and at most the second one unless a single query has more.
constexpr std::int64_t kMinRowsPerTask = 24, kMaxRowsPerTask = 128;
// A task computes scores for all keys that its newest query sees, and attends row by row to keys
// that not all queries see. With this many keys per row, this takes little time.
constexpr std::int64_t kKeysPerRow = 24;
// The most scores of a task, so that those of all threads stay in the last cache of a processor.
constexpr std::int64_t kMaxScores = 1 << 20;
// Tasks per thread, so that no thread waits long for the last task of another.
constexpr std::int64_t kTasksPerThread = 4;

struct ForQueries;
struct ForKeys;
struct ForValues;
struct ForAttention;

// A float32 array [B, H, L, D] whose last axis is contiguous.
struct HeadView {
  const float* data;
  std::int64_t batch, head, step;  // strides, in floats

  template <class Tag>
  static HeadView make(const View& v) {
    const auto& s = v.strides;
    if (v.shape.back() == 1 || s.back() == 1) return {v.data, s[0], s[1], s[2]};
    const std::int64_t step = v.shape[3], head = step * v.shape[2], batch = head * v.shape[1];
    float* buffer = scratch<Tag>(static_cast<std::size_t>(batch * v.shape[0]));
    return {v.rows(buffer), batch, head, step};
  }
};

std::int64_t group_size(const AttentionJob& job) { return job.heads / job.kv_heads; }

// The queries of a job, divided into blocks of almost the same size.
struct QueryBlocks {
  std::int64_t count, size;

  // keys: of the longest sequence
  QueryBlocks(const AttentionJob& job, std::int64_t keys) {
    if (job.window) keys = std::min(keys, job.window);
    const std::int64_t mean_keys = job.causal ? keys - std::min(keys, job.length) / 2 : keys;
    const std::int64_t all_rows = job.batch * job.heads * job.length,
                       tasks = kTasksPerThread * ThreadPool::shared().num_threads();
    const std::int64_t rows =
        std::clamp(std::min(all_rows / tasks, mean_keys / kKeysPerRow), kMinRowsPerTask,
                   max_rows_per_task(keys));
    size = std::max<std::int64_t>(1, rows / group_size(job));
    count = (job.length + size - 1) / size;
    size = (job.length + count - 1) / count;
  }
};

// Creates a task without keys, values and their slots. Its position is relative to the first new
// position.
AttentionTask make_task(const AttentionJob& job, const QueryBlocks& blocks, const HeadView& q,
                        std::int64_t b, std::int64_t h, std::int64_t i) {
  const std::int64_t from = i * blocks.size;
  AttentionTask a{};
  a.queries = std::min(blocks.size, job.length - from), a.group = group_size(job);
  a.q = q.data + b * q.batch + h * a.group * q.head + from * q.step;
  a.q_head = q.head, a.q_step = q.step;
  a.position = from;
  a.causal = job.causal, a.window = job.window;
  a.key_dim = job.key_dim, a.value_dim = job.value_dim;
  a.scale = job.scale, a.softcap = job.softcap;
  a.sinks = job.sinks ? job.sinks + h * a.group : nullptr;
  a.out_head = job.value_dim, a.out_step = job.heads * job.value_dim;
  a.out = job.out + (b * job.length + from) * a.out_step + h * a.group * job.value_dim;
  return a;
}

// Calls function(b, h, i) for each task. num_keys: the number of keys of all sequences.
template <class F>
void for_tasks(const AttentionJob& job, const QueryBlocks& blocks, std::int64_t num_keys,
               F function) {
  const std::int64_t tasks = job.batch * job.kv_heads * blocks.count;
  const auto task = [&](std::int64_t n) {
    // The tasks of a head follow each other, so that its keys and values stay in the processor's
    // caches. Late queries attend to the most keys; they run first, so that no thread ends with a
    // long task.
    const std::int64_t head = n / blocks.count;
    function(head / job.kv_heads, head % job.kv_heads, blocks.count - 1 - n % blocks.count);
  };
  if (num_keys * job.heads * job.length * (job.key_dim + job.value_dim) >= kMinParallelWork)
    return ThreadPool::shared().run(tasks, task);
  for (std::int64_t n = 0; n < tasks; n++) task(n);
}

void run_task(const AttentionTask& a) {
  const Kernels& k = kernels();
  k.attend(a, scratch<ForAttention>(static_cast<std::size_t>(k.attend_scratch(a))));
}

KVType kv_type_of(const mx::array& buffer) {
  if (buffer.dtype() == mx::bfloat16) return KVType::bf16;
  return buffer.dtype() == mx::float16 ? KVType::f16 : KVType::f32;
}

// Writes the new positions of one head to its buffer, in the type of the buffer.
void write_head(const HeadView& from, std::int64_t b, std::int64_t h, std::int64_t length,
                const KVBuffers& to, std::byte* buffer, std::int64_t width) {
  const float* row = from.data + b * from.batch + h * from.head;
  const std::int64_t bytes = width * kv_number_bytes(to.type), first = h * to.capacity;
  for (std::int64_t i = 0; i < length; i++, row += from.step)
    kernels().store_kv_row(to.type, row, width,
                           buffer + (first + (to.slots.write_slot + i) % to.capacity) * bytes);
}

// Computes attention to the buffers. append(b, h) writes the new positions of a head, if
// `appends`.
template <class F>
void attend_buffers(const AttentionJob& job, const HeadView& q, const std::vector<KVBuffers>& buffers,
                    bool appends, F append) {
  std::int64_t num_keys = 0, longest = 0;
  for (const KVBuffers& row : buffers) {
    num_keys += row.slots.length;
    longest = std::max<std::int64_t>(longest, row.slots.length);
  }
  const QueryBlocks blocks(job, longest);
  // with one block of queries, the task that reads the keys of a head also writes them
  const bool append_first = appends && blocks.count > 1;
  if (append_first)
    ThreadPool::shared().run(job.batch * job.kv_heads,
                             [&](std::int64_t n) { append(n / job.kv_heads, n % job.kv_heads); });
  for_tasks(job, blocks, num_keys, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    if (appends && !append_first) append(b, h);
    const KVBuffers& row = buffers[static_cast<std::size_t>(b)];
    AttentionTask a = make_task(job, blocks, q, b, h, i);
    const std::int64_t head_bytes = h * row.capacity * kv_number_bytes(row.type);
    a.kv_type = row.type;
    a.keys = row.keys + head_bytes * job.key_dim, a.key_step = job.key_dim;
    a.values = row.values + head_bytes * job.value_dim, a.value_step = job.value_dim;
    a.capacity = row.capacity, a.head_slot = row.slots.head_slot;
    a.first_position = row.slots.first_position, a.length = row.slots.length;
    a.position += row.slots.first_position + row.slots.length - job.length;
    run_task(a);
  });
}

}  // namespace

std::int64_t max_rows_per_task(std::int64_t keys) {
  if (keys < 1) return kMinRowsPerTask;
  const std::int64_t most = std::min(keys / kKeysPerRow, kMaxScores / keys);
  return std::clamp(most, kMinRowsPerTask, kMaxRowsPerTask);
}

std::vector<KVBuffers> get_buffers(std::vector<mx::array>& arrays,
                                   const std::vector<SlotMapping>& slot_mappings) {
  std::vector<KVBuffers> buffers;
  const std::size_t count = slot_mappings.size();
  buffers.reserve(count);
  for (std::size_t b = 0; b < count; b++)
    buffers.push_back({kv_type_of(arrays[1 + b]), arrays[1 + b].data<std::byte>(),
                       arrays[1 + count + b].data<std::byte>(), arrays[1 + b].shape(2),
                       slot_mappings[b]});
  return buffers;
}

void attend(const AttentionJob& job, const View& q, const View& keys, const View& values) {
  const HeadView q_heads = HeadView::make<ForQueries>(q), k = HeadView::make<ForKeys>(keys),
                 v = HeadView::make<ForValues>(values);
  const std::int64_t total = keys.shape[2];
  const QueryBlocks blocks(job, total);
  for_tasks(job, blocks, job.batch * total, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    AttentionTask a = make_task(job, blocks, q_heads, b, h, i);
    a.kv_type = KVType::f32;
    a.keys = k.data + b * k.batch + h * k.head, a.key_step = k.step;
    a.values = v.data + b * v.batch + h * v.head, a.value_step = v.step;
    a.capacity = a.length = total;
    a.position += total - job.length;
    run_task(a);
  });
}

void append_and_attend(const AttentionJob& job, const View& q, const View& k, const View& v,
                       const std::vector<KVBuffers>& buffers) {
  const HeadView q_heads = HeadView::make<ForQueries>(q), k_heads = HeadView::make<ForKeys>(k),
                 v_heads = HeadView::make<ForValues>(v);
  attend_buffers(job, q_heads, buffers, true, [&](std::int64_t b, std::int64_t h) {
    const KVBuffers& row = buffers[static_cast<std::size_t>(b)];
    write_head(k_heads, b, h, job.length, row, row.keys, job.key_dim);
    write_head(v_heads, b, h, job.length, row, row.values, job.value_dim);
  });
}

void attend_shared(const AttentionJob& job, const View& q, const std::vector<KVBuffers>& buffers) {
  attend_buffers(job, HeadView::make<ForQueries>(q), buffers, false,
                 [](std::int64_t, std::int64_t) {});
}

}  // namespace mlxrunner
