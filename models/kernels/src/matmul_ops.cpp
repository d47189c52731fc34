#include "products.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "cpu.hpp"
#include "pool.hpp"

namespace mlxrunner {

namespace {

// Bytes of a matrix that one thread takes at a time.
constexpr std::int64_t kPart = 1 << 18;

struct ForArranged;
struct ForRows;
struct ForProduct;

Float float_of(const mx::array& a, const char* what) {
  if (a.dtype() == mx::float32) return Float::f32;
  if (a.dtype() == mx::bfloat16) return Float::bf16;
  if (a.dtype() == mx::float16) return Float::f16;
  throw std::invalid_argument(std::string(what) + " must be float32, bfloat16 or float16");
}

class ProductPrimitive : public CpuPrimitive {
 public:
  ProductPrimitive(mx::Stream stream, Product product)
      : CpuPrimitive(stream), product_(std::move(product)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const Matrix w = product_.matrix(in, 1);
    const float* bias = product_.bias(in, 1);
    float* y = outs[0].data<float>();
    const std::int64_t count = static_cast<std::int64_t>(in[0].size()) / w.width;
    mx::cpu::get_command_encoder(stream()).dispatch([=, x = View(in[0])] {
      const std::size_t room = x.packed ? 0 : static_cast<std::size_t>(count * w.width);
      multiply(w, x.rows(scratch<ForRows>(room)), count, bias, y);
    });
  }

  const char* name() const override { return "mlxrunner::Product"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Product product_;
};

class RowsPrimitive : public CpuPrimitive {
 public:
  RowsPrimitive(mx::Stream stream, Product product)
      : CpuPrimitive(stream), product_(std::move(product)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const Matrix w = product_.matrix(in, 1);
    auto* ids = in[0].data<std::int32_t>();
    float* out = outs[0].data<float>();
    const std::int64_t count = in[0].size();
    mx::cpu::get_command_encoder(stream()).dispatch([=] {
      const Kernels& k = kernels();
      for (std::int64_t i = 0; i < count; i++) {
        const std::int64_t id = ids[i] < 0 ? ids[i] + w.rows : ids[i];
        // as MLX's own lookup, nothing is promised for ids that are not there; but nothing breaks
        if (id < 0 || id >= w.rows) std::fill_n(out + i * w.width, w.width, 0.0f);
        else k.expand(w, id, out + i * w.width);
      }
    });
  }

