// The interface of the kernels of one instruction set: plain structs and a table of functions.
//
// Knows: raw memory. Must not know: MLX, threads. This header is included by files that are
// compiled for instruction sets which this machine may lack. Therefore it does not use any part of
// the standard library that could emit code.
#pragma once

#include <cstdint>

namespace mlxrunner {

// The number of rows of a matrix in a panel. A panel is never divided among threads.
inline constexpr std::int64_t kPanelRows = 16;

// The format of a matrix. q4 and q8 are MLX's affine modes. They consist of packed words, and of a
// scale and a bias for each group of a row. A weight is scale * integer + bias. The others are the
// block types of GGUF (block_formats.hpp).
enum class WeightFormat : std::uint8_t {
  f32, bf16, f16, q4, q8,
  ggml_q4_0, ggml_q4_1, ggml_q5_0, ggml_q5_1, ggml_q8_0, ggml_q2_k, ggml_q3_k, ggml_q4_k,
  ggml_q5_k, ggml_q6_k, ggml_iq4_nl, ggml_iq4_xs, ggml_mxfp4
};

// The type of scales and biases.
enum class ScaleType : std::uint8_t { f32, bf16, f16 };

// A matrix [rows, width], stored as consecutive panels of sixteen rows (matmul_float.hpp,
// matmul_quantized.hpp, block_formats.hpp). If it is quantized, width is a multiple of `group` (16,
// 32, 64 or 128). Otherwise group is 0. planes: the number of signed bytes to which the product with
// a quantized matrix rounds an element of x, from 1 to 3. On tiles, the product with a bfloat16
// matrix uses three bfloat16 parts of an element if planes is 3, and otherwise two.
struct Matrix {
  WeightFormat format;
  ScaleType scale_type;
  int group, planes;
  std::int64_t rows, width;
  const void *data, *scales, *biases;

  // Must not be called for the block types of GGUF (block_row_bytes). It is always inlined, because
  // a shared copy could be compiled for an instruction set that this machine lacks.
  [[gnu::always_inline]] std::int64_t row_bytes() const {
    switch (format) {
      case WeightFormat::f32:
        return width * 4;
      case WeightFormat::bf16:
      case WeightFormat::f16:
        return width * 2;
      case WeightFormat::q8:
        return width;
      case WeightFormat::q4:
        return width / 2;
      default:
        return 0;
    }
  }
};

// Rows of x, [count, stride] float32. They are a single row in its original layout, or rows in the
// layout of `Kernels::pack_input` (interleaved, or quantized).
struct PackedRows {
  const float* data;
  std::int64_t count, stride;
};

// The activation of a gated linear unit. gelu: the exact one, with erf.
enum class Activation : std::uint8_t { silu, gelu, gelu_tanh, relu };

// Rotates the first `dims` elements of a row of `width`. It rotates pairs with one element from
// each half or, if traditional, pairs of adjacent elements. The rotated elements are multiplied by
// magnitude.
struct Rotation {
  std::int64_t dims, width;
  bool traditional;
  float magnitude;
};

// The type of the keys and values in a cache.
enum class KVType : std::uint8_t { f32, bf16, f16 };

[[gnu::always_inline]] inline std::int64_t kv_number_bytes(KVType type) {
  return type == KVType::f32 ? 4 : 2;
}

// Consecutive queries of the heads that share one key/value head. Strides are in numbers.
struct AttentionTask {
  const float* q;  // of the group's first head
  std::int64_t q_head, q_step;  // strides between heads and between positions
  std::int64_t queries, group;
  std::int64_t position;  // absolute position of the first query

  // Of the `length` stored positions, the oldest has absolute position `first_position` and is in
  // slot `head_slot`. After slot capacity - 1, positions continue in slot 0.
  KVType kv_type;
  const void *keys, *values;
  std::int64_t key_step, value_step;  // strides between slots
  std::int64_t capacity, head_slot, first_position, length;

  bool causal;                      // a query sees its own and earlier positions only
  std::int64_t window;              // the number of positions that a query sees; 0: all
  std::int64_t key_dim, value_dim;  // sizes of a key and of a value
  float scale, softcap;             // scale > 0; softcap 0: off
  const float* sinks;               // [group] or nullptr

  float* out;
  std::int64_t out_head, out_step;
};

// The positions of one head of a Mamba-2 layer. `row_step` is the stride between positions of x, keys
// and queries, `step_step` of steps and decays.
struct ScanTask {
  std::int64_t length, head_dim, state_size;
  const float *x, *keys, *queries;
  std::int64_t row_step;
  const float *steps, *decays;
  std::int64_t step_step;
  float skip;
  float* state;  // [state_size, head_dim]
  float* out;
  std::int64_t out_step;
};

// The passes over logits check blocks of this size before they look at single numbers.
inline constexpr std::int64_t kSampleBlock = 64;

// The start and the stride of a row's noise, and the unit of its uniform numbers: slightly less than
// 2^-32, so that the largest one is below 1.
struct NoiseKey {
  std::uint32_t base, stride;
};
inline constexpr float kUniformUnit = (1 - 0x1p-24) * 0x1p-32;

struct Kernels {
  const char* name;

