// Runs the kernels without MLX and Python, for sanitizers and emulated processors:
// `driver SEED ROUNDS`. Prints an error and exits with 1, or prints the instruction set and
// fingerprints of all results.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "isa_dispatch.hpp"
#include "guarded.hpp"

using namespace mlxrunner;

namespace {

std::uint16_t half_of(ScaleType type, Draw& draw) {
  // bits of a number of either type between 1/64 and 1, with any sign; sometimes denormal or zero
  if (draw.in(0, 15) == 0) return static_cast<std::uint16_t>(draw.in(0, 20));
  const auto sign = static_cast<std::uint16_t>(draw.in(0, 1) << 15);
  const int low = type == ScaleType::bf16 ? 0x3c80 : 0x2400;
  const int high = type == ScaleType::bf16 ? 0x3f80 : 0x3c00;
  return static_cast<std::uint16_t>(sign | draw.in(low, high));
}

void fill(Guarded<std::byte>& into, ScaleType type, Draw& draw) {
  if (type == ScaleType::f32)
    for (std::size_t i = 0; i + 4 <= into.size(); i += 4) {
      const float x = draw.number() * 0.1f;
      std::memcpy(into.data() + i, &x, 4);
    }
  else
    for (std::size_t i = 0; i + 2 <= into.size(); i += 2) {
      const std::uint16_t x = half_of(type, draw);
      std::memcpy(into.data() + i, &x, 2);
    }
}

std::size_t bytes_of(ScaleType type) { return type == ScaleType::f32 ? 4 : 2; }

// A matrix in read-only memory, followed by a guard page.
struct Owned {
  Matrix w;
  Guarded<std::byte> data, scales, biases;

  static Matrix draw_shape(Draw& draw) {
    Matrix w{};
    w.format = draw.of({WeightFormat::f32, WeightFormat::bf16, WeightFormat::f16, WeightFormat::q4,
                        WeightFormat::q8});
    w.rows = draw.in(1, 40);
    w.width = draw.of({draw.in(1, 70), draw.in(1, 300), draw.in(1000, 1100)});
    if (w.format == WeightFormat::q4 || w.format == WeightFormat::q8) {
      w.scale_type = draw.of({ScaleType::f32, ScaleType::bf16, ScaleType::f16});
      w.group = draw.of({32, 64, 128});
      w.width = w.group * draw.of({draw.in(1, 5), draw.in(15, 20)});
    }
    return w;
  }
  std::size_t groups() const {
    return w.group ? static_cast<std::size_t>(w.rows * w.width / w.group) : 0;
  }

