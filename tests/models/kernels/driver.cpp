// Runs the kernels without MLX and Python, for sanitizers and emulated processors:
// `driver SEED ROUNDS`. Prints an error and exits with 1, or prints the instruction set and
// fingerprints of all results.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "block_formats.hpp"
#include "isa_dispatch.hpp"
#include "guarded.hpp"
#include "sample_edits.hpp"

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

std::int64_t stored_bytes(const Matrix& w) {
  if (!has_blocks(w.format)) return w.rows * w.row_bytes();
  return (w.rows + kPanelRows - 1) / kPanelRows * kPanelRows * block_row_bytes(w.format, w.width);
}

// Fills panels of blocks with codes and small scales of any value that a file can have, and numbers
// of usual sizes.
void fill_blocks(const Matrix& w, Guarded<std::byte>& data, Draw& draw) {
  for (std::size_t i = 0; i < data.size(); i++) data[i] = std::byte{draw.byte()};
  const BlockFormat f = block_format(w.format);
  std::byte* at = data.data();
  const auto fill_halves = [&](std::int64_t bytes) {
    for (std::int64_t i = 0; i < bytes; i += 2) {
      const std::uint16_t x = half_of(ScaleType::f16, draw);
      std::memcpy(at + i, &x, 2);
    }
  };
  for (std::int64_t n = 0; n < w.rows; n += kPanelRows)
    for (std::int64_t k = 0; k < w.width; k += kChunkNumbers) {
      const ChunkParts parts = chunk_parts(f, std::min(w.width - k, kChunkNumbers));
      at += parts.codes * kPanelRows;
      if (f.scales == BlockScales::f16 || f.scales == BlockScales::f16_pair)
        fill_halves(parts.scales * kPanelRows);
      for (std::int64_t i = 0; f.scales == BlockScales::e8m0 && i < parts.scales * kPanelRows; i++)
        at[i] = std::byte{static_cast<std::uint8_t>(draw.in(118, 126))};
      for (std::int64_t i = 0; f.scales == BlockScales::k_pair && i < parts.scales * kPanelRows; i++)
        at[i] &= std::byte{63};
      at += parts.scales * kPanelRows;
      fill_halves(parts.supers * kPanelRows);
      at += parts.supers * kPanelRows;
    }
}

// A matrix in read-only memory, followed by a guard page.
struct Owned {
  Matrix w;
  Guarded<std::byte> data, scales, biases;

  static Matrix draw_blocks(Draw& draw) {
    Matrix w{};
    w.format = static_cast<WeightFormat>(draw.in(static_cast<int>(WeightFormat::ggml_q4_0),
                                                 static_cast<int>(WeightFormat::ggml_mxfp4)));
    const BlockFormat f = block_format(w.format);
    w.group = f.group, w.planes = draw.of({1, 2, 3});
    w.rows = draw.in(1, 40);
    w.width = f.scales >= BlockScales::k_pair ? 256 * draw.in(1, 4) : 32 * draw.in(1, 25);
    return w;
  }
  static Matrix draw_shape(Draw& draw) {
    if (draw.in(0, 2) == 0) return draw_blocks(draw);
    Matrix w{};
    w.format = draw.of({WeightFormat::f32, WeightFormat::bf16, WeightFormat::f16, WeightFormat::q4,
                        WeightFormat::q8});
    w.rows = draw.in(1, 40);
    w.width = draw.of({draw.in(1, 70), draw.in(1, 300), draw.in(1000, 1100)});
    if (w.format == WeightFormat::q4 || w.format == WeightFormat::q8) {
      w.scale_type = draw.of({ScaleType::f32, ScaleType::bf16, ScaleType::f16});
      w.group = draw.of({32, 64, 128});
      w.planes = draw.of({1, 2, 3});
      w.width = w.group * draw.of({draw.in(1, 5), draw.in(15, 20)});
    }
    return w;
  }
  std::size_t groups() const {
    const bool has_scales = w.group && !has_blocks(w.format);
    return has_scales ? static_cast<std::size_t>(w.rows * w.width / w.group) : 0;
  }

