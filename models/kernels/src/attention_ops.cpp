#include "attention_ops.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "attention_job.hpp"
#include "in_flight.hpp"

namespace mlxrunner {

namespace {

AttentionJob make_job(const mx::array& q, const mx::array& keys, const mx::array& values,
                      const AttentionParams& params, bool causal, const float* sinks,
                      mx::array& out) {
  return {q.shape(0), q.shape(1),    keys.shape(1), q.shape(2),     q.shape(3), values.shape(3),
          causal,     params.window, params.scale,  params.softcap, sinks,      out.data<float>()};
}

// Allocates [B, Hq, L, Dv] as a view of [B, L, Hq, Dv].
void allocate_transposed(mx::array& out) {
  const std::int64_t heads = out.shape(1), length = out.shape(2), dim = out.shape(3);
  const mx::Strides strides{length * heads * dim, dim, heads * dim, 1};
  const bool same = heads == 1 || length == 1;
  out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), strides, {true, same, false});
}

class AttentionPrimitive : public CpuPrimitive {
 public:
  AttentionPrimitive(mx::Stream stream, AttentionParams params, bool causal)
      : CpuPrimitive(stream), params_(std::move(params)), causal_(causal) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate_transposed(outs[0]);
    if (!outs[0].size()) return;
    const float* sinks = params_.sinks ? in[3].data<float>() : nullptr;
    const AttentionJob job = make_job(in[0], in[1], in[2], params_, causal_, sinks, outs[0]);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [job, q = View(in[0]), keys = View(in[1]), values = View(in[2])] {
          attend(job, q, keys, values);
        });
  }

  const char* name() const override { return "mlxrunner::Attention"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  AttentionParams params_;
  bool causal_;
};

// Its inputs are q, k, v, the key buffers, the value buffers, and the sinks if given.
class AppendAndAttendPrimitive : public CpuPrimitive {
 public:
  AppendAndAttendPrimitive(mx::Stream stream, AttentionParams params,
                           std::vector<SlotMapping> slot_mappings)
      : CpuPrimitive(stream), params_(std::move(params)), slot_mappings_(std::move(slot_mappings)) {
  }

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate_transposed(outs[0]);
    WritableBuffers writable(in, 3, outs);
    std::vector<KVBuffers> buffers = get_buffers(outs, slot_mappings_);
    const float* sinks = params_.sinks ? in.back().data<float>() : nullptr;
    const AttentionJob job = make_job(in[0], in[1], in[2], params_, true, sinks, outs[0]);
    mx::cpu::get_command_encoder(stream()).dispatch([job, writable = std::move(writable),
                                                     buffers = std::move(buffers), q = View(in[0]),
                                                     k = View(in[1]), v = View(in[2])]() mutable {
      writable.copy_shared();
      if (job.batch && job.length) append_and_attend(job, q, k, v, buffers);
      writable.release();
    });
  }

  const char* name() const override { return "mlxrunner::AppendAndAttend"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  AttentionParams params_;
  std::vector<SlotMapping> slot_mappings_;
};

// Its inputs are q, the key buffers and the value buffers.
class AttendSharedPrimitive : public CpuPrimitive {
 public:
  AttendSharedPrimitive(mx::Stream stream, AttentionParams params,
                        std::vector<SlotMapping> slot_mappings)
      : CpuPrimitive(stream), params_(std::move(params)), slot_mappings_(std::move(slot_mappings)) {
  }

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate_transposed(outs[0]);
    ReadBuffers readable(in, 1);
    std::vector<mx::array> arrays = in;
    std::vector<KVBuffers> buffers = get_buffers(arrays, slot_mappings_);
    const AttentionJob job = make_job(in[0], in[1], in[1 + slot_mappings_.size()], params_, true,
                                      nullptr, outs[0]);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [job, readable, buffers = std::move(buffers), q = View(in[0])]() mutable {
          if (job.batch && job.length) attend_shared(job, q, buffers);
          readable.release();
        });
  }

  const char* name() const override { return "mlxrunner::AttendShared"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  AttentionParams params_;
  std::vector<SlotMapping> slot_mappings_;
};

void check_heads(const mx::array& q, const mx::array& k, const mx::array& v,
                 const AttentionParams& params) {
  for (const mx::array* one : {&q, &k, &v})
    require(one->dtype() == mx::float32 && one->ndim() == 4,
            "queries, keys and values must be [batch, heads, length, dim] of float32");
  require(k.shape(0) == q.shape(0) && v.shape(0) == q.shape(0) && k.shape(1) == v.shape(1) &&
              k.shape(2) == v.shape(2) && k.shape(3) == q.shape(3),
          "queries, keys and values must fit each other");
  require(k.shape(1) > 0 && q.shape(1) > 0 && q.shape(1) % k.shape(1) == 0,
          "heads of queries must be a multiple of those of keys");
  require(params.scale > 0 && params.window >= 0 && params.softcap >= 0,
          "scale must be positive, and window and softcap must not be negative");
  if (params.sinks)
    require(params.sinks->dtype() == mx::float32 && params.sinks->shape() == mx::Shape{q.shape(1)},
            "sinks must be [heads] of float32");
}

}  // namespace