  explicit Owned(Draw& draw)
      : w(draw_shape(draw)), data(static_cast<std::size_t>(w.rows * w.row_bytes())),
        scales(groups() * bytes_of(w.scale_type)), biases(groups() * bytes_of(w.scale_type)) {
    w.data = data.data(), w.scales = scales.data(), w.biases = biases.data();
    if (w.group)
      for (std::size_t i = 0; i < data.size(); i++) data[i] = std::byte{draw.byte()};
    else
      fill(data,
           w.format == WeightFormat::f32    ? ScaleType::f32
           : w.format == WeightFormat::bf16 ? ScaleType::bf16
                                            : ScaleType::f16,
           draw);
    fill(scales, w.scale_type, draw);
    fill(biases, w.scale_type, draw);
    data.seal(), scales.seal(), biases.seal();
  }
};

// y = x w^T, rows [begin, end) of w, in the way of `multiply`.
void matmul(const Matrix& w, const float* x, std::int64_t count, const float* bias, float* y,
            std::int64_t begin, std::int64_t end) {
  const Kernels& k = kernels();
  Guarded<float> scratch(static_cast<std::size_t>(k.matmul_scratch(w)), 64);
  const std::int64_t stride = k.packed_input_stride(w, count);
  Guarded<float> packed(static_cast<std::size_t>(count * stride), 64);
  if (stride) k.pack_input(w, x, count, packed.data(), stride);
  const PackedRows rows =
      stride ? PackedRows{packed.data(), count, stride} : PackedRows{x, count, w.width};
  k.matmul(w, rows, bias, y, w.rows, begin, end, scratch.data());
}

void check_matmul(Draw& draw, Fingerprint& seen) {
  Owned owned(draw);
  const Matrix& w = owned.w;
  const auto width = static_cast<std::size_t>(w.width), rows = static_cast<std::size_t>(w.rows);
  const std::int64_t count = draw.of({draw.in(1, 9), draw.in(1, 40), draw.in(190, 400)});
  Guarded<float> x(static_cast<std::size_t>(count) * width), bias(rows);
  for (std::size_t i = 0; i < x.size(); i++) x[i] = draw.number();
  for (std::size_t i = 0; i < rows; i++) bias[i] = draw.number();
  const float* with = draw.in(0, 1) ? bias.data() : nullptr;
  x.seal();
  Guarded<float> y(static_cast<std::size_t>(count) * rows);
  // like two threads: neither writes to the part of the other
  std::int64_t split = draw.in(0, w.rows);
  if (split < w.rows) split = split / 16 * 16;
  for (std::size_t i = 0; i < y.size(); i++) y[i] = 12345;
  matmul(w, x.data(), count, with, y.data(), 0, split);
  for (std::size_t i = 0; i < y.size(); i++)
    if (static_cast<std::int64_t>(i % rows) >= split && y[i] != 12345)
      fail("wrote beyond its part");
  matmul(w, x.data(), count, with, y.data(), split, w.rows);

  Guarded<float> row(width), alone(rows);
  const std::int64_t m = draw.in(0, count - 1);
  matmul(w, x.data() + m * w.width, 1, with, alone.data(), 0, w.rows);
  if (std::memcmp(alone.data(), y.data() + m * w.rows, rows * 4)) fail("a row depends on others");
  for (std::size_t n = 0; n < rows; n++) {
    kernels().dequantize_row(w, static_cast<std::int64_t>(n), row.data());
    seen.see(row.data(), width);
    double sum = with ? with[n] : 0.0, size = std::abs(sum), most = 0, whole = 0;
    for (std::size_t i = 0; i < width; i++) {
      const float of_x = x[static_cast<std::size_t>(m) * width + i];
      const double term = static_cast<double>(of_x) * row[i];
      sum += term, size += std::abs(term);
      most = std::max<double>(most, std::abs(of_x)), whole += std::abs(row[i]);
    }
    double allowed = (static_cast<double>(width) + 8) * 0x1p-24 * size + 1e-40;
    // values of x are rounded to integers, and the bias and numbers of a group can nearly cancel
    if (w.group) allowed += most * (whole * 0x1.1p-24 + 0x1p-20);
    if (!(std::abs(alone[n] - sum) <= allowed)) fail("a product is wrong");
  }
  seen.see(y.data(), y.size());
}

void check_rows(Draw& draw, Fingerprint& seen) {
  const Kernels& k = kernels();
  const auto width = static_cast<std::size_t>(draw.of({draw.in(1, 40), draw.in(1, 300)}));
  Guarded<float> x(width), y(width), out(width);
  for (std::size_t i = 0; i < width; i++) x[i] = draw.number() * 9, y[i] = draw.number();
  x.seal(), y.seal();
  const float* weight = draw.in(0, 1) ? y.data() : nullptr;
  k.rms_norm(x.data(), static_cast<std::int64_t>(width), weight, 1e-6f, out.data());
  seen.see(out.data(), width);
  Guarded<float> own(width);
  std::memcpy(own.data(), x.data(), width * sizeof(float));
  k.rms_norm(own.data(), static_cast<std::int64_t>(width), weight, 1e-6f, own.data());
  if (std::memcmp(own.data(), out.data(), width * sizeof(float))) fail("a norm in place");
  for (auto kind : {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::relu}) {
    k.glu(kind, x.data(), y.data(), out.data(), static_cast<std::int64_t>(width));
    seen.see(out.data(), width);
  }
  const std::int64_t half = draw.in(1, 70);
  Guarded<float> periods(static_cast<std::size_t>(half)), cos(periods.size()), sin(periods.size());
  for (std::size_t i = 0; i < periods.size(); i++)
    periods[i] = 1.0f + 100.0f * static_cast<float>(i);
  k.rope_angles(static_cast<float>(draw.in(0, 100000)), periods.data(), half, cos.data(),
                sin.data());
  const Rotation rotation{2 * half, 2 * half + draw.in(0, 20), draw.in(0, 1) == 1, 1.5f};
  Guarded<float> head(static_cast<std::size_t>(rotation.width)), turned(head.size());
  for (std::size_t i = 0; i < head.size(); i++) head[i] = draw.number();
  head.seal();
  k.rotate(rotation, head.data(), cos.data(), sin.data(), turned.data());
  seen.see(turned.data(), turned.size());
  Guarded<float> itself(head.size());
  std::memcpy(itself.data(), head.data(), head.size() * sizeof(float));
  k.rotate(rotation, itself.data(), cos.data(), sin.data(), itself.data());
  if (std::memcmp(itself.data(), turned.data(), head.size() * sizeof(float)))
    fail("a rotation in place");
}

void check_attention(Draw& draw, Fingerprint& seen) {
  AttentionTask a{};
  a.queries = draw.of({std::int64_t{1}, draw.in(1, 9)}), a.group = draw.in(1, 5);
  a.key_dim = draw.of({draw.in(1, 40), std::int64_t{64}, std::int64_t{128}});
  a.value_dim = draw.in(1, 130);
  a.capacity = draw.in(a.queries, 100), a.length = draw.in(a.queries, a.capacity);
  a.head_slot = draw.in(0, a.capacity - 1), a.first_position = draw.in(0, 1000);
  a.position = a.first_position + a.length - a.queries;
  a.causal = draw.in(0, 3) > 0, a.window = draw.in(0, 1) ? draw.in(1, 50) : 0;
  a.scale = 0.125f, a.softcap = draw.in(0, 1) ? 30.0f : 0.0f;
  a.q_head = a.key_dim, a.q_step = a.key_dim * a.group;
  a.out_head = a.value_dim, a.out_step = a.value_dim * a.group;
  a.key_step = a.key_dim, a.value_step = a.value_dim;
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  Guarded<float> q(size(a.queries * a.q_step)), keys(size(a.capacity * a.key_dim)),
      values(size(a.capacity * a.value_dim)), sinks(size(a.group)),
      out(size(a.queries * a.out_step));
  for (auto* one : {&q, &keys, &values, &sinks}) {
    for (std::size_t i = 0; i < one->size(); i++) (*one)[i] = draw.number() * 2;
    one->seal();
  }
  a.q = q.data(), a.keys = keys.data(), a.values = values.data(), a.out = out.data();
  a.sinks = draw.in(0, 1) ? sinks.data() : nullptr;
  Guarded<float> scratch(size(kernels().attend_scratch(a)), 64);
  kernels().attend(a, scratch.data());
  seen.see(out.data(), out.size());
}

void check_sampling(Draw& draw, Fingerprint& seen) {
  const Kernels& k = kernels();
  const std::int64_t n = draw.of({draw.in(1, 40), draw.in(1, 300), draw.in(1, 3) * kSampleBlock});
  const auto size = static_cast<std::size_t>(n);
  Guarded<float> x(size), scaled(size), mass(size);
  Guarded<float> maxima(static_cast<std::size_t>((n + kSampleBlock - 1) / kSampleBlock));
  Guarded<std::int32_t> found(size);
  for (std::size_t i = 0; i < size; i++) x[i] = draw.in(0, 9) ? draw.number() * 9 : -INFINITY;
  x[static_cast<std::size_t>(draw.in(0, n - 1))] = draw.number();
  x.seal();
  const float largest = k.row_max(x.data(), n);
  if (largest != *std::max_element(x.data(), x.data() + n)) fail("a maximum is wrong");
  k.block_maxima(x.data(), n, maxima.data());
  seen.see(maxima.data(), maxima.size());
  const float total = k.scale_and_exp(x.data(), n, largest, 0.7f, scaled.data(), mass.data());
  double sum = 0;
  for (std::size_t i = 0; i < size; i++) sum += mass[i];
  if (!(std::abs(sum - total) <= 1e-5 * sum)) fail("a sum of exponentials is wrong");
  seen.see(scaled.data(), size), seen.see(mass.data(), size);
  scaled.seal(), mass.seal();
  const float low = -9 * std::abs(draw.number());
  const std::int64_t count = k.find_between(scaled.data(), n, low, 0.5f, found.data());
  if (count != std::count_if(scaled.data(), scaled.data() + n, [&](float s) { return s >= low; }))
    fail("a range is wrong");
  const NoiseKey key{static_cast<std::uint32_t>(draw.in(0, 1000000)), 77};
  const std::int64_t token = k.draw(scaled.data(), mass.data(), n, low, key);
  if (count && (token < 0 || !(scaled[static_cast<std::size_t>(token)] >= low)))
    fail("a token is outside of its filter");
  std::vector<float> listed(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < listed.size(); i++)
    listed[i] = scaled[static_cast<std::size_t>(found[i])];
  const std::int64_t place = k.draw_listed(listed.data(), found.data(), count, low, key);
  if (count && found[static_cast<std::size_t>(place)] != token)
    fail("the list gives another token");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) fail("driver SEED ROUNDS");
  std::printf("%s", kernels().name);
  for (auto check : {check_matmul, check_rows, check_attention, check_sampling}) {
    Draw draw(static_cast<std::uint32_t>(std::atoi(argv[1])));
    Fingerprint seen;
    for (int i = 0; i < std::atoi(argv[2]); i++) check(draw, seen);
    std::printf(" %016llx", seen.value());
  }
  std::printf("\n");
}