  // Whether products with bfloat16 matrices use tiles. Their bits then differ from those of other
  // instruction sets.
  bool bf16_on_tiles;

  // The stride of packed rows if `count` rows of x have to be packed for this matrix, else 0.
  std::int64_t (*packed_input_stride)(const Matrix&, std::int64_t count);

  // Packs rows [from, to) of x [count, width] into out, which has a multiple of `input_block` rows
  // of this stride, aligned to 64 bytes. Blocks are packed independently: from is a multiple of
  // input_block, and so is to, unless it is count.
  std::int64_t (*input_block)(const Matrix&, std::int64_t count);
  void (*pack_input)(const Matrix&, const float* x, std::int64_t count, std::int64_t from,
                     std::int64_t to, float* out);

  // Computes y[m, n] = sum over k of x[m, k] * w[n, k] (+ bias[n] if not null) for n in [begin,
  // end). The rows of y are `ldy` apart. The order of each sum depends only on width and format.
  // begin must be a multiple of 16, and end must be a multiple of 16 or the number of rows.
  // scratch: `matmul_scratch` floats, aligned to 64 bytes.
  void (*matmul)(const Matrix&, PackedRows x, const float* bias, float* y, std::int64_t ldy,
                 std::int64_t begin, std::int64_t end, float* scratch);
  std::int64_t (*matmul_scratch)(const Matrix&);

  // Multiplies x [count, width] by a matrix in the format q4 or q8, by the definition in plain C++
  // (matmul_reference.hpp). The results in y [count, rows] are bit-identical to those of `matmul`.
  void (*multiply_by_reference)(const Matrix&, const float* x, std::int64_t count, float* y,
                                float* scratch);
  std::int64_t (*reference_scratch)(const Matrix&, std::int64_t count);

  // The same for a bfloat16 matrix (matmul_bf16_tiles.hpp), including the last panel. The results
  // equal those of `matmul` only if bf16_on_tiles.
  void (*bf16_tile_reference)(const Matrix&, const float* x, std::int64_t count, float* y,
                              float* scratch);
  std::int64_t (*bf16_tile_reference_scratch)(const Matrix&, std::int64_t count);

  // Converts row n of the matrix to float32, in row-major order.
  void (*dequantize_row)(const Matrix&, std::int64_t n, float* out);

  // Computes out = x / sqrt(mean of squares + eps) (* weight if not null) for one row. out may be
  // x.
  void (*rms_norm)(const float* x, std::int64_t width, const float* weight, float eps, float* out);

  // Computes cosines and sines [half] of position / period. Angles must be below 2^20.
  void (*rope_angles)(float position, const float* periods, std::int64_t half, float* cos,
                      float* sin);
  // out may be x.
  void (*rotate)(const Rotation&, const float* x, const float* cos, const float* sin, float* out);

  // Computes out = activation(gate) * up for n elements. out may be one of the inputs.
  void (*glu)(Activation, const float* gate, const float* up, float* out, std::int64_t n);
  // cap * tanh(x / cap)
  void (*softcap)(const float* x, float cap, std::int64_t n, float* out);

  // Computes out = silu(sum over j of taps[j] * weight[j] (+ bias if not null)) for one position.
  // taps: `width` rows of `channels`, oldest first. weight: [width, channels].
  void (*convolve)(const float* const* taps, std::int64_t width, const float* weight,
                   const float* bias, std::int64_t channels, float* out);

  // Computes state = decay * state + key (step * x)^T and out = query state + skip * x at each
  // position.
  void (*scan)(const ScanTask&);

  // Passes over a row of n logits, see sampling.hpp.
  float (*row_max)(const float* x, std::int64_t n);
  float (*checked_max)(const float* x, std::int64_t n);
  void (*mask)(const float* x, const std::uint32_t* bits, std::int64_t n, float* out);
  float (*scale_and_exp)(const float* x, std::int64_t n, float largest, float temperature,
                         float* scaled, float* mass);
  float (*mass_above)(const float* scaled, const float* mass, std::int64_t n, float edge);
  void (*block_maxima)(const float* x, std::int64_t n, float* maxima);
  std::int64_t (*find_between)(const float* x, std::int64_t n, float low, float high,
                               std::int32_t* found);
  std::int64_t (*draw)(const float* scaled, const float* mass, std::int64_t n, float edge,
                       NoiseKey key);
  std::int64_t (*draw_listed)(const float* scaled, const std::int32_t* tokens, std::int64_t n,
                              float edge, NoiseKey key);

  // Stores n numbers of a new key or value in a cache, rounded to nearest, ties to even.
  void (*store_kv_row)(KVType, const float* x, std::int64_t n, void* out);

  // scratch: `attend_scratch` floats, aligned to 64 bytes.
  void (*attend)(const AttentionTask&, float* scratch);
  std::int64_t (*attend_scratch)(const AttentionTask&);
};

// These functions return nullptr if this machine does not support the instruction set, or if it was
// not compiled.
const Kernels* kernels_avx512_amx_bf16();
const Kernels* kernels_avx512_amx();
const Kernels* kernels_avx512_vnni();
const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_neon_i8mm();
const Kernels* kernels_neon_dot();
const Kernels* kernels_neon();
const Kernels* kernels_scalar();

}  // namespace mlxrunner
