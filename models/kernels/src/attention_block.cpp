#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "attention_job.hpp"
#include "block_runs.hpp"
#include "blocks.hpp"
#include "in_flight.hpp"
#include "residual.hpp"

namespace mlxrunner {

namespace {

struct ForArena;
struct ForMatmul;

// A matrix and the output of its multiplication.
struct MatmulOutput {
  MatrixAndBias matrix;
  float* y;
};

bool same_input_packing(const Matrix& a, const Matrix& b) {
  return a.format == b.format && a.scale_type == b.scale_type && a.group == b.group &&
         a.planes == b.planes && a.width == b.width;
}

// Multiplies the same contiguous rows of x by several matrices. The results equal those of separate
// calls of `multiply`. If all matrices use the same input packing, x is packed only once and the
// threads synchronize only once.
void multiply_qkv(const std::vector<MatmulOutput>& outputs, const float* x, std::int64_t count) {
  const Matrix& first = outputs[0].matrix.w;
  const auto same_packing = [&](const MatmulOutput& one) {
    return same_input_packing(first, one.matrix.w);
  };
  if (!std::all_of(outputs.begin(), outputs.end(), same_packing)) {
    for (const MatmulOutput& one : outputs)
      multiply(one.matrix.w, x, count, one.matrix.bias, one.y);
    return;
  }
  const Kernels& k = kernels();
  const PackedRows rows = pack_rows(first, x, count);
  std::array<std::int64_t, 3> task_rows{}, tasks{};  // at most three matrices
  std::int64_t scratch_size = 0, total = 0, multiplications = 0;
  for (std::size_t i = 0; i < outputs.size(); i++) {
    const Matrix& w = outputs[i].matrix.w;
    task_rows[i] = rows_per_task(w, count);
    tasks[i] = (w.rows + task_rows[i] - 1) / task_rows[i];
    scratch_size = std::max(scratch_size, k.matmul_scratch(w));
    total += tasks[i], multiplications += count * w.rows * w.width;
  }
  const auto run_task = [&](std::int64_t n) {
    std::size_t i = 0;
    for (; n >= tasks[i]; i++) n -= tasks[i];
    const auto& [matrix, y] = outputs[i];
    const std::int64_t begin = n * task_rows[i],
                       end = std::min(matrix.w.rows, begin + task_rows[i]);
    k.matmul(matrix.w, rows, matrix.bias, y, matrix.w.rows, begin, end,
             scratch<ForMatmul>(static_cast<std::size_t>(scratch_size)));
  };
  if (multiplications >= kMinParallelWork) return ThreadPool::shared().run(total, run_task);
  for (std::int64_t n = 0; n < total; n++) run_task(n);
}

// Normalizes and rotates the heads of one new position per sequence before attention.
class HeadTransform {
 public:
  HeadTransform(const std::optional<RopeParams>& rope, const std::vector<KVBuffers>& buffers,
                std::int64_t head_dim, float* buffer)
      : head_dim_(head_dim) {
    if (!rope) return;
    const std::int64_t half = rope->dims / 2;
    rotation_ = {rope->dims, head_dim, rope->traditional, rope->magnitude};
    stride_ = ScratchArena::round_up(half);
    cos_ = buffer, sin_ = buffer + static_cast<std::int64_t>(buffers.size()) * stride_;
    for (std::size_t b = 0; b < buffers.size(); b++) {
      const SlotMapping& slots = buffers[b].slots;
      const std::int64_t row = static_cast<std::int64_t>(b) * stride_;
      const int position = slots.first_position + slots.length - 1 + slots.rope_delta;
      kernels().rope_angles(static_cast<float>(position), rope->periods.data<float>(), half,
                            cos_ + row, sin_ + row);
    }
  }

  // The size of `buffer` in floats.
  static std::int64_t scratch_floats(const std::optional<RopeParams>& rope, std::int64_t count) {
    return rope ? 2 * count * ScratchArena::round_up(rope->dims / 2) : 0;
  }

