#include "rowwise.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "isa_dispatch.hpp"
#include "thread_pool.hpp"

namespace mlxrunner {

namespace {

struct ForRow;
struct ForUpRow;
struct ForAngles;

// Random access to the rows of an array with any strides.
class StridedRows {
 public:
  explicit StridedRows(const mx::array& a)
      : data_(a.data<float>()), shape_(a.shape()), strides_(a.strides()),
        contiguous_(a.flags().row_contiguous), width_(a.ndim() ? a.shape(-1) : 1) {}

  // Returns the row with this number. The result is a pointer into the array, or a copy in the
  // scratch memory of `Tag`.
  template <class Tag>
  const float* at(std::int64_t row) const {
    if (contiguous_) return data_ + row * width_;
    const float* from = data_;
    for (int axis = static_cast<int>(shape_.size()) - 2; axis >= 0; axis--) {
      from += row % shape_[axis] * strides_[axis];
      row /= shape_[axis];
    }
    const std::int64_t step = strides_.back();
    if (step == 1) return from;
    float* buffer = scratch<Tag>(static_cast<std::size_t>(width_));
    for (std::int64_t k = 0; k < width_; k++) buffer[k] = from[k * step];
    return buffer;
  }

  std::int64_t width() const { return width_; }

 private:
  const float* data_;
  mx::Shape shape_;
  mx::Strides strides_;
  bool contiguous_;
  std::int64_t width_;
};

void require_float32(const mx::array& a, const char* what) {
  if (a.dtype() != mx::float32) throw std::invalid_argument(std::string(what) + " must be float32");
}

struct Norm {
  bool weighted;
  float eps;
};

class NormPrimitive : public CpuPrimitive {
 public:
  NormPrimitive(mx::Stream stream, Norm norm) : CpuPrimitive(stream), norm_(norm) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    if (!outs[0].size()) return;
    const float* weight = norm_.weighted ? in[1].data<float>() : nullptr;
    float* out = outs[0].data<float>();
    const std::int64_t rows = static_cast<std::int64_t>(outs[0].size()) / in[0].shape(-1);
    mx::cpu::get_command_encoder(stream()).dispatch([=, eps = norm_.eps, x = StridedRows(in[0])] {
      const std::int64_t width = x.width();
      parallel_for_rows(rows, width, [&](std::int64_t row) {
        kernels().rms_norm(x.at<ForRow>(row), width, weight, eps, out + row * width);
      });
    });
  }

  const char* name() const override { return "mlxrunner::RmsNorm"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Norm norm_;
};

// Its inputs are x, the periods, and the offsets if they are an array.
class RopePrimitive : public CpuPrimitive {
 public:
  RopePrimitive(mx::Stream stream, Rotation rotation, std::optional<int> offset)
      : CpuPrimitive(stream), rotation_(rotation), offset_(offset) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    if (!outs[0].size()) return;
    const float* periods = in[1].data<float>();
    const std::int32_t* offsets = offset_ ? nullptr : in[2].data<std::int32_t>();
    const std::int64_t starts = offset_ ? 1 : static_cast<std::int64_t>(in[2].size());
    float* out = outs[0].data<float>();
    const std::int64_t heads = in[0].shape(1), length = in[0].shape(2),
                       rows = static_cast<std::int64_t>(outs[0].size()) / rotation_.width;
    mx::cpu::get_command_encoder(stream()).dispatch([=, rotation = rotation_, offset = offset_,
                                                     x = StridedRows(in[0])] {
      const Kernels& k = kernels();
      const std::int64_t half = rotation.dims / 2, stride = (half + 15) / 16 * 16;
      // the heads share the angles, so the angles are computed only once per position
      float* cos = scratch<ForAngles>(static_cast<std::size_t>(2 * starts * length * stride));
      float* sin = cos + starts * length * stride;
      parallel_for_rows(starts * length, 8 * half, [&](std::int64_t i) {
        const std::int64_t start = offset ? *offset : offsets[i / length];
        k.rope_angles(static_cast<float>(start + i % length), periods, half, cos + i * stride,
                      sin + i * stride);
      });
      // iterate over positions first, because this is the memory order of heads that come from one
      // product
      parallel_for_rows(rows, rotation.width, [&](std::int64_t i) {
        const std::int64_t b = i / (heads * length), l = i / heads % length, h = i % heads;
        const std::int64_t row = (b * heads + h) * length + l;
        const std::int64_t angle = ((starts == 1 ? 0 : b) * length + l) * stride;
        k.rotate(rotation, x.at<ForRow>(row), cos + angle, sin + angle, out + row * rotation.width);
      });
    });
  }

  const char* name() const override { return "mlxrunner::Rope"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Rotation rotation_;
  std::optional<int> offset_;
};

class GluPrimitive : public CpuPrimitive {
 public:
  GluPrimitive(mx::Stream stream, Activation kind) : CpuPrimitive(stream), kind_(kind) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    if (!outs[0].size()) return;
    float* out = outs[0].data<float>();
    mx::cpu::get_command_encoder(stream()).dispatch(
        [=, kind = kind_, size = static_cast<std::int64_t>(outs[0].size()),
         gate = StridedRows(in[0]), up = StridedRows(in[1])] {
          const std::int64_t width = gate.width();
          parallel_for_rows(size / width, 4 * width, [&](std::int64_t row) {
            kernels().glu(kind, gate.at<ForRow>(row), up.at<ForUpRow>(row), out + row * width,
                          width);
          });
        });
  }

