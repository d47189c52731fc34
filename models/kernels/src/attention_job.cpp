#include "attention_job.hpp"

#include <algorithm>
#include <cstring>

#include "cpu.hpp"
#include "pool.hpp"

namespace mlxrunner {

namespace {

// Rows (queries times heads of a group) that read keys and values together.
constexpr std::int64_t kRows = 24;

struct ForQueries;
struct ForKeys;
struct ForValues;
struct ForAttending;

// A [B, H, L, D] of float32 whose last axis lies without gaps.
struct Heads {
  const float* data;
  std::int64_t batch, head, step;  // distances

  template <class Which>
  static Heads of(const View& v) {
    const auto& s = v.strides;
    if (v.shape.back() == 1 || s.back() == 1) return {v.data, s[0], s[1], s[2]};
    const std::int64_t step = v.shape[3], head = step * v.shape[2], batch = head * v.shape[1];
    float* room = scratch<Which>(static_cast<std::size_t>(batch * v.shape[0]));
    return {v.rows(room), batch, head, step};
  }
};

std::int64_t group(const AttentionJob& job) { return job.heads / job.kv_heads; }
std::int64_t block(const AttentionJob& job) {
  return std::max<std::int64_t>(1, kRows / group(job));
}
std::int64_t blocks(const AttentionJob& job) { return (job.length + block(job) - 1) / block(job); }

// Everything of a part but keys, values and where they lie; its position counts from the first of
// the new ones.
Attending part_of(const AttentionJob& job, const Heads& q, std::int64_t b, std::int64_t h,
                  std::int64_t i) {
  const std::int64_t from = i * block(job);
  Attending a{};
  a.queries = std::min(block(job), job.length - from), a.group = group(job);
  a.q = q.data + b * q.batch + h * a.group * q.head + from * q.step;
  a.q_head = q.head, a.q_step = q.step;
  a.position = from;
  a.causal = job.causal, a.window = job.window;
  a.depth = job.depth, a.width = job.width;
  a.scale = job.scale, a.softcap = job.softcap;
  a.sinks = job.sinks ? job.sinks + h * a.group : nullptr;
  a.out_head = job.width, a.out_step = job.heads * job.width;
  a.out = job.out + (b * job.length + from) * a.out_step + h * a.group * job.width;
  return a;
}

// Calls each(b, h, i) for every part. seen: keys of all sequences.
template <class F>
void for_parts(const AttentionJob& job, std::int64_t seen, F each) {
  const std::int64_t all = job.batch * job.kv_heads, parts = all * blocks(job);
  const auto part = [&](std::int64_t n) {
    // late queries see most: they come first, so that no thread is left with one at the end
    each(n % all / job.kv_heads, n % job.kv_heads, blocks(job) - 1 - n / all);
  };
  if (seen * job.heads * job.length * (job.depth + job.width) >= kAlone)
    return Pool::shared().run(parts, part);
  for (std::int64_t n = 0; n < parts; n++) part(n);
}

void attend_part(const Attending& a) {
  const Kernels& k = kernels();
  k.attend(a, scratch<ForAttending>(static_cast<std::size_t>(k.attend_scratch(a))));
}

// Writes the new positions of one head.
void write(const Heads& from, std::int64_t b, std::int64_t h, std::int64_t length, float* buffer,
           std::int64_t capacity, std::int64_t slot, std::int64_t width) {
  const float* row = from.data + b * from.batch + h * from.head;
  for (std::int64_t i = 0; i < length; i++, row += from.step)
    std::memcpy(buffer + (h * capacity + (slot + i) % capacity) * width, row,
                static_cast<std::size_t>(width) * sizeof(float));
}

}  // namespace

std::vector<Buffers> buffers_of(std::vector<mx::array>& outs, const std::vector<Place>& places) {
  std::vector<Buffers> rows;
  const std::size_t count = places.size();
  rows.reserve(count);
  for (std::size_t b = 0; b < count; b++)
    rows.push_back({outs[1 + b].data<float>(), outs[1 + count + b].data<float>(),
                    outs[1 + b].shape(2), places[b]});
  return rows;
}

void attend(const AttentionJob& job, const View& q, const View& keys, const View& values) {
  const Heads of_q = Heads::of<ForQueries>(q), k = Heads::of<ForKeys>(keys),
              v = Heads::of<ForValues>(values);
  const std::int64_t total = keys.shape[2];
  for_parts(job, job.batch * total, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    Attending a = part_of(job, of_q, b, h, i);
    a.keys = k.data + b * k.batch + h * k.head, a.key_step = k.step;
    a.values = v.data + b * v.batch + h * v.head, a.value_step = v.step;
    a.capacity = a.length = total;
    a.position += total - job.length;
    attend_part(a);
  });
}

void append_and_attend(const AttentionJob& job, const View& q, const View& k, const View& v,
                       const std::vector<Buffers>& rows) {
  const Heads of_q = Heads::of<ForQueries>(q), of_k = Heads::of<ForKeys>(k),
              of_v = Heads::of<ForValues>(v);
  std::int64_t seen = 0;
  for (const Buffers& row : rows) seen += row.place.length;
  const auto append = [&](std::int64_t b, std::int64_t h) {
    const Buffers& row = rows[static_cast<std::size_t>(b)];
    write(of_k, b, h, job.length, row.keys, row.capacity, row.place.slot, job.depth);
    write(of_v, b, h, job.length, row.values, row.capacity, row.place.slot, job.width);
  };
  // with one block of queries, the part that reads a head's keys is the one that writes them
  const bool apart = blocks(job) > 1;
  if (apart)
    Pool::shared().run(job.batch * job.kv_heads,
                       [&](std::int64_t n) { append(n / job.kv_heads, n % job.kv_heads); });
  for_parts(job, seen, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    if (!apart) append(b, h);
    const Buffers& row = rows[static_cast<std::size_t>(b)];
    Attending a = part_of(job, of_q, b, h, i);
    a.keys = row.keys + h * row.capacity * job.depth, a.key_step = job.depth;
    a.values = row.values + h * row.capacity * job.width, a.value_step = job.width;
    a.capacity = row.capacity, a.head = row.place.head;
    a.first = row.place.first, a.length = row.place.length;
    a.position += row.place.first + row.place.length - job.length;
    attend_part(a);
  });
}

}  // namespace mlxrunner