  // x: [count, heads, head_dim], in place.
  void operator()(const std::optional<RmsNorm>& norm, float* x, std::int64_t heads,
                  std::int64_t count) const {
    if (!norm && !cos_) return;
    const float* weight = norm ? norm->weight.data<float>() : nullptr;
    parallel_for_rows(count * heads, head_dim_, [&](std::int64_t i) {
      float* head = x + i * head_dim_;
      if (norm) kernels().rms_norm(head, head_dim_, weight, norm->eps, head);
      if (!cos_) return;
      const std::int64_t offset = i / heads * stride_;
      kernels().rotate(rotation_, head, cos_ + offset, sin_ + offset, head);
    });
  }

 private:
  std::int64_t head_dim_, stride_ = 0;
  Rotation rotation_{};
  float *cos_ = nullptr, *sin_ = nullptr;
};

}  // namespace

void run_attention_block(const AttentionWeights& weights, const View& x,
                         const std::vector<KVBuffers>& buffers, int window, float* out) {
  const MatrixAndBias q = weights.q.matrix_and_bias(), o = weights.o.matrix_and_bias();
  const int count = static_cast<int>(buffers.size()), key_dim = weights.key_dim(),
            value_dim = weights.value_dim();
  const std::int64_t hidden = q.w.width, key_floats = weights.k ? weights.kv_heads * key_dim : 0,
                     value_floats = weights.k ? weights.kv_heads * value_dim : 0,
                     angle_floats = HeadTransform::scratch_floats(weights.rope, count);
  std::int64_t arena_floats = 0;
  for (std::int64_t one : {hidden, hidden, q.w.rows, key_floats, value_floats, o.w.width})
    arena_floats += ScratchArena::round_up(count * one);
  ScratchArena arena(scratch<ForArena>(static_cast<std::size_t>(arena_floats + angle_floats)));
  const float* residual = x.rows(arena.allocate(count * hidden));
  float *normed = arena.allocate(count * hidden), *queries = arena.allocate(count * q.w.rows),
        *keys = arena.allocate(count * key_floats), *values = arena.allocate(count * value_floats),
        *attended = arena.allocate(count * o.w.width);
  normalize(weights.norm, residual, count, hidden, normed);
  std::vector<MatmulOutput> outputs{{q, queries}};
  if (weights.k) outputs.push_back({weights.k->matrix_and_bias(), keys});
  if (weights.v) outputs.push_back({weights.v->matrix_and_bias(), values});
  multiply_qkv(outputs, normed, count);
  const HeadTransform transform(weights.rope, buffers, key_dim, arena.allocate(angle_floats));
  transform(weights.q_norm, queries, weights.heads, count);
  if (weights.k) {
    if (!weights.v) std::copy_n(keys, count * key_floats, values);
    if (weights.v_norm)
      normalize(*weights.v_norm, values, count * weights.kv_heads, value_dim, values);
    transform(weights.k_norm, keys, weights.kv_heads, count);
  }
  const AttentionParams& params = weights.params;
  const float* sinks = params.sinks ? params.sinks->data<float>() : nullptr;
  const AttentionJob job{count,  weights.heads, weights.kv_heads, 1,     key_dim, value_dim, true,
                         window, params.scale,  params.softcap,   sinks, attended};
  const View all_queries(queries, count, weights.heads, key_dim);
  if (weights.k)
    append_and_attend(job, all_queries, View(keys, count, weights.kv_heads, key_dim),
                      View(values, count, weights.kv_heads, value_dim), buffers);
  else
    attend_shared(job, all_queries, buffers);
  multiply(o.w, attended, count, o.bias, out);
  finish(weights.post_norm, residual, std::nullopt, count, hidden, out);
}

namespace {

// Its inputs are x, the key buffers, the value buffers, and then the pending inputs.
class AttentionBlockPrimitive : public CpuPrimitive {
 public:
  AttentionBlockPrimitive(mx::Stream stream, std::shared_ptr<const AttentionWeights> weights,
                          std::vector<SlotMapping> slot_mappings, int window)
      : CpuPrimitive(stream), weights_(std::move(weights)),
        slot_mappings_(std::move(slot_mappings)), window_(window) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    WritableBuffers writable(in, 1, outs);
    std::vector<KVBuffers> buffers = get_buffers(outs, slot_mappings_);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [weights = weights_, writable = std::move(writable), buffers = std::move(buffers),
         x = View(in[0]), window = window_, out = outs[0].data<float>()]() mutable {
          writable.copy_shared();
          run_attention_block(*weights, x, buffers, window, out);
          writable.release();
        });
  }