void check_slots(const SlotMapping& slots, int length, const mx::array& keys,
                 const mx::array& values, const KVShape& shape) {
  for (const auto& [buffer, dim] :
       {std::pair(&keys, shape.key_dim), std::pair(&values, shape.value_dim)})
    require((buffer->dtype() == mx::float32 || buffer->dtype() == mx::bfloat16 ||
             buffer->dtype() == mx::float16) &&
                buffer->dtype() == keys.dtype() &&
                buffer->shape() == mx::Shape{1, shape.heads, keys.shape(2), dim},
            "a buffer must be [1, heads, capacity, dim] of float32, bfloat16 or float16, in the "
            "type of the other one");
  const int capacity = keys.shape(2);
  require(slots.first_position >= 0 && slots.head_slot >= 0 &&
              slots.head_slot < std::max(1, capacity) && slots.length >= length &&
              slots.length <= capacity,
          "the positions must fit into the buffer, new ones included");
  require(!length ||
              slots.write_slot ==
                  (static_cast<std::int64_t>(slots.head_slot) + slots.length - length) % capacity,
          "new positions must follow the existing ones");
}

std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> attend(
    const mx::array& q, const mx::array& k, const mx::array& v, const std::vector<mx::array>& keys,
    const std::vector<mx::array>& values, const std::vector<SlotMapping>& slot_mappings,
    const AttentionParams& params) {
  check_heads(q, k, v, params);
  require(k.shape(2) == q.shape(2), "each new position needs a query, a key and a value");
  const std::size_t count = static_cast<std::size_t>(q.shape(0));
  require(keys.size() == count && values.size() == count && slot_mappings.size() == count,
          "each sequence needs buffers and a slot mapping");
  for (std::size_t b = 0; b < count; b++)
    check_slots(slot_mappings[b], q.shape(2), keys[b], values[b],
                {k.shape(1), k.shape(3), v.shape(3)});
  std::vector<mx::array> in{q, k, v};
  in.insert(in.end(), keys.begin(), keys.end());
  in.insert(in.end(), values.begin(), values.end());
  if (params.sinks) in.push_back(contiguous_rows(*params.sinks));
  std::vector<mx::Shape> shapes{{q.shape(0), q.shape(1), q.shape(2), v.shape(3)}};
  std::vector<mx::Dtype> types{mx::float32};
  for (const auto* all : {&keys, &values})
    for (const mx::array& one : *all)
      shapes.push_back(one.shape()), types.push_back(one.dtype());
  auto outs = mx::array::make_arrays(
      std::move(shapes), types,
      std::make_shared<AppendAndAttendPrimitive>(cpu(), params, slot_mappings), in);
  const auto middle = outs.begin() + 1 + static_cast<std::ptrdiff_t>(count);
  return {outs[0], {outs.begin() + 1, middle}, {middle, outs.end()}};
}

mx::array attend_shared(const mx::array& q, const std::vector<mx::array>& keys,
                        const std::vector<mx::array>& values,
                        const std::vector<SlotMapping>& slot_mappings,
                        const AttentionParams& params) {
  const std::size_t count = static_cast<std::size_t>(q.ndim() == 4 ? q.shape(0) : 0);
  require(count > 0 && q.dtype() == mx::float32,
          "queries must be [batch, heads, length, dim] of float32");
  require(keys.size() == count && values.size() == count && slot_mappings.size() == count,
          "each sequence needs buffers and a slot mapping");
  require(keys[0].ndim() == 4 && values[0].ndim() == 4, "a buffer must have four axes");
  const KVShape shape{keys[0].shape(1), keys[0].shape(3), values[0].shape(3)};
  require(shape.heads > 0 && q.shape(1) > 0 && q.shape(1) % shape.heads == 0 &&
              q.shape(3) == shape.key_dim,
          "queries must fit the keys");
  require(params.scale > 0 && params.window >= 0,
          "scale must be positive, and window must not be negative");
  for (std::size_t b = 0; b < count; b++) {
    check_slots(slot_mappings[b], 0, keys[b], values[b], shape);
    require(slot_mappings[b].length >= q.shape(2), "each query must have a position");
  }
  std::vector<mx::array> in{q};
  in.insert(in.end(), keys.begin(), keys.end());
  in.insert(in.end(), values.begin(), values.end());
  return mx::array({q.shape(0), q.shape(1), q.shape(2), shape.value_dim}, mx::float32,
                   std::make_shared<AttendSharedPrimitive>(cpu(), params, slot_mappings),
                   std::move(in));
}

mx::array attention(const mx::array& q, const mx::array& keys, const mx::array& values, bool causal,
                    const AttentionParams& params) {
  check_heads(q, keys, values, params);
  require(causal || !params.window, "a window without causality is not supported");
  std::vector<mx::array> in{q, keys, values};
  if (params.sinks) in.push_back(contiguous_rows(*params.sinks));
  return mx::array({q.shape(0), q.shape(1), q.shape(2), values.shape(3)}, mx::float32,
                   std::make_shared<AttentionPrimitive>(cpu(), params, causal), std::move(in));
}

}  // namespace mlxrunner
