#include "mamba2_ops.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "in_flight.hpp"
#include "isa_dispatch.hpp"
#include "residual.hpp"
#include "thread_pool.hpp"

namespace mlxrunner {

namespace {

struct ForArena;
struct ForProjected;
struct ForBlock;
struct ForTail;

// The most positions whose intermediate results are in memory together. The results do not depend on
// this number.
constexpr std::int64_t kBlockPositions = 64;

constexpr int kMaxConvWidth = 16;

struct Sizes {
  std::int64_t batch, length, heads, head_dim, state_size, groups, width;

  std::int64_t inner() const { return heads * head_dim; }
  std::int64_t channels() const { return inner() + 2 * groups * state_size; }
  std::int64_t projected() const { return inner() + channels() + heads; }
};

struct Row {
  float *state, *tail;
};

struct Weights {
  const float *conv, *conv_bias, *dt_bias, *a_log, *d, *norm;
};

// log(1 + e^x), as in PyTorch
float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

using Results = std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>>;

class Mixer {
 public:
  Mixer(const Sizes& sizes, const Weights& weights, const Mamba2Params& params,
        const float* projected, std::vector<Row> rows, float* out)
      : sizes_(sizes), weights_(weights), params_(params), projected_(projected),
        rows_(std::move(rows)), out_(out) {}

  void run() {
    const std::int64_t most = std::max<std::int64_t>(1, kBlockPositions / sizes_.batch);
    const std::int64_t count = sizes_.batch * std::min(most, sizes_.length);
    const std::int64_t convolved = ScratchArena::round_up(count * sizes_.channels()),
                       steps = ScratchArena::round_up(count * sizes_.heads);
    ScratchArena arena(scratch<ForBlock>(static_cast<std::size_t>(convolved + 2 * steps)));
    convolved_ = arena.allocate(convolved);
    steps_ = arena.allocate(steps);
    decays_ = arena.allocate(steps);
    for (std::int64_t begin = 0; begin < sizes_.length; begin += most) {
      const std::int64_t length = std::min(most, sizes_.length - begin);
      prepare(begin, length);
      scan(begin, length);
      normalize(begin, length);
    }
    parallel_for_rows(sizes_.batch, (sizes_.width - 1) * sizes_.channels(),
                      [&](std::int64_t b) { store_tail(b); });
  }

 private:
  // The input of the convolution at position t, which may be before the first one.
  const float* conv_input(std::int64_t b, std::int64_t t) const {
    if (t < 0) return rows_[b].tail + (sizes_.width - 1 + t) * sizes_.channels();
    return projected_ + (b * sizes_.length + t) * sizes_.projected() + sizes_.inner();
  }

  // Computes the convolution, the step sizes and the decays.
  void prepare(std::int64_t begin, std::int64_t length) {
    const std::int64_t heads = sizes_.heads, channels = sizes_.channels();
    const Kernels& k = kernels();
    parallel_for_rows(sizes_.batch * length, sizes_.width * channels, [&](std::int64_t i) {
      const std::int64_t b = i / length, t = begin + i % length;
      const float* taps[kMaxConvWidth];
      for (std::int64_t j = 0; j < sizes_.width; j++)
        taps[j] = conv_input(b, t - sizes_.width + 1 + j);
      k.convolve(taps, sizes_.width, weights_.conv, weights_.conv_bias, channels,
                 convolved_ + i * channels);
      const float* logits = conv_input(b, t) + channels;
      for (std::int64_t h = 0; h < heads; h++) {
        const float step = std::clamp(softplus(logits[h] + weights_.dt_bias[h]), params_.min_step,
                                      params_.max_step);
        steps_[i * heads + h] = step;
        decays_[i * heads + h] = std::exp(-std::exp(weights_.a_log[h]) * step);
      }
    });
  }