  const char* name() const override { return "mlxrunner::AttentionBlock"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  std::shared_ptr<const AttentionWeights> weights_;
  std::vector<SlotMapping> slot_mappings_;
  int window_;
};

// Its inputs are x, the key buffers, the value buffers, and then the pending inputs.
class SharedAttentionBlockPrimitive : public CpuPrimitive {
 public:
  SharedAttentionBlockPrimitive(mx::Stream stream, std::shared_ptr<const AttentionWeights> weights,
                                std::vector<SlotMapping> slot_mappings, int window)
      : CpuPrimitive(stream), weights_(std::move(weights)),
        slot_mappings_(std::move(slot_mappings)), window_(window) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    std::vector<mx::array> arrays(
        in.begin(), in.begin() + 1 + 2 * static_cast<std::ptrdiff_t>(slot_mappings_.size()));
    ReadBuffers readable(arrays, 1);
    std::vector<KVBuffers> buffers = get_buffers(arrays, slot_mappings_);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [weights = weights_, readable, buffers = std::move(buffers), x = View(in[0]),
         window = window_, out = outs[0].data<float>()]() mutable {
          run_attention_block(*weights, x, buffers, window, out);
          readable.release();
        });
  }

  const char* name() const override { return "mlxrunner::SharedAttentionBlock"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  std::shared_ptr<const AttentionWeights> weights_;
  std::vector<SlotMapping> slot_mappings_;
  int window_;
};

void check_shapes(const AttentionWeights& weights) {
  const int heads = weights.heads, kv_heads = weights.kv_heads, hidden = weights.q.matmul.inputs();
  require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
          "heads of queries must be a multiple of those of keys");
  const int key_dim = weights.key_dim(), value_dim = weights.value_dim();
  const std::optional<BoundMatmul>&k = weights.k, &v = weights.v;
  require(k || !v, "values need keys");
  require(key_dim > 0 && value_dim > 0 && weights.q.matmul.outputs() == heads * key_dim &&
              (!k || k->matmul.outputs() == kv_heads * key_dim) &&
              (!v || v->matmul.outputs() == kv_heads * value_dim) &&
              (!k || v || value_dim == key_dim) &&
              weights.o.matmul.inputs() == heads * value_dim,
          "q, k, v and o must fit the number of heads");
  require((!k || k->matmul.inputs() == hidden) && (!v || v->matmul.inputs() == hidden) &&
              weights.o.matmul.outputs() == hidden,
          "hidden states must be of one width");
  require(weights.params.scale > 0 && weights.params.softcap >= 0,
          "scale must be positive, and softcap must not be negative");
  if (weights.params.sinks)
    require(weights.params.sinks->dtype() == mx::float32 &&
                weights.params.sinks->shape() == mx::Shape{heads},
            "sinks must be [heads] of float32");
  if (weights.rope) check_rope(*weights.rope, key_dim);
}

}  // namespace

