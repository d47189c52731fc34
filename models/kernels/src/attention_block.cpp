#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "attention_job.hpp"
#include "blocks.hpp"
#include "held.hpp"
#include "residual.hpp"

namespace mlxrunner {

namespace {

struct ForPieces;
struct ForProduct;

// A product and where it goes.
struct Into {
  Factor by;
  float* y;
};

bool arranged_alike(const Matrix& a, const Matrix& b) {
  return a.weight == b.weight && a.scale == b.scale && a.group == b.group && a.width == b.width;
}

// Several matrices that the same packed rows of x meet, as `multiply` would do one after the other:
// where they take x in one order, it is put so once, and threads wait for each other once.
void multiply_each(const std::array<Into, 3>& all, const float* x, std::int64_t count) {
  const Matrix& first = all[0].by.w;
  const auto alike = [&](const Into& one) { return arranged_alike(first, one.by.w); };
  if (!std::all_of(all.begin(), all.end(), alike)) {
    for (const Into& one : all) multiply(one.by.w, x, count, one.by.bias, one.y);
    return;
  }
  const Kernels& k = kernels();
  const Rows rows = arranged(first, x, count);
  std::array<std::int64_t, 3> part{}, parts{};
  std::int64_t room = 0, total = 0, work = 0;
  for (std::size_t i = 0; i < all.size(); i++) {
    const Matrix& w = all[i].by.w;
    part[i] = part_rows(w, count);
    parts[i] = (w.rows + part[i] - 1) / part[i];
    room = std::max(room, k.product_scratch(w));
    total += parts[i], work += count * w.rows * w.width;
  }
  const auto multiplied = [&](std::int64_t n) {
    std::size_t i = 0;
    for (; n >= parts[i]; i++) n -= parts[i];
    const auto& [by, y] = all[i];
    const std::int64_t begin = n * part[i], end = std::min(by.w.rows, begin + part[i]);
    k.product(by.w, rows, by.bias, y, by.w.rows, begin, end,
              scratch<ForProduct>(static_cast<std::size_t>(room)));
  };
  if (work >= kAlone) return Pool::shared().run(total, multiplied);
  for (std::int64_t n = 0; n < total; n++) multiplied(n);
}

// What is done to the heads of one new position of each sequence before they attend.
class Turned {
 public:
  Turned(const std::optional<Rotary>& rotary, const std::vector<Buffers>& rows, std::int64_t depth,
         float* room)
      : depth_(depth) {
    if (!rotary) return;
    const std::int64_t half = rotary->dims / 2;
    by_ = {rotary->dims, depth, rotary->traditional, rotary->magnitude};
    stride_ = Pieces::padded(half);
    cos_ = room, sin_ = room + static_cast<std::int64_t>(rows.size()) * stride_;
    for (std::size_t b = 0; b < rows.size(); b++) {
      const Place& at = rows[b].place;
      const std::int64_t row = static_cast<std::int64_t>(b) * stride_;
      kernels().angles(static_cast<float>(at.first + at.length - 1), rotary->periods.data<float>(),
                       half, cos_ + row, sin_ + row);
    }
  }

  // Floats that `room` must have.
  static std::int64_t room(const std::optional<Rotary>& rotary, std::int64_t count) {
    return rotary ? 2 * count * Pieces::padded(rotary->dims / 2) : 0;
  }

  // x: [count, heads, depth], in place.
  void operator()(const std::optional<RmsNorm>& norm, float* x, std::int64_t heads,
                  std::int64_t count) const {
    if (!norm && !cos_) return;
    const float* weight = norm ? norm->weight.data<float>() : nullptr;
    for_all(count * heads, depth_, [&](std::int64_t i) {
      float* head = x + i * depth_;
      if (norm) kernels().rms_norm(head, depth_, weight, norm->eps, head);
      if (!cos_) return;
      const std::int64_t at = i / heads * stride_;
      kernels().rotate(by_, head, cos_ + at, sin_ + at, head);
    });
  }