  void scan(std::int64_t begin, std::int64_t length) {
    const std::int64_t heads = sizes_.heads, channels = sizes_.channels(), inner = sizes_.inner();
    const std::int64_t size = sizes_.state_size * sizes_.head_dim;
    const Kernels& k = kernels();
    parallel_for_rows(sizes_.batch * heads, size * length / 4, [&](std::int64_t i) {
      const std::int64_t b = i / heads, h = i % heads;
      const float* convolved = convolved_ + b * length * channels;
      const std::int64_t group = h / (heads / sizes_.groups) * sizes_.state_size;
      const float* keys = convolved + inner + group;
      k.scan({.length = length,
              .head_dim = sizes_.head_dim,
              .state_size = sizes_.state_size,
              .x = convolved + h * sizes_.head_dim,
              .keys = keys,
              .queries = keys + sizes_.groups * sizes_.state_size,
              .row_step = channels,
              .steps = steps_ + b * length * heads + h,
              .decays = decays_ + b * length * heads + h,
              .step_step = heads,
              .skip = weights_.d[h],
              .state = rows_[b].state + h * size,
              .out = out_ + (b * sizes_.length + begin) * inner + h * sizes_.head_dim,
              .out_step = inner});
    });
  }

  // Multiplies by the gates, and normalizes each group.
  void normalize(std::int64_t begin, std::int64_t length) {
    const std::int64_t inner = sizes_.inner(), group = inner / sizes_.groups;
    const Kernels& k = kernels();
    parallel_for_rows(sizes_.batch * length, 4 * inner, [&](std::int64_t i) {
      const std::int64_t row = i / length * sizes_.length + begin + i % length;
      float* out = out_ + row * inner;
      k.glu(Activation::silu, projected_ + row * sizes_.projected(), out, out, inner);
      for (std::int64_t from = 0; from < inner; from += group)
        k.rms_norm(out + from, group, weights_.norm + from, params_.eps, out + from);
    });
  }

  void store_tail(std::int64_t b) {
    const std::int64_t channels = sizes_.channels(), kept = sizes_.width - 1;
    // through a copy, because the new tail may contain rows of the old one
    float* copy = scratch<ForTail>(static_cast<std::size_t>(kept * channels));
    for (std::int64_t j = 0; j < kept; j++)
      std::copy_n(conv_input(b, sizes_.length - kept + j), channels, copy + j * channels);
    std::copy_n(copy, kept * channels, rows_[b].tail);
  }

  const Sizes& sizes_;
  const Weights& weights_;
  const Mamba2Params& params_;
  const float* projected_;
  std::vector<Row> rows_;
  float* out_;
  float *convolved_ = nullptr, *steps_ = nullptr, *decays_ = nullptr;
};

// The rows of the written states and tails, which follow the first output.
std::vector<Row> get_rows(std::vector<mx::array>& outs) {
  const std::size_t parts = (outs.size() - 1) / 2;
  std::vector<Row> rows;
  for (std::size_t i = 1; i <= parts; i++) {
    mx::array &state = outs[i], &tail = outs[parts + i];
    for (int b = 0; b < state.shape(0); b++)
      rows.push_back({state.data<float>() + state.size() / state.shape(0) * b,
                      tail.data<float>() + tail.size() / state.shape(0) * b});
  }
  return rows;
}

// Its inputs are the projections, the states, the tails, and the weights.
class Mamba2Primitive : public CpuPrimitive {
 public:
  Mamba2Primitive(mx::Stream stream, Sizes sizes, Mamba2Params params, std::size_t parts)
      : CpuPrimitive(stream), sizes_(sizes), params_(params), parts_(parts) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const auto* weight = &in[1 + 2 * parts_];
    Weights weights{};
    weights.conv = weight[0].data<float>();
    weights.dt_bias = weight[1].data<float>();
    weights.a_log = weight[2].data<float>();
    weights.d = weight[3].data<float>();
    weights.norm = weight[4].data<float>();
    weights.conv_bias = in.size() > 6 + 2 * parts_ ? weight[5].data<float>() : nullptr;
    View projected(in[0]);
    WritableBuffers writable(in, 1, outs);
    std::vector<Row> rows = get_rows(outs);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [sizes = sizes_, params = params_, weights, projected = std::move(projected),
         writable = std::move(writable), rows = std::move(rows),
         out = outs[0].data<float>()]() mutable {
          writable.copy_shared();
          const std::int64_t size = sizes.batch * sizes.length * sizes.projected();
          const float* data = projected.rows(
              scratch<ForProjected>(static_cast<std::size_t>(projected.contiguous ? 0 : size)));
          Mixer(sizes, weights, params, data, std::move(rows), out).run();
          writable.release();
        });
  }

