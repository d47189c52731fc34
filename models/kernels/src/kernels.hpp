// What the files of one instruction set offer to everybody else: plain structs and a table of
// functions.
//
// Knows: raw memory. Must not know: MLX, threads. Included by files that are compiled for
// instruction sets which this machine may lack, so there is nothing of the standard library in it
// that could leave code behind.
#pragma once

#include <cstdint>

namespace mlxrunner {

// Rows of a matrix that lie side by side, and are never divided among threads.
inline constexpr std::int64_t kStrip = 16;

// How a number of a matrix lies in memory. q4 and q8 are MLX's affine modes: packed words, and for
// each group of a row a scale and a bias; a weight is scale * number + bias.
enum class Weight : std::uint8_t { f32, bf16, f16, q4, q8 };

// The type of scales and biases.
enum class Float : std::uint8_t { f32, bf16, f16 };

// [rows, width], in strips of sixteen rows (plain.hpp, packed.hpp), one behind the other. width is a
// multiple of `group` (32, 64 or 128) where numbers are packed; else group is 0.
struct Matrix {
  Weight weight;
  Float scale;
  int group;
  std::int64_t rows, width;
  const void *data, *scales, *biases;

  // part of its caller everywhere: compiled once, it might be for a machine that this is not
  [[gnu::always_inline]] std::int64_t row_bytes() const {
    switch (weight) {
      case Weight::f32:
        return width * 4;
      case Weight::bf16:
      case Weight::f16:
        return width * 2;
      case Weight::q8:
        return width;
      case Weight::q4:
        return width / 2;
    }
    return 0;
  }
};

// Rows of x, [count, stride] float32: one as it came, or as `Kernels::arrange` leaves them, so many
// of them side by side, or in whole numbers.
struct Rows {
  const float* data;
  std::int64_t count, stride;
};

// What a gate does to the first of its two inputs. gelu: with erf.
enum class Activation : std::uint8_t { silu, gelu, gelu_tanh, relu };

// Rotates the first `dims` of a row of `width`: halves against each other, or, if traditional,
// neighbours. They are multiplied with magnitude.
struct Rotation {
  std::int64_t dims, width;
  bool traditional;
  float magnitude;
};

// Some queries, one after the other, of the heads that share one key/value head. Distances are in
// numbers.
struct Attending {
  const float* q;  // of the group's first head
  std::int64_t q_head, q_step;  // between heads, between positions
  std::int64_t queries, group;
  std::int64_t position;  // absolute, of the first query

  // Of the `length` positions that are there, the oldest stands at absolute position `first` and in
  // slot `head`; slots go on at 0 behind `capacity`.
  const float *keys, *values;
  std::int64_t key_step, value_step;  // between slots
  std::int64_t capacity, head, first, length;

  bool causal;          // a query sees its own position and those before
  std::int64_t window;  // only so many of them; 0: all
  std::int64_t depth, width;  // of a key, of a value
  float scale, softcap;       // scale > 0; softcap 0: none
  const float* sinks;         // [group] or nullptr

  float* out;
  std::int64_t out_head, out_step;
};

struct Kernels {
  const char* name;

  // Whether so many rows of x have to be arranged before they meet this matrix: how far apart the
  // arranged ones lie, or 0.
  std::int64_t (*arranged_stride)(const Matrix&, std::int64_t count);

  // x [count, width] -> out [count, stride]. It may be done in parts, each but the last of a multiple
  // of `block` rows.
  std::int64_t block;
  void (*arrange)(const Matrix&, const float* x, std::int64_t count, float* out,
                  std::int64_t stride);

  // y[m, n] = sum over k of x[m, k] * w[n, k] (+ bias[n] where there is one) for n in [begin, end);
  // y's rows lie `ldy` apart. Each sum is made in an order that depends on width and format alone.
  // begin and end are multiples of 16, or behind the last row. scratch: `product_scratch` floats,
  // aligned to 64 bytes.
  void (*product)(const Matrix&, Rows x, const float* bias, float* y, std::int64_t ldy,
                  std::int64_t begin, std::int64_t end, float* scratch);
  std::int64_t (*product_scratch)(const Matrix&);

  // Row n of the matrix as float32, in its natural order.
  void (*expand)(const Matrix&, std::int64_t n, float* out);

  // out = x / sqrt(mean of squares + eps) (* weight where there is one), a row. out may be x.
  void (*rms_norm)(const float* x, std::int64_t width, const float* weight, float eps, float* out);

  // Cosines and sines [half] of position / period; angles below 2^20.
  void (*angles)(float position, const float* periods, std::int64_t half, float* cos, float* sin);
  // out may be x.
  void (*rotate)(const Rotation&, const float* x, const float* cos, const float* sin, float* out);

  // out = activation(gate) * up, each of n by itself. out may be one of the two.
  void (*gate)(Activation, const float* gate, const float* up, float* out, std::int64_t n);

  // scratch: `attend_scratch` floats, aligned to 64 bytes.
  void (*attend)(const Attending&, float* scratch);
  std::int64_t (*attend_scratch)(const Attending&);
};

// nullptr where this machine, or this build, has not got it.
const Kernels* kernels_avx512_vnni();
const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_neon();
const Kernels* kernels_scalar();

}  // namespace mlxrunner
