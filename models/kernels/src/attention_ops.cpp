#include "attending.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "attention_job.hpp"
#include "held.hpp"

namespace mlxrunner {

namespace {

AttentionJob job_of(const mx::array& q, const mx::array& keys, const mx::array& values,
                    const Attention& by, bool causal, const float* sinks, mx::array& out) {
  return {q.shape(0), q.shape(1), keys.shape(1), q.shape(2), q.shape(3), values.shape(3), causal,
          by.window, by.scale, by.softcap, sinks, out.data<float>()};
}

// [B, Hq, L, Dv] that lies as [B, L, Hq, Dv].
void allocate_turned(mx::array& out) {
  const std::int64_t heads = out.shape(1), length = out.shape(2), width = out.shape(3);
  const mx::Strides strides{length * heads * width, width, heads * width, 1};
  const bool same = heads == 1 || length == 1;
  out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), strides, {true, same, false});
}

class AttentionPrimitive : public CpuPrimitive {
 public:
  AttentionPrimitive(mx::Stream stream, Attention by, bool causal)
      : CpuPrimitive(stream), by_(std::move(by)), causal_(causal) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate_turned(outs[0]);
    if (!outs[0].size()) return;
    const float* sinks = by_.sinks ? in[3].data<float>() : nullptr;
    const AttentionJob job = job_of(in[0], in[1], in[2], by_, causal_, sinks, outs[0]);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [job, q = View(in[0]), keys = View(in[1]), values = View(in[2])] {
          attend(job, q, keys, values);
        });
  }

  const char* name() const override { return "mlxrunner::Attention"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Attention by_;
  bool causal_;
};

// Inputs: q, k, v, buffers of keys, buffers of values, sinks where there are any.
class AttendPrimitive : public CpuPrimitive {
 public:
  AttendPrimitive(mx::Stream stream, Attention by, std::vector<Place> places)
      : CpuPrimitive(stream), by_(std::move(by)), places_(std::move(places)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate_turned(outs[0]);
    Lent lent(in, 3, outs);
    std::vector<Buffers> rows = buffers_of(outs, places_);
    const float* sinks = by_.sinks ? in.back().data<float>() : nullptr;
    const AttentionJob job = job_of(in[0], in[1], in[2], by_, true, sinks, outs[0]);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [job, lent = std::move(lent), rows = std::move(rows), q = View(in[0]), k = View(in[1]),
         v = View(in[2])]() mutable {
          lent.begin();
          if (job.batch && job.length) append_and_attend(job, q, k, v, rows);
          lent.end();
        });
  }

  const char* name() const override { return "mlxrunner::Attend"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Attention by_;
  std::vector<Place> places_;
};

void want_heads(const mx::array& q, const mx::array& k, const mx::array& v, const Attention& by) {
  for (const mx::array* one : {&q, &k, &v})
    want(one->dtype() == mx::float32 && one->ndim() == 4,
         "queries, keys and values must be [batch, heads, length, dim] of float32");
  want(k.shape(0) == q.shape(0) && v.shape(0) == q.shape(0) && k.shape(1) == v.shape(1) &&
           k.shape(2) == v.shape(2) && k.shape(3) == q.shape(3),
       "queries, keys and values must fit each other");
  want(k.shape(1) > 0 && q.shape(1) > 0 && q.shape(1) % k.shape(1) == 0,
       "heads of queries must be a multiple of those of keys");
  want(by.scale > 0 && by.window >= 0 && by.softcap >= 0,
       "scale must be positive, window and softcap positive or 0");
  if (by.sinks)
    want(by.sinks->dtype() == mx::float32 && by.sinks->shape() == mx::Shape{q.shape(1)},
         "sinks must be [heads] of float32");
}

}  // namespace

void want_place(const Place& at, int length, const mx::array& keys, const mx::array& values,
                const PositionShape& shape) {
  for (const auto& [buffer, width] :
       {std::pair(&keys, shape.depth), std::pair(&values, shape.width)})
    want(buffer->dtype() == mx::float32 &&
             buffer->shape() == mx::Shape{1, shape.heads, keys.shape(2), width},
         "a buffer must be [1, heads, capacity, dim] of float32");
  const int capacity = keys.shape(2);
  want(at.first >= 0 && at.head >= 0 && at.head < std::max(1, capacity) && at.length >= length &&
           at.length <= capacity,
       "the positions must fit into the buffer, new ones included");
  want(!length || at.slot == (static_cast<std::int64_t>(at.head) + at.length - length) % capacity,
       "new positions must follow the existing ones");
}

std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> attend(
    const mx::array& q, const mx::array& k, const mx::array& v, const std::vector<mx::array>& keys,
    const std::vector<mx::array>& values, const std::vector<Place>& places,
    const Attention& attention) {
  want_heads(q, k, v, attention);
  want(k.shape(2) == q.shape(2), "each new position needs a query, a key and a value");
  const std::size_t count = static_cast<std::size_t>(q.shape(0));
  want(keys.size() == count && values.size() == count && places.size() == count,
       "each sequence needs buffers and a slot mapping");
  for (std::size_t b = 0; b < count; b++)
    want_place(places[b], q.shape(2), keys[b], values[b], {k.shape(1), k.shape(3), v.shape(3)});
  std::vector<mx::array> in{q, k, v};
  in.insert(in.end(), keys.begin(), keys.end());
  in.insert(in.end(), values.begin(), values.end());
  if (attention.sinks) in.push_back(lined(*attention.sinks));
  std::vector<mx::Shape> shapes{{q.shape(0), q.shape(1), q.shape(2), v.shape(3)}};
  for (const auto* all : {&keys, &values})
    for (const mx::array& one : *all) shapes.push_back(one.shape());
  const std::vector<mx::Dtype> types(shapes.size(), mx::float32);
  auto outs = mx::array::make_arrays(
      std::move(shapes), types,
      std::make_shared<AttendPrimitive>(cpu(), attention, places), in);
  const auto middle = outs.begin() + 1 + static_cast<std::ptrdiff_t>(count);
  return {outs[0], {outs.begin() + 1, middle}, {middle, outs.end()}};
}

mx::array attention(const mx::array& q, const mx::array& keys, const mx::array& values, bool causal,
                    const Attention& by) {
  want_heads(q, keys, values, by);
  want(causal || !by.window, "a window without causality is not supported");
  std::vector<mx::array> in{q, keys, values};
  if (by.sinks) in.push_back(lined(*by.sinks));
  return mx::array({q.shape(0), q.shape(1), q.shape(2), values.shape(3)}, mx::float32,
                   std::make_shared<AttentionPrimitive>(cpu(), by, causal), std::move(in));
}

}  // namespace mlxrunner