  const char* name() const override { return "mlxrunner::Mamba2"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Sizes sizes_;
  Mamba2Params params_;
  std::size_t parts_;
};

// Its inputs are x, the states, the tails, and weights that were not evaluated yet.
class Mamba2BlockPrimitive : public CpuPrimitive {
 public:
  Mamba2BlockPrimitive(mx::Stream stream, Sizes sizes,
                       std::shared_ptr<const Mamba2BlockWeights> weights)
      : CpuPrimitive(stream), sizes_(sizes), weights_(std::move(weights)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    View x(in[0]);
    WritableBuffers writable(in, 1, outs);
    std::vector<Row> rows = get_rows(outs);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [sizes = sizes_, all = weights_, x = std::move(x), writable = std::move(writable),
         rows = std::move(rows), out = outs[0].data<float>()]() mutable {
          writable.copy_shared();
          const MatrixAndBias in_proj = all->in_proj.matrix_and_bias(),
                              out_proj = all->out_proj.matrix_and_bias();
          const std::int64_t count = sizes.batch * sizes.length, hidden = in_proj.w.width;
          const auto room = [&](std::int64_t width) {
            return ScratchArena::round_up(count * width);
          };
          ScratchArena arena(scratch<ForArena>(static_cast<std::size_t>(
              2 * room(hidden) + room(sizes.projected()) + room(sizes.inner()))));
          const float* residual = x.rows(arena.allocate(room(hidden)));
          float *normed = arena.allocate(room(hidden)),
                *projected = arena.allocate(room(sizes.projected())),
                *mixed = arena.allocate(room(sizes.inner()));
          normalize(all->norm, residual, count, hidden, normed);
          multiply(in_proj.w, normed, count, in_proj.bias, projected);
          const Mamba2Weights& own = all->mixer;
          const Weights weights{own.conv_weight.data<float>(),
                                own.conv_bias ? own.conv_bias->data<float>() : nullptr,
                                own.dt_bias.data<float>(),
                                own.a_log.data<float>(),
                                own.d.data<float>(),
                                own.norm_weight.data<float>()};
          Mixer(sizes, weights, all->params, projected, std::move(rows), mixed).run();
          multiply(out_proj.w, mixed, count, out_proj.bias, out);
          add(residual, count, hidden, out);
          writable.release();
        });
  }

  const char* name() const override { return "mlxrunner::Mamba2Block"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Sizes sizes_;
  std::shared_ptr<const Mamba2BlockWeights> weights_;
};

void require_shape(const mx::array& a, const mx::Shape& shape, const char* message) {
  require(a.dtype() == mx::float32 && a.shape() == shape, message);
}

Sizes check(int batch, int length, int projected, const std::vector<mx::array>& states,
            const std::vector<mx::array>& tails, const Mamba2Weights& weights) {
  require(batch > 0 && length > 0, "there must be at least one row and one position");
  require(!states.empty() && states.size() == tails.size() && states[0].ndim() == 4 &&
              states[0].size() > 0,
          "each row needs a state [rows, heads, state, head_dim] and a tail");
  require(weights.conv_weight.ndim() == 2, "the convolution's weight must be [width, channels]");
  const int heads = states[0].shape(1), state_size = states[0].shape(2),
            head_dim = states[0].shape(3), width = weights.conv_weight.shape(0),
            channels = weights.conv_weight.shape(1);
  const int inner = heads * head_dim, groups = (channels - inner) / (2 * state_size);
  require(width > 1 && width <= kMaxConvWidth, "the convolution must have 2 to 16 taps");
  require(groups > 0 && channels == inner + 2 * groups * state_size && heads % groups == 0,
          "the channels must be those of the heads, and of the keys and queries of each group");
  require(projected == inner + channels + heads,
          "the projections must be gates, channels and step sizes");
  int rows = 0;
  for (std::size_t i = 0; i < states.size(); i++) {
    const int count = states[i].ndim() ? states[i].shape(0) : 0;
    require_shape(states[i], {count, heads, state_size, head_dim},
                  "the states must have the same heads");
    require_shape(tails[i], {count, width - 1, channels},
                  "a tail must be [rows, width - 1, channels] of float32");
    rows += count;
  }
  require(rows == batch, "each row needs a state");
  require_shape(weights.conv_weight, {width, channels}, "the convolution's weight must be float32");
  if (weights.conv_bias)
    require_shape(*weights.conv_bias, {channels}, "the convolution's bias must be [channels]");
  for (const mx::array* one : {&weights.dt_bias, &weights.a_log, &weights.d})
    require_shape(*one, {heads}, "dt_bias, a_log and d must be [heads] of float32");
  require_shape(weights.norm_weight, {inner}, "the norm's weight must be [heads * head_dim]");
  return {batch, length, heads, head_dim, state_size, groups, width};
}

void check(const Mamba2Params& params) {
  require(params.eps > 0 && params.min_step <= params.max_step,
          "eps must be positive, and min_step at most max_step");
}

Results make_results(mx::Shape shape, const std::vector<mx::array>& states,
                     const std::vector<mx::array>& tails, std::shared_ptr<mx::Primitive> primitive,
                     const std::vector<mx::array>& in) {
  std::vector<mx::Shape> shapes{std::move(shape)};
  for (const auto* all : {&states, &tails})
    for (const mx::array& one : *all) shapes.push_back(one.shape());
  std::vector<mx::Dtype> types(shapes.size(), mx::float32);
  auto outs = mx::array::make_arrays(std::move(shapes), types, std::move(primitive), in);
  const auto middle = outs.begin() + 1 + static_cast<std::ptrdiff_t>(states.size());
  return {outs[0], {outs.begin() + 1, middle}, {middle, outs.end()}};
}

}  // namespace