  const char* name() const override { return "mlxrunner::Glu"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  Activation kind_;
};

class SoftcapPrimitive : public CpuPrimitive {
 public:
  SoftcapPrimitive(mx::Stream stream, float cap) : CpuPrimitive(stream), cap_(cap) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    if (!outs[0].size()) return;
    float* out = outs[0].data<float>();
    mx::cpu::get_command_encoder(stream()).dispatch(
        [=, cap = cap_, size = static_cast<std::int64_t>(outs[0].size()), x = StridedRows(in[0])] {
          // a row of logits is long, so it is divided among threads
          const std::int64_t width = x.width(), rows = size / width,
                             pieces = (width + kPiece - 1) / kPiece;
          parallel_for_rows(rows * pieces, 4 * std::min(width, kPiece), [&](std::int64_t i) {
            const std::int64_t row = i / pieces, from = i % pieces * kPiece;
            kernels().softcap(x.at<ForRow>(row) + from, cap, std::min(kPiece, width - from),
                              out + row * width + from);
          });
        });
  }

  const char* name() const override { return "mlxrunner::Softcap"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  static constexpr std::int64_t kPiece = 1024;
  float cap_;
};

void check_norm_weight(const mx::array& x, const std::optional<mx::array>& weight) {
  require_float32(x, "x");
  if (x.ndim() < 1) throw std::invalid_argument("x must have an axis");
  if (!weight) return;
  require_float32(*weight, "a weight");
  if (weight->shape() != mx::Shape{x.shape(-1)})
    throw std::invalid_argument("a weight must be [last axis of x]");
}

}  // namespace

void check_rope(const RopeParams& params, int head_dim) {
  require_float32(params.periods, "periods");
  if (params.dims < 2 || params.dims % 2 || params.dims > head_dim)
    throw std::invalid_argument("dims must be even and at most the size of a head");
  if (params.periods.shape() != mx::Shape{params.dims / 2})
    throw std::invalid_argument("periods must be [dims / 2]");
}

mx::array rms_norm(const mx::array& x, std::optional<mx::array> weight, float eps) {
  check_norm_weight(x, weight);
  std::vector<mx::array> in{x};
  if (weight) in.push_back(contiguous_rows(*weight));
  const Norm norm{weight.has_value(), eps};
  return mx::array(x.shape(), mx::float32, std::make_shared<NormPrimitive>(cpu(), norm),
                   std::move(in));
}

mx::array rope(const mx::array& x, const Offset& offset, const RopeParams& params) {
  require_float32(x, "x");
  if (x.ndim() != 4) throw std::invalid_argument("x must be [batch, heads, length, head_dim]");
  check_rope(params, x.shape(3));
  std::vector<mx::array> in{x, contiguous_rows(params.periods)};
  std::optional<int> start;
  if (const auto* one = std::get_if<int>(&offset)) {
    start = *one;
  } else {
    const mx::array& each = std::get<mx::array>(offset);
    if (each.size() != 1 && each.shape() != mx::Shape{x.shape(0)})
      throw std::invalid_argument("offsets must be one, or [batch]");
    in.push_back(
        contiguous_rows(each.dtype() == mx::int32 ? each : mx::astype(each, mx::int32, cpu())));
  }
  const Rotation rotation{params.dims, x.shape(3), params.traditional, params.magnitude};
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<RopePrimitive>(cpu(), rotation, start), std::move(in));
}

mx::array softcap(const mx::array& x, float cap) {
  require_float32(x, "x");
  if (!(cap > 0) || x.ndim() < 1) throw std::invalid_argument("cap must be positive");
  return mx::array(x.shape(), mx::float32, std::make_shared<SoftcapPrimitive>(cpu(), cap),
                   std::vector<mx::array>{x});
}

Activation parse_activation(const std::string& kind) {
  static constexpr std::pair<const char*, Activation> kinds[] = {
      {"silu", Activation::silu},
      {"gelu", Activation::gelu},
      {"gelu_tanh", Activation::gelu_tanh},
      {"relu", Activation::relu},
  };
  const auto* found = std::find_if(std::begin(kinds), std::end(kinds),
                                   [&](const auto& one) { return kind == one.first; });
  if (found == std::end(kinds)) throw std::invalid_argument("unknown activation: " + kind);
  return found->second;
}

mx::array glu(const std::string& kind, const mx::array& gate, const mx::array& up) {
  require_float32(gate, "a gate");
  require_float32(up, "up");
  if (gate.shape() != up.shape() || gate.ndim() < 1)
    throw std::invalid_argument("gate and up must have the same shape");
  return mx::array(gate.shape(), mx::float32,
                   std::make_shared<GluPrimitive>(cpu(), parse_activation(kind)),
                   std::vector<mx::array>{gate, up});
}

}  // namespace mlxrunner
