#include "matmul_ops.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "block_formats.hpp"
#include "block_repack.hpp"
#include "isa_dispatch.hpp"
#include "thread_pool.hpp"

namespace mlxrunner {

namespace {

// The number of bytes of a matrix that one task reads.
constexpr std::int64_t kBytesPerTask = 1 << 18;

struct ForPackedRows;
struct ForRows;
struct ForMatmul;

// The size of a row and the number of rows in memory.
std::int64_t stored_row_bytes(const Matrix& w) {
  return has_blocks(w.format) ? block_row_bytes(w.format, w.width) : w.row_bytes();
}
std::int64_t stored_rows(const Matrix& w) {
  return has_blocks(w.format) ? (w.rows + kPanelRows - 1) / kPanelRows * kPanelRows : w.rows;
}

void check_activations(int bits) {
  if (bits != 8 && bits != 16 && bits != 24)
    throw std::invalid_argument("activations must have 8, 16 or 24 bits");
}

ScaleType to_scale_type(const mx::array& a, const char* what) {
  if (a.dtype() == mx::float32) return ScaleType::f32;
  if (a.dtype() == mx::bfloat16) return ScaleType::bf16;
  if (a.dtype() == mx::float16) return ScaleType::f16;
  throw std::invalid_argument(std::string(what) + " must be float32, bfloat16 or float16");
}

class MatmulPrimitive : public CpuPrimitive {
 public:
  MatmulPrimitive(mx::Stream stream, Matmul matmul)
      : CpuPrimitive(stream), matmul_(std::move(matmul)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const Matrix w = matmul_.matrix(in, 1);
    const float* bias = matmul_.bias(in, 1);
    float* y = outs[0].data<float>();
    const std::int64_t count = static_cast<std::int64_t>(in[0].size()) / w.width;
    mx::cpu::get_command_encoder(stream()).dispatch([=, x = View(in[0])] {
      const std::size_t scratch_size = x.contiguous ? 0 : static_cast<std::size_t>(count * w.width);
      multiply(w, x.rows(scratch<ForRows>(scratch_size)), count, bias, y);
    });
  }

  const char* name() const override { return "mlxrunner::Matmul"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Matmul matmul_;
};

class ReferencePrimitive : public CpuPrimitive {
 public:
  ReferencePrimitive(mx::Stream stream, Matmul matmul)
      : CpuPrimitive(stream), matmul_(std::move(matmul)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const Matrix w = matmul_.matrix(in, 1);
    float* y = outs[0].data<float>();
    const std::int64_t count = static_cast<std::int64_t>(in[0].size()) / w.width;
    mx::cpu::get_command_encoder(stream()).dispatch([=, x = in[0].data<float>()] {
      const Kernels& k = kernels();
      const bool is_bf16 = w.format == WeightFormat::bf16;
      const auto find_size = is_bf16 ? k.bf16_tile_reference_scratch : k.reference_scratch;
      const auto multiply = is_bf16 ? k.bf16_tile_reference : k.multiply_by_reference;
      multiply(w, x, count, y, scratch<ForMatmul>(static_cast<std::size_t>(find_size(w, count))));
    });
  }

  const char* name() const override { return "mlxrunner::MatmulReference"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Matmul matmul_;
};

class DequantizeRowsPrimitive : public CpuPrimitive {
 public:
  DequantizeRowsPrimitive(mx::Stream stream, Matmul matmul)
      : CpuPrimitive(stream), matmul_(std::move(matmul)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    const Matrix w = matmul_.matrix(in, 1);
    auto* ids = in[0].data<std::int32_t>();
    float* out = outs[0].data<float>();
    const std::int64_t count = in[0].size();
    mx::cpu::get_command_encoder(stream()).dispatch([=] {
      const Kernels& k = kernels();
      for (std::int64_t i = 0; i < count; i++) {
        const std::int64_t id = ids[i] < 0 ? ids[i] + w.rows : ids[i];
        // undefined in MLX's own lookup; here the output is zero
        if (id < 0 || id >= w.rows) std::fill_n(out + i * w.width, w.width, 0.0f);
        else k.dequantize_row(w, id, out + i * w.width);
      }
    });
  }