Results mamba2(const mx::array& projected, const std::vector<mx::array>& states,
               const std::vector<mx::array>& tails, const Mamba2Weights& weights,
               const Mamba2Params& params) {
  require(projected.dtype() == mx::float32 && projected.ndim() == 3,
          "the projections must be [batch, length, width] of float32");
  const Sizes sizes = check(projected.shape(0), projected.shape(1), projected.shape(2), states,
                            tails, weights);
  check(params);
  std::vector<mx::array> in{projected};
  in.insert(in.end(), states.begin(), states.end());
  in.insert(in.end(), tails.begin(), tails.end());
  for (const mx::array* one : {&weights.conv_weight, &weights.dt_bias, &weights.a_log, &weights.d,
                               &weights.norm_weight})
    in.push_back(contiguous_rows(*one));
  if (weights.conv_bias) in.push_back(contiguous_rows(*weights.conv_bias));
  return make_results(
      {projected.shape(0), projected.shape(1), static_cast<int>(sizes.inner())}, states, tails,
      std::make_shared<Mamba2Primitive>(cpu(), sizes, params, states.size()), in);
}

Mamba2Block::Mamba2Block(Mamba2BlockWeights weights) {
  const Matmul &in_proj = weights.in_proj.matmul, &out_proj = weights.out_proj.matmul;
  weights.norm = check_norm(std::move(weights.norm), in_proj.inputs());
  require(out_proj.outputs() == in_proj.inputs(),
          "the projections must be from and to hidden states");
  check(weights.params);
  Mamba2Weights& mixer = weights.mixer;
  require(mixer.norm_weight.shape() == mx::Shape{out_proj.inputs()},
          "the output projection must take the heads");
  pending_.add(weights.norm.weight);
  pending_.add(weights.in_proj);
  pending_.add(weights.out_proj);
  for (mx::array* one :
       {&mixer.conv_weight, &mixer.dt_bias, &mixer.a_log, &mixer.d, &mixer.norm_weight}) {
    *one = contiguous_rows(*one);
    pending_.add(*one);
  }
  if (mixer.conv_bias) {
    mixer.conv_bias = contiguous_rows(*mixer.conv_bias);
    pending_.add(*mixer.conv_bias);
  }
  weights_ = std::make_shared<const Mamba2BlockWeights>(std::move(weights));
}

Results Mamba2Block::operator()(const mx::array& x, const std::vector<mx::array>& states,
                                const std::vector<mx::array>& tails) {
  require(x.dtype() == mx::float32 && x.ndim() == 3 &&
              x.shape(2) == weights_->in_proj.matmul.inputs(),
          "x must be [batch, length, hidden] of float32");
  const Sizes sizes = check(x.shape(0), x.shape(1), weights_->in_proj.matmul.outputs(), states,
                            tails, weights_->mixer);
  std::vector<mx::array> in{x};
  in.insert(in.end(), states.begin(), states.end());
  in.insert(in.end(), tails.begin(), tails.end());
  pending_.append_pending(in);
  return make_results(x.shape(), states, tails,
                      std::make_shared<Mamba2BlockPrimitive>(cpu(), sizes, weights_), in);
}

}  // namespace mlxrunner