void check_attention_inputs(const AttentionWeights& weights, const mx::array& x,
                            const std::vector<mx::array>& keys,
                            const std::vector<mx::array>& values,
                            const std::vector<SlotMapping>& slot_mappings, int window,
                            int new_positions) {
  const std::size_t count = slot_mappings.size();
  require(count > 0 && keys.size() == count && values.size() == count && window >= 0,
          "each sequence needs buffers and a slot mapping");
  require(x.dtype() == mx::float32 &&
              x.shape() == mx::Shape{static_cast<int>(count), 1, weights.q.matmul.inputs()},
          "x must be [batch, 1, hidden] of float32");
  const KVShape shape{weights.kv_heads, weights.key_dim(), weights.value_dim()};
  for (std::size_t b = 0; b < count; b++) {
    check_slots(slot_mappings[b], new_positions, keys[b], values[b], shape);
    const SlotMapping& slots = slot_mappings[b];
    require(slots.length > 0, "a query must have a position");
    require(static_cast<std::int64_t>(slots.first_position) + slots.length + slots.rope_delta > 0,
            "a position for rope must not be negative");
  }
}

AttentionBlock::AttentionBlock(AttentionWeights weights) {
  check_shapes(weights);
  weights.norm = check_norm(std::move(weights.norm), weights.q.matmul.inputs());
  pending_.add(weights.norm.weight);
  for (std::optional<RmsNorm>* norm : {&weights.q_norm, &weights.k_norm})
    if (*norm) pending_.add((*norm = check_norm(std::move(**norm), weights.key_dim()))->weight);
  weights.v_norm = check_norm(std::move(weights.v_norm), weights.value_dim());
  weights.post_norm = check_norm(std::move(weights.post_norm), weights.q.matmul.inputs());
  for (const std::optional<RmsNorm>* norm : {&weights.v_norm, &weights.post_norm})
    if (*norm) pending_.add((*norm)->weight);
  if (weights.rope) pending_.add(weights.rope->periods = contiguous_rows(weights.rope->periods));
  if (weights.params.sinks)
    pending_.add(*(weights.params.sinks = contiguous_rows(*weights.params.sinks)));
  for (const BoundMatmul* one : {&weights.q, &weights.o}) pending_.add(*one);
  for (const std::optional<BoundMatmul>* one : {&weights.k, &weights.v})
    if (*one) pending_.add(**one);
  weights_ = std::make_shared<const AttentionWeights>(std::move(weights));
}

std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> AttentionBlock::operator()(
    const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
    const std::vector<SlotMapping>& slot_mappings, int window) {
  const std::size_t count = slot_mappings.size();
  const AttentionWeights& weights = *weights_;
  require(weights.k.has_value(), "a block without keys needs attend_shared");
  check_attention_inputs(weights, x, keys, values, slot_mappings, window, 1);
  std::vector<mx::array> in{x};
  std::vector<mx::Shape> shapes{x.shape()};
  std::vector<mx::Dtype> types{mx::float32};
  for (const auto* all : {&keys, &values})
    for (const mx::array& one : *all)
      in.push_back(one), shapes.push_back(one.shape()), types.push_back(one.dtype());
  pending_.append_pending(in);
  auto outs = mx::array::make_arrays(
      std::move(shapes), types,
      std::make_shared<AttentionBlockPrimitive>(cpu(), weights_, slot_mappings, window), in);
  const auto middle = outs.begin() + 1 + static_cast<std::ptrdiff_t>(count);
  return {outs[0], {outs.begin() + 1, middle}, {middle, outs.end()}};
}

mx::array AttentionBlock::attend_shared(const mx::array& x, const std::vector<mx::array>& keys,
                                        const std::vector<mx::array>& values,
                                        const std::vector<SlotMapping>& slot_mappings,
                                        int window) {
  require(!weights_->k, "a block with keys cannot use those of others");
  check_attention_inputs(*weights_, x, keys, values, slot_mappings, window, 0);
  std::vector<mx::array> in{x};
  in.insert(in.end(), keys.begin(), keys.end());
  in.insert(in.end(), values.begin(), values.end());
  pending_.append_pending(in);
  return mx::array(
      x.shape(), mx::float32,
      std::make_shared<SharedAttentionBlockPrimitive>(cpu(), weights_, slot_mappings, window),
      std::move(in));
}

}  // namespace mlxrunner