  const char* name() const override { return "mlxrunner::Rows"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Product product_;
};

}  // namespace

std::int64_t part_rows(const Matrix& w, std::int64_t count) {
  const std::int64_t threads = Pool::shared().threads();
  if (count * w.rows * w.width < kAlone) return w.rows;
  const std::int64_t by_size = kPart / std::max<std::int64_t>(1, w.row_bytes());
  // with many rows of x each row of w is much work
  const std::int64_t rows =
      count > 8 ? w.rows / (8 * threads) : std::min(by_size, w.rows / threads);
  return std::max<std::int64_t>(1, (rows + kStrip - 1) / kStrip) * kStrip;
}

Rows arranged(const Matrix& w, const float* x, std::int64_t count) {
  const Kernels& k = kernels();
  const std::int64_t stride = k.arranged_stride(w, count);
  if (!stride) return {x, count, w.width};
  float* into = scratch<ForArranged>(static_cast<std::size_t>(count * stride));
  const std::int64_t each = count < 32 ? count : 2 * k.block;
  Pool::shared().run((count + each - 1) / each, [&](std::int64_t i) {
    const std::int64_t from = i * each, many = std::min(each, count - from);
    k.arrange(w, x + from * w.width, many, into + from * stride, stride);
  });
  return {into, count, stride};
}

void multiply(const Matrix& w, const float* x, std::int64_t count, const float* bias, float* y) {
  if (!w.rows) return;
  const Kernels& k = kernels();
  for_slabs(count, [&](std::int64_t from, std::int64_t many) {
    const Rows rows = arranged(w, x + from * w.width, many);
    const std::size_t room = static_cast<std::size_t>(k.product_scratch(w));
    const std::int64_t part = part_rows(w, many);
    float* of_slab = y + from * w.rows;
    Pool::shared().run((w.rows + part - 1) / part, [&](std::int64_t i) {
      const std::int64_t begin = i * part, end = std::min(w.rows, begin + part);
      k.product(w, rows, bias, of_slab, w.rows, begin, end, scratch<ForProduct>(room));
    });
  });
}

mx::array widened(const mx::array& x, int width) {
  if (x.ndim() < 1 || x.shape(-1) != width)
    throw std::invalid_argument("the last axis must be " + std::to_string(width) + " long");
  float_of(x, "x");
  return mx::astype(x, mx::float32, cpu());
}

Product::Product(mx::array weight, std::optional<mx::array> scales, std::optional<mx::array> biases,
                 std::optional<mx::array> bias, int group, int bits)
    : weight_(std::move(weight)), scales_(std::move(scales)), biases_(std::move(biases)),
      bias_(std::move(bias)), group_(group) {
  const int axes = static_cast<int>(weight_.ndim());
  if (axes != 2 && axes != 3) throw std::invalid_argument("a matrix has two axes, a stack three");
  mx::Shape outer(weight_.shape().begin(), weight_.shape().end() - 1);
  stacked_ = axes == 3 ? outer[0] : 0;
  outputs_ = outer.back();
  if (scales_) {
    if (!biases_ || (bits != 4 && bits != 8) || (group != 32 && group != 64 && group != 128))
      throw std::invalid_argument("4 or 8 bits with scales and biases, in groups of 32, 64 or 128");
    if (weight_.dtype() != mx::uint32) throw std::invalid_argument("packed words must be uint32");
    inputs_ = weight_.shape(-1) * 32 / bits;
    mx::Shape groups = outer;
    groups.push_back(inputs_ / group);
    if (inputs_ % group || scales_->shape() != groups || biases_->shape() != groups)
      throw std::invalid_argument("scales and biases must be [out, in / group]");
    kind_ = bits == 4 ? Weight::q4 : Weight::q8;
    scale_ = float_of(*scales_, "scales");
    if (biases_->dtype() != scales_->dtype())
      throw std::invalid_argument("scales and biases must be of one type");
  } else {
    inputs_ = weight_.shape(-1), group_ = 0;
    const Float type = float_of(weight_, "a matrix");
    kind_ = type == Float::f32 ? Weight::f32 : type == Float::bf16 ? Weight::bf16 : Weight::f16;
  }
  if (!inputs_) throw std::invalid_argument("a matrix must have columns");
  if (bias_ && (bias_->dtype() != mx::float32 || bias_->shape() != outer))
    throw std::invalid_argument("a bias must be [out] of float32");
}

bool Product::alike(const Product& other) const {
  return kind_ == other.kind_ && group_ == other.group_ && stacked_ == other.stacked_ &&
         outputs_ == other.outputs_ && inputs_ == other.inputs_;
}

std::vector<mx::array> Product::arrays() const {
  std::vector<mx::array> all{weight_};
  for (const auto& one : {scales_, biases_, bias_})
    if (one) all.push_back(*one);
  return all;
}

Matrix Product::matrix(const std::vector<mx::array>& in, std::size_t first, int index) const {
  const std::size_t packed = scales_ ? 3 : 1;
  for (std::size_t i = first; i < first + packed; i++)
    if (!in[i].flags().row_contiguous)
      throw std::runtime_error("a matrix must lie in memory row after row");
  Matrix w{kind_, scale_, group_, outputs_, inputs_, in[first].data<char>(), nullptr, nullptr};
  w.data = in[first].data<char>() + index * w.rows * w.row_bytes();
  if (scales_) {
    const auto behind = index * w.rows * (w.width / group_) * mx::size_of(scales_->dtype());
    w.scales = in[first + 1].data<char>() + behind;
    w.biases = in[first + 2].data<char>() + behind;
  }
  return w;
}

const float* Product::bias(const std::vector<mx::array>& in, std::size_t first) const {
  return bias_ ? in[first + (scales_ ? 3 : 1)].data<float>() : nullptr;
}

mx::array Product::operator()(const mx::array& given) const {
  if (stacked_) throw std::invalid_argument("a stack of matrices needs gather");
  std::vector<mx::array> in{widened(given, inputs_)};
  mx::Shape shape = given.shape();
  shape.back() = outputs_;
  for (mx::array& one : arrays()) in.push_back(std::move(one));
  const mx::array y(std::move(shape), mx::float32,
                    std::make_shared<ProductPrimitive>(cpu(), *this), std::move(in));
  return mx::astype(y, given.dtype(), cpu());
}

mx::array Product::rows(const mx::array& given) const {
  if (stacked_) throw std::invalid_argument("a stack of matrices needs gather");
  mx::Shape shape = given.shape();
  shape.push_back(inputs_);
  std::vector<mx::array> in{lined(mx::astype(given, mx::int32, cpu()))};
  for (mx::array& one : arrays()) in.push_back(std::move(one));
  return mx::array(std::move(shape), mx::float32, std::make_shared<RowsPrimitive>(cpu(), *this),
                   std::move(in));
}

}  // namespace mlxrunner