  explicit Owned(Draw& draw)
      : w(draw_shape(draw)), data(static_cast<std::size_t>(stored_bytes(w))),
        scales(groups() * bytes_of(w.scale_type)), biases(groups() * bytes_of(w.scale_type)) {
    w.data = data.data(), w.scales = scales.data(), w.biases = biases.data();
    if (has_blocks(w.format)) fill_blocks(w, data, draw);
    else if (w.group)
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

// y = x w^T, rows [begin, end) of w, like `multiply`.
void matmul(const Matrix& w, const float* x, std::int64_t count, const float* bias, float* y,
            std::int64_t begin, std::int64_t end) {
  const Kernels& k = kernels();
  Guarded<float> scratch(static_cast<std::size_t>(k.matmul_scratch(w)), 64);
  const std::int64_t stride = k.packed_input_stride(w, count);
  const std::int64_t block = k.input_block(w, count), whole = (count + block - 1) / block * block;
  Guarded<float> packed(static_cast<std::size_t>(whole * stride), 64);
  // two threads' parts
  const std::int64_t part = whole / block / 2 * block;
  if (stride) k.pack_input(w, x, count, 0, part, packed.data());
  if (stride) k.pack_input(w, x, count, part, count, packed.data());
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

  // the definition has fused multiply-adds, which the scalar loops lack on some processors
  const bool is_fused = std::strcmp(kernels().name, "scalar") != 0;
  if (is_fused && w.group && !has_blocks(w.format) && !with) {
    const auto size = static_cast<std::size_t>(kernels().reference_scratch(w, count));
    Guarded<float> expected(y.size()), scratch(size, 64);
    kernels().multiply_by_reference(w, x.data(), count, expected.data(), scratch.data());
    if (std::memcmp(expected.data(), y.data(), y.size() * 4)) fail("the reference differs");
  }

  if (w.format == WeightFormat::bf16) {
    Matrix two = w;
    two.planes = draw.of({2, 3});
    const auto size = static_cast<std::size_t>(kernels().bf16_tile_reference_scratch(two, count));
    const auto one_size = static_cast<std::size_t>(kernels().bf16_tile_reference_scratch(two, 1));
    Guarded<float> tiled(y.size()), scratch(size, 64), one(rows), one_scratch(one_size, 64);
    kernels().bf16_tile_reference(two, x.data(), count, tiled.data(), scratch.data());
    kernels().bf16_tile_reference(two, x.data() + (count - 1) * w.width, 1, one.data(),
                                  one_scratch.data());
    if (std::memcmp(one.data(), &tiled[static_cast<std::size_t>((count - 1) * w.rows)], rows * 4))
      fail("on tiles, a row depends on others");
    seen.see(tiled.data(), tiled.size());
  }

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
    // out
    const double rounding = w.planes == 3 ? 0x1.1p-24 : w.planes == 2 ? 0x1.1p-16 : 0x1.1p-8;
    if (w.group) allowed += most * (whole * rounding + 0x1p-20);
    // numbers of block types may be small differences of larger ones of the same group
    for (std::size_t i = 0; has_blocks(w.format) && i < width; i++) {
      const std::size_t from = i / 16 * 16;
      const float largest = std::abs(*std::max_element(
          &row[from], &row[from] + 16, [](float a, float b) { return std::abs(a) < std::abs(b); }));
      allowed += most * largest * 32 * std::max(rounding, 0x1p-23);
    }
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

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

void draw_all(Draw& draw, Guarded<float>& into) {
  for (std::size_t i = 0; i < into.size(); i++) into[i] = draw.number();
}

void check_convolution(Draw& draw, Fingerprint& seen) {
  const std::int64_t channels = draw.in(1, 70), width = draw.in(1, 5);
  std::vector<std::unique_ptr<Guarded<float>>> rows;
  std::vector<const float*> taps;
  for (std::int64_t j = 0; j < width; j++) {
    rows.push_back(std::make_unique<Guarded<float>>(size(channels)));
    draw_all(draw, *rows.back());
    rows.back()->seal();
    taps.push_back(rows.back()->data());
  }
  Guarded<float> weight(size(width * channels)), bias(size(channels)), out(size(channels));
  draw_all(draw, weight), draw_all(draw, bias);
  weight.seal(), bias.seal();
  const bool has_bias = draw.in(0, 1) == 1;
  kernels().convolve(taps.data(), width, weight.data(), has_bias ? bias.data() : nullptr, channels,
                     out.data());
  for (std::size_t c = 0; c < out.size(); c++) {
    double sum = has_bias ? bias[c] : 0;
    for (std::size_t j = 0; j < taps.size(); j++)
      sum += static_cast<double>(taps[j][c]) * weight[j * out.size() + c];
    if (!(std::abs(out[c] - sum / (1 + std::exp(-sum))) < 1e-5)) fail("a convolution is wrong");
  }
  seen.see(out.data(), out.size());
}

void check_scan(Draw& draw, Fingerprint& seen) {
  const std::int64_t length = draw.in(1, 9), dim = draw.in(1, 40), states = draw.in(1, 40);
  const std::int64_t heads = draw.in(1, 3), row = dim + 2 * states, out_step = dim + draw.in(0, 3);
  // the last row ends with its queries
  Guarded<float> rows(size(length * row)), steps(size((length - 1) * heads + 1)),
      decays(steps.size()), state(size(states * dim)), out(size((length - 1) * out_step + dim));
  for (Guarded<float>* all : {&rows, &steps, &decays, &state}) draw_all(draw, *all);
  std::vector<double> expected(state.data(), state.data() + state.size());
  rows.seal(), steps.seal(), decays.seal();
  ScanTask task{length,       dim,   states, rows.data(), rows.data() + dim, rows.data() + dim + states,
                row,          steps.data(), decays.data(), heads, 0.5f, state.data(), out.data(),
                out_step};
  Guarded<float> whole(state.size()), whole_out(out.size());
  std::memcpy(whole.data(), state.data(), state.size() * sizeof(float));
  ScanTask at_once = task;
  at_once.state = whole.data(), at_once.out = whole_out.data();
  kernels().scan(at_once);
  task.length = 1;
  for (std::int64_t t = 0; t < length; t++) {
    kernels().scan(task);
    for (std::int64_t p = 0; p < dim; p++) {
      double sum = 0.5 * task.x[p];
      for (std::int64_t n = 0; n < states; n++) {
        double& one = expected[size(n * dim + p)];
        one = one * *task.decays + static_cast<double>(task.keys[n]) * *task.steps * task.x[p];
        sum += one * task.queries[n];
      }
      if (!(std::abs(task.out[p] - sum) < 1e-4)) fail("an output of a scan is wrong");
      if (task.out[p] != whole_out[size(t * out_step + p)]) fail("a scan depends on its length");
    }
    task.x += row, task.keys += row, task.queries += row;
    task.steps += heads, task.decays += heads, task.out += out_step;
  }
  if (std::memcmp(whole.data(), state.data(), state.size() * sizeof(float)))
    fail("a state depends on the length of a scan");
  seen.see(state.data(), state.size());
}

// Stores rows of `width` numbers, and replaces the numbers with the rounded ones.
void store(KVType type, Guarded<float>& numbers, std::int64_t width, Guarded<std::byte>& into) {
  const auto count = static_cast<std::size_t>(width);
  const auto bytes = static_cast<std::size_t>(kv_number_bytes(type));
  for (std::size_t i = 0; i < numbers.size(); i += count)
    kernels().store_kv_row(type, &numbers[i], width, into.data() + i * bytes);
  if (type == KVType::f32) return;
  // a matrix of one column has the layout of numbers in a row
  const auto format = type == KVType::bf16 ? WeightFormat::bf16 : WeightFormat::f16;
  for (std::size_t i = 0; i < numbers.size(); i++) {
    const Matrix one{format, {}, 0, 0, 1, 1, into.data() + i * bytes, nullptr, nullptr};
    const float before = numbers[i];
    kernels().dequantize_row(one, 0, &numbers[i]);
    const float allowed = type == KVType::bf16 ? 0x1p-8f : 0x1p-11f;
    if (!(std::abs(numbers[i] - before) <= std::abs(before) * allowed + 0x1p-25f))
      fail("a number is rounded wrongly");
  }
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
      values(size(a.capacity * a.value_dim)), sinks(size(a.group));
  for (auto* one : {&q, &keys, &values, &sinks})
    for (std::size_t i = 0; i < one->size(); i++) (*one)[i] = draw.number() * 2;
  const KVType type = draw.of({KVType::f32, KVType::bf16, KVType::f16});
  Guarded<std::byte> stored_keys(keys.size() * size(kv_number_bytes(type))),
      stored_values(values.size() * size(kv_number_bytes(type)));
  store(type, keys, a.key_dim, stored_keys), store(type, values, a.value_dim, stored_values);
  for (auto* one : {&q, &keys, &values, &sinks}) one->seal();
  stored_keys.seal(), stored_values.seal();
  a.q = q.data(), a.sinks = draw.in(0, 1) ? sinks.data() : nullptr;
  const auto attend = [&](KVType as, const void* of_keys, const void* of_values,
                          Guarded<float>& out) {
    a.kv_type = as, a.keys = of_keys, a.values = of_values, a.out = out.data();
    Guarded<float> scratch(size(kernels().attend_scratch(a)), 64);
    kernels().attend(a, scratch.data());
  };
  Guarded<float> out(size(a.queries * a.out_step)), rounded(out.size());
  attend(type, stored_keys.data(), stored_values.data(), out);
  attend(KVType::f32, keys.data(), values.data(), rounded);
  if (std::memcmp(out.data(), rounded.data(), out.size() * 4))
    fail("attention depends on the type of the cache");
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
  if (k.mass_above(scaled.data(), mass.data(), n, -INFINITY) != total)
    fail("the mass above the lowest logit is not the total");
  const float low = -9 * std::abs(draw.number());
  double above = 0;
  for (std::size_t i = 0; i < size; i++) above += scaled[i] > low ? mass[i] : 0;
  const float added = k.mass_above(scaled.data(), mass.data(), n, low);
  if (!(std::abs(above - added) <= 1e-5 * above)) fail("the mass above a logit is wrong");
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

std::vector<std::int32_t> draw_tokens(Draw& draw, std::int64_t vocab, std::int64_t most) {
  std::vector<std::int32_t> tokens(size(draw.in(0, most)));
  for (auto& token : tokens) token = static_cast<std::int32_t>(draw.in(0, vocab - 1));
  return tokens;
}

SampleSettings draw_settings(Draw& draw, std::int64_t vocab) {
  SampleSettings s{};
  s.vocab = vocab;
  s.filters = {draw.of({0.0f, 0.5f, 1.0f}), draw.in(0, 1) * draw.in(0, vocab + 2),
               draw.of({0.3f, 0.95f, INFINITY}), draw.of({-2.0f, -INFINITY})};
  s.seed_words = {1, 2, 3, static_cast<std::uint32_t>(draw.in(0, 100000)) | 1};
  // some of these tokens have no logit
  s.known.resize(size(draw.in(0, 9)));
  for (auto& token : s.known) token = static_cast<std::uint32_t>(draw.in(0, vocab + 3));
  s.output_begin = draw.in(0, static_cast<std::int64_t>(s.known.size()));
  for (const auto token : draw_tokens(draw, vocab, 5)) s.bias.push_back({token, draw.number()});
  std::stable_sort(s.bias.begin(), s.bias.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  s.repetition_penalty = draw.of({1.0f, 1.3f}), s.presence_penalty = draw.of({0.0f, 0.5f});
  s.frequency_penalty = draw.of({0.0f, 0.25f}), s.penalty_window = draw.in(-1, 6);
  if (draw.in(0, 1)) s.allowed_tokens = draw_tokens(draw, vocab, 20);
  for (std::int64_t i = draw.in(0, 3); i > 0; i--) {
    s.bad_words.emplace_back();
    for (std::int64_t j = draw.in(1, 3); j > 0; j--)
      s.bad_words.back().push_back(static_cast<std::uint32_t>(draw.in(0, vocab - 1)));
  }
  s.stop_tokens = draw_tokens(draw, vocab, 3), s.min_tokens = draw.in(0, 3);
  return s;
}

// The edited logit of one token, by the definitions.
float edit_by_definition(const SampleSettings& s, const std::vector<std::uint32_t>& history,
                         std::int64_t drawn, std::uint32_t token, float logit) {
  float bias = 0;
  for (const auto& [biased, value] : s.bias)
    if (biased == static_cast<std::int32_t>(token)) bias += value;
  logit += bias;
  const std::size_t window = s.penalty_window < 0 ? history.size() : size(s.penalty_window);
  const auto begin = history.end() - static_cast<std::ptrdiff_t>(std::min(window, history.size()));
  if (const auto count = std::count(begin, history.end(), token)) {
    logit = logit > 0 ? logit / s.repetition_penalty : logit * s.repetition_penalty;
    logit = logit - s.presence_penalty - s.frequency_penalty * static_cast<float>(count);
  }
  const auto lists = [&](const std::vector<std::int32_t>& tokens) {
    return std::count(tokens.begin(), tokens.end(), static_cast<std::int32_t>(token)) > 0;
  };
  bool may_be_drawn = !s.allowed_tokens || lists(*s.allowed_tokens);
  for (const auto& word : s.bad_words) {
    const std::size_t before = word.size() - 1;
    if (word.back() == token && before + size(s.output_begin) <= history.size() &&
        std::equal(word.begin(), word.end() - 1,
                   history.end() - static_cast<std::ptrdiff_t>(before)))
      may_be_drawn = false;
  }
  if (drawn < s.min_tokens && lists(s.stop_tokens)) may_be_drawn = false;
  return may_be_drawn ? logit : -INFINITY;
}

void check_edits(Draw& draw, Fingerprint& seen) {
  const std::int64_t n = draw.of({draw.in(1, 6), draw.in(1, 40), draw.in(1, 300)});
  const SampleSettings s = draw_settings(draw, n);
  Guarded<float> raw(size(n)), x(size(n));
  Guarded<std::uint32_t> bits(size((n + 31) / 32));
  for (std::size_t i = 0; i < raw.size(); i++) raw[i] = draw.number() * 9;
  for (std::size_t i = 0; i < bits.size(); i++)
    for (int j = 0; j < 4; j++) bits[i] = bits[i] << 8 | static_cast<std::uint32_t>(draw.byte());
  raw.seal(), bits.seal();
  kernels().mask(raw.data(), bits.data(), n, x.data());
  for (std::size_t i = 0; i < x.size(); i++)
    if (x[i] != (bits[i / 32] >> i % 32 & 1 ? raw[i] : -INFINITY)) fail("a mask is wrong");
  const std::vector<float> masked(x.data(), x.data() + n);
  const std::int64_t stride = draw.in(1, 3);
  Guarded<std::uint32_t> earlier(size(draw.in(0, 4))), recent(size(draw.in(0, 4) * stride));
  std::vector<std::uint32_t> all = s.known;
  for (std::size_t i = 0; i < earlier.size(); i++)
    all.push_back(earlier[i] = static_cast<std::uint32_t>(draw.in(0, n - 1)));
  for (std::size_t i = 0; i < recent.size(); i++)
    recent[i] = static_cast<std::uint32_t>(draw.in(0, n - 1));
  for (std::size_t i = 0; i < recent.size(); i += size(stride)) all.push_back(recent[i]);
  earlier.seal(), recent.seal();
  const TokenHistory history{s.known,
                             earlier.data(),
                             static_cast<std::int64_t>(earlier.size()),
                             recent.data(),
                             static_cast<std::int64_t>(recent.size()) / stride,
                             stride};
  const std::int64_t drawn = draw.in(0, 4);
  edit_logits(s, history, drawn, x.data());
  for (std::size_t i = 0; i < x.size(); i++)
    if (x[i] != edit_by_definition(s, all, drawn, static_cast<std::uint32_t>(i), masked[i]))
      fail("an edited logit is wrong");
  seen.see(x.data(), x.size());
  const float largest = kernels().checked_max(x.data(), n);
  const std::int64_t token = draw_token(x.data(), n, largest, s.filters, s.noise_key(drawn));
  if (token < 0 || token >= n) fail("a token is not in the vocabulary");
  if (std::isfinite(largest) && x[size(token)] == -INFINITY) fail("a masked token was drawn");
  x[size(draw.in(0, n - 1))] = draw.of({NAN, INFINITY});
  if (!std::isnan(kernels().checked_max(x.data(), n))) fail("a broken row is not noticed");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) fail("driver SEED ROUNDS");
  std::printf("%s", kernels().name);
  for (auto check : {check_matmul, check_rows, check_convolution, check_scan, check_attention, check_sampling, check_edits}) {
    Draw draw(static_cast<std::uint32_t>(std::atoi(argv[1])));
    Fingerprint seen;
    for (int i = 0; i < std::atoi(argv[2]); i++) check(draw, seen);
    std::printf(" %016llx", seen.value());
  }
  std::printf("\n");
}