 private:
  std::int64_t depth_, stride_ = 0;
  Rotation by_{};
  float *cos_ = nullptr, *sin_ = nullptr;
};

void work(const AttentionParts& parts, const View& x, const std::vector<Buffers>& rows, int window,
          float* out) {
  const Factor q = parts.q.factor(), k = parts.k.factor(), v = parts.v.factor(),
               o = parts.o.factor();
  const int count = static_cast<int>(rows.size()), depth = parts.depth(), width = parts.width();
  const std::int64_t hidden = q.w.width, angles = Turned::room(parts.rotary, count);
  std::int64_t all = 0;
  for (std::int64_t one : {hidden, hidden, q.w.rows, k.w.rows, v.w.rows, o.w.width})
    all += Pieces::padded(count * one);
  Pieces pieces(scratch<ForPieces>(static_cast<std::size_t>(all + angles)));
  const float* given = x.rows(pieces.of(count * hidden));
  float *normed = pieces.of(count * hidden), *queries = pieces.of(count * q.w.rows),
        *keys = pieces.of(count * k.w.rows), *values = pieces.of(count * v.w.rows),
        *seen = pieces.of(count * o.w.width);
  normalise(parts.norm, given, count, hidden, normed);
  multiply_each({{{q, queries}, {k, keys}, {v, values}}}, normed, count);
  const Turned turned(parts.rotary, rows, depth, pieces.of(angles));
  turned(parts.q_norm, queries, parts.heads, count);
  turned(parts.k_norm, keys, parts.kv_heads, count);
  const Attention& by = parts.by;
  const float* sinks = by.sinks ? by.sinks->data<float>() : nullptr;
  const AttentionJob job{count, parts.heads, parts.kv_heads, 1,        depth, width,
                         true,  window,      by.scale,       by.softcap, sinks, seen};
  append_and_attend(job, View(queries, count, parts.heads, depth),
                    View(keys, count, parts.kv_heads, depth),
                    View(values, count, parts.kv_heads, width), rows);
  multiply(o.w, seen, count, o.bias, out);
  add(given, count, hidden, out);
}

// Inputs: x, buffers of keys, buffers of values, and what is awaited.
class AttentionBlockPrimitive : public CpuPrimitive {
 public:
  AttentionBlockPrimitive(mx::Stream stream, std::shared_ptr<const AttentionParts> parts,
                          std::vector<Place> places, int window)
      : CpuPrimitive(stream), parts_(std::move(parts)), places_(std::move(places)),
        window_(window) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    Lent lent(in, 1, outs);
    std::vector<Buffers> rows = buffers_of(outs, places_);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [parts = parts_, lent = std::move(lent), rows = std::move(rows), x = View(in[0]),
         window = window_, out = outs[0].data<float>()]() mutable {
          lent.begin();
          work(*parts, x, rows, window, out);
          lent.end();
        });
  }

  const char* name() const override { return "mlxrunner::AttentionBlock"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  std::shared_ptr<const AttentionParts> parts_;
  std::vector<Place> places_;
  int window_;
};

void want_fitting(const AttentionParts& parts) {
  const int heads = parts.heads, kv_heads = parts.kv_heads, hidden = parts.q.product.inputs();
  want(heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
       "heads of queries must be a multiple of those of keys");
  const int depth = parts.depth(), width = parts.width();
  want(depth > 0 && width > 0 && parts.q.product.outputs() == heads * depth &&
           parts.k.product.outputs() == kv_heads * depth &&
           parts.v.product.outputs() == kv_heads * width &&
           parts.o.product.inputs() == heads * width,
       "q, k, v and o must fit the number of heads");
  want(parts.k.product.inputs() == hidden && parts.v.product.inputs() == hidden &&
           parts.o.product.outputs() == hidden,
       "hidden states must be of one width");
  want(parts.by.scale > 0 && parts.by.softcap >= 0,
       "scale must be positive, softcap positive or 0");
  if (parts.by.sinks)
    want(parts.by.sinks->dtype() == mx::float32 && parts.by.sinks->shape() == mx::Shape{heads},
         "sinks must be [heads] of float32");
  if (parts.rotary) want_rotary(*parts.rotary, depth);
}

}  // namespace

AttentionBlock::AttentionBlock(AttentionParts parts) {
  want_fitting(parts);
  parts.norm = checked(std::move(parts.norm), parts.q.product.inputs());
  awaited_.add(parts.norm.weight);
  for (std::optional<RmsNorm>* norm : {&parts.q_norm, &parts.k_norm})
    if (*norm) awaited_.add((*norm = checked(std::move(**norm), parts.depth()))->weight);
  if (parts.rotary) awaited_.add(parts.rotary->periods = lined(parts.rotary->periods));
  if (parts.by.sinks) awaited_.add(*(parts.by.sinks = lined(*parts.by.sinks)));
  for (const Constant* one : {&parts.q, &parts.k, &parts.v, &parts.o}) awaited_.add(*one);
  parts_ = std::make_shared<const AttentionParts>(std::move(parts));
}

std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> AttentionBlock::operator()(
    const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
    const std::vector<Place>& places, int window) {
  const std::size_t count = places.size();
  const AttentionParts& parts = *parts_;
  want(count > 0 && keys.size() == count && values.size() == count && window >= 0,
       "each sequence needs buffers and a slot mapping");
  want(x.dtype() == mx::float32 &&
           x.shape() == mx::Shape{static_cast<int>(count), 1, parts.q.product.inputs()},
       "x must be [batch, 1, hidden] of float32");
  const PositionShape shape{parts.kv_heads, parts.depth(), parts.width()};
  for (std::size_t b = 0; b < count; b++) want_place(places[b], 1, keys[b], values[b], shape);
  std::vector<mx::array> in{x};
  std::vector<mx::Shape> shapes{x.shape()};
  for (const auto* all : {&keys, &values})
    for (const mx::array& one : *all) in.push_back(one), shapes.push_back(one.shape());
  awaited_.join(in);
  const std::vector<mx::Dtype> types(shapes.size(), mx::float32);
  auto outs = mx::array::make_arrays(
      std::move(shapes), types,
      std::make_shared<AttentionBlockPrimitive>(cpu(), parts_, places, window), in);
  const auto middle = outs.begin() + 1 + static_cast<std::ptrdiff_t>(count);
  return {outs[0], {outs.begin() + 1, middle}, {middle, outs.end()}};
}

}  // namespace mlxrunner