  const char* name() const override { return "mlxrunner::DequantizeRows"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Matmul matmul_;
};

}  // namespace

std::int64_t max_input_rows(const Matrix& w) {
  constexpr std::int64_t kMaxRows = 768;
  if (!kernels().bf16_on_tiles || w.format != WeightFormat::bf16) return kMaxRows;
  // On tiles, all tasks read all rows of x from the L2 cache.
  constexpr std::int64_t kMaxBytes = 5 << 18, kMaxTileRows = 128, kMinTileRows = 32;
  const std::int64_t rows = kMaxBytes / (4 * kernels().packed_input_stride(w, kMaxTileRows));
  return std::clamp(rows / kMinTileRows * kMinTileRows, kMinTileRows, kMaxTileRows);
}

std::int64_t rows_per_task(const Matrix& w, std::int64_t count) {
  const std::int64_t threads = ThreadPool::shared().num_threads();
  if (count * w.rows * w.width < kMinParallelWork) return w.rows;
  const std::int64_t rows_by_size = kBytesPerTask / std::max<std::int64_t>(1, stored_row_bytes(w));
  // with many rows of x, each row of w requires much work
  const std::int64_t rows =
      count > 8 ? w.rows / (8 * threads) : std::min(rows_by_size, w.rows / threads);
  // two panels share the loads of x
  const std::int64_t unit = rows > 2 * kPanelRows ? 2 * kPanelRows : kPanelRows;
  return std::max<std::int64_t>(1, (rows + unit - 1) / unit) * unit;
}

PackedRows pack_rows(const Matrix& w, const float* x, std::int64_t count) {
  const Kernels& k = kernels();
  const std::int64_t stride = k.packed_input_stride(w, count);
  if (!stride) return {x, count, w.width};
  const std::int64_t block = k.input_block(w, count), whole = (count + block - 1) / block * block;
  float* packed = scratch<ForPackedRows>(static_cast<std::size_t>(whole * stride));
  const std::int64_t task_rows = count < 32 ? count : 2 * block;
  ThreadPool::shared().run((count + task_rows - 1) / task_rows, [&](std::int64_t i) {
    const std::int64_t from = i * task_rows;
    k.pack_input(w, x, count, from, std::min(count, from + task_rows), packed);
  });
  return {packed, count, stride};
}

void multiply(const Matrix& w, const float* x, std::int64_t count, const float* bias, float* y) {
  if (!w.rows) return;
  const Kernels& k = kernels();
  for_input_batches(w, count, [&](std::int64_t from, std::int64_t num_rows) {
    const PackedRows rows = pack_rows(w, x + from * w.width, num_rows);
    const std::size_t scratch_size = static_cast<std::size_t>(k.matmul_scratch(w));
    const std::int64_t task_rows = rows_per_task(w, num_rows);
    float* batch_y = y + from * w.rows;
    ThreadPool::shared().run((w.rows + task_rows - 1) / task_rows, [&](std::int64_t i) {
      const std::int64_t begin = i * task_rows, end = std::min(w.rows, begin + task_rows);
      k.matmul(w, rows, bias, batch_y, w.rows, begin, end, scratch<ForMatmul>(scratch_size));
    });
  });
}

mx::array to_float32(const mx::array& x, int width) {
  if (x.ndim() < 1 || x.shape(-1) != width)
    throw std::invalid_argument("the last axis must be " + std::to_string(width) + " long");
  to_scale_type(x, "x");
  return mx::astype(x, mx::float32, cpu());
}

Matmul::Matmul(mx::array weight, std::optional<mx::array> scales, std::optional<mx::array> biases,
               std::optional<mx::array> bias, int group, int bits, int activations)
    : weight_(std::move(weight)), scales_(std::move(scales)), biases_(std::move(biases)),
      bias_(std::move(bias)), group_(group), planes_(activations / 8) {
  check_activations(activations);
  const int axes = static_cast<int>(weight_.ndim());
  if (axes != 2 && axes != 3)
    throw std::invalid_argument("a matrix must have two axes, and a stack three");
  mx::Shape outer(weight_.shape().begin(), weight_.shape().end() - 1);
  stacked_ = axes == 3 ? outer[0] : 0;
  outputs_ = outer.back();
  if (scales_) {
    if (!biases_ || (bits != 4 && bits != 8) || (group != 32 && group != 64 && group != 128))
      throw std::invalid_argument(
          "a quantized matrix must have 4 or 8 bits with scales and biases, in groups of 32, 64 or "
          "128");
    if (weight_.dtype() != mx::uint32) throw std::invalid_argument("packed words must be uint32");
    inputs_ = weight_.shape(-1) * 32 / bits;
    mx::Shape groups = outer;
    groups.push_back(inputs_ / group);
    if (inputs_ % group || scales_->shape() != groups || biases_->shape() != groups)
      throw std::invalid_argument("scales and biases must be [out, in / group]");
    format_ = bits == 4 ? WeightFormat::q4 : WeightFormat::q8;
    scale_type_ = to_scale_type(*scales_, "scales");
    if (biases_->dtype() != scales_->dtype())
      throw std::invalid_argument("scales and biases must be of one type");
  } else {
    inputs_ = weight_.shape(-1), group_ = 0;
    const ScaleType type = to_scale_type(weight_, "a matrix");
    format_ = type == ScaleType::f32    ? WeightFormat::f32
              : type == ScaleType::bf16 ? WeightFormat::bf16
                                        : WeightFormat::f16;
    // a product with a bfloat16 matrix uses at least 16 bits of x
    planes_ = format_ == WeightFormat::bf16 ? std::max(planes_, 2) : 0;
  }
  if (!inputs_) throw std::invalid_argument("a matrix must have columns");
  if (bias_ && (bias_->dtype() != mx::float32 || bias_->shape() != outer))
    throw std::invalid_argument("a bias must be [out] of float32");
}

Matmul Matmul::from_blocks(mx::array panels, int type_id, int outputs, int inputs,
                           std::optional<mx::array> bias, int activations) {
  check_activations(activations);
  Matmul made(std::move(panels));
  made.format_ = parse_block_type(type_id);
  const BlockFormat f = block_format(made.format_);
  const int axes = static_cast<int>(made.weight_.ndim());
  if (made.weight_.dtype() != mx::uint8 || (axes != 2 && axes != 3) || outputs < 1 || inputs < 1 ||
      inputs % f.group || (f.scales >= BlockScales::k_pair && inputs % kChunkNumbers))
    throw std::invalid_argument("blocks must be the result of repack_blocks");
  mx::Shape outer(made.weight_.shape().begin(), made.weight_.shape().end() - 2);
  mx::Shape expected = outer;
  expected.push_back(static_cast<int>((outputs + kPanelRows - 1) / kPanelRows * kPanelRows));
  expected.push_back(static_cast<int>(block_row_bytes(made.format_, inputs)));
  if (made.weight_.shape() != expected)
    throw std::invalid_argument("blocks must have the shape of repack_blocks for this matrix");
  outer.push_back(outputs);
  if (bias && (bias->dtype() != mx::float32 || bias->shape() != outer))
    throw std::invalid_argument("a bias must be [out] of float32");
  made.bias_ = std::move(bias), made.group_ = f.group, made.planes_ = activations / 8;
  made.stacked_ = axes == 3 ? outer[0] : 0, made.outputs_ = outputs, made.inputs_ = inputs;
  return made;
}

bool Matmul::has_same_format(const Matmul& other) const {
  return format_ == other.format_ && group_ == other.group_ && planes_ == other.planes_ &&
         stacked_ == other.stacked_ && outputs_ == other.outputs_ && inputs_ == other.inputs_;
}

std::vector<mx::array> Matmul::arrays() const {
  std::vector<mx::array> all{weight_};
  for (const auto& one : {scales_, biases_, bias_})
    if (one) all.push_back(*one);
  return all;
}

Matrix Matmul::matrix(const std::vector<mx::array>& in, std::size_t first, int index) const {
  const std::size_t num_arrays = scales_ ? 3 : 1;
  for (std::size_t i = first; i < first + num_arrays; i++)
    if (!in[i].flags().row_contiguous)
      throw std::runtime_error("a matrix must be stored row after row");
  Matrix w{format_, scale_type_, group_, planes_, outputs_, inputs_, in[first].data<char>(),
           nullptr, nullptr};
  w.data = in[first].data<char>() + index * stored_rows(w) * stored_row_bytes(w);
  if (scales_) {
    const auto offset = index * w.rows * (w.width / group_) * mx::size_of(scales_->dtype());
    w.scales = in[first + 1].data<char>() + offset;
    w.biases = in[first + 2].data<char>() + offset;
  }
  return w;
}

const float* Matmul::bias(const std::vector<mx::array>& in, std::size_t first) const {
  return bias_ ? in[first + (scales_ ? 3 : 1)].data<float>() : nullptr;
}

mx::array Matmul::operator()(const mx::array& x) const {
  if (stacked_) throw std::invalid_argument("a stack of matrices needs gather");
  std::vector<mx::array> in{to_float32(x, inputs_)};
  mx::Shape shape = x.shape();
  shape.back() = outputs_;
  for (mx::array& one : arrays()) in.push_back(std::move(one));
  const mx::array y(std::move(shape), mx::float32, std::make_shared<MatmulPrimitive>(cpu(), *this),
                    std::move(in));
  return mx::astype(y, x.dtype(), cpu());
}

mx::array Matmul::multiply_by_reference(const mx::array& x) const {
  if (stacked_ || bias_ || !(scales_ || format_ == WeightFormat::bf16))
    throw std::invalid_argument(
        "the reference needs a matrix of 4 or 8 bits or of bfloat16 without a bias");
  std::vector<mx::array> in{contiguous_rows(to_float32(x, inputs_))};
  mx::Shape shape = x.shape();
  shape.back() = outputs_;
  for (mx::array& one : arrays()) in.push_back(std::move(one));
  return mx::array(std::move(shape), mx::float32,
                   std::make_shared<ReferencePrimitive>(cpu(), *this), std::move(in));
}

mx::array Matmul::dequantize_rows(const mx::array& ids) const {
  if (stacked_) throw std::invalid_argument("a stack of matrices needs gather");
  mx::Shape shape = ids.shape();
  shape.push_back(inputs_);
  std::vector<mx::array> in{contiguous_rows(mx::astype(ids, mx::int32, cpu()))};
  for (mx::array& one : arrays()) in.push_back(std::move(one));
  return mx::array(std::move(shape), mx::float32,
                   std::make_shared<DequantizeRowsPrimitive>(cpu(), *this), std::move(in));
}

}  // namespace mlxrunner
