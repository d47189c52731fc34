#include "block_repack.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "block_formats.hpp"
#include "thread_pool.hpp"

namespace mlxrunner {

namespace {

using std::int64_t;
using std::uint8_t;

struct BlockSize {
  int64_t numbers, bytes;
};

BlockSize block_size(WeightFormat format) {
  using enum WeightFormat;
  switch (format) {
    case ggml_q4_0:
    case ggml_iq4_nl:
      return {32, 18};
    case ggml_q4_1:
      return {32, 20};
    case ggml_q5_0:
      return {32, 22};
    case ggml_q5_1:
      return {32, 24};
    case ggml_q8_0:
      return {32, 34};
    case ggml_mxfp4:
      return {32, 17};
    case ggml_q2_k:
      return {256, 84};
    case ggml_q3_k:
      return {256, 110};
    case ggml_q4_k:
      return {256, 144};
    case ggml_q5_k:
      return {256, 176};
    case ggml_q6_k:
      return {256, 210};
    case ggml_iq4_xs:
      return {256, 136};
    default:
      return {1, 0};
  }
}

// A chunk of one row. small: the bytes of scales and then of minima, float16 numbers as two bytes.
struct DecodedChunk {
  uint8_t codes[kChunkNumbers];
  uint8_t scales[16][2], minima[16][2];
  uint8_t d[2], dmin[2];
};

void copy_half(const uint8_t* from, uint8_t (&to)[2]) { std::memcpy(to, from, 2); }

// sixteen bytes with the low nibbles of numbers 0 to 15 and the high nibbles of 16 to 31
void decode_nibbles(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < 16; i++) codes[i] = packed[i] & 15, codes[i + 16] = packed[i] >> 4;
}

void add_fifth_bits(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < 32; i++) codes[i] |= (packed[i / 8] >> i % 8 & 1) << 4;
}

// The i-th block of 32 numbers of a chunk.
void decode_short_block(WeightFormat format, const uint8_t* raw, int i, DecodedChunk& out) {
  uint8_t* codes = out.codes + 32 * i;
  using enum WeightFormat;
  if (format == ggml_mxfp4) {
    out.scales[i][0] = raw[0];
    return decode_nibbles(raw + 1, codes);
  }
  copy_half(raw, out.scales[i]);
  raw += 2;
  if (format == ggml_q4_1 || format == ggml_q5_1) copy_half(raw, out.minima[i]), raw += 2;
  if (format == ggml_q8_0) {
    for (int k = 0; k < 32; k++) codes[k] = raw[k] ^ 128;
  } else if (format == ggml_q5_0 || format == ggml_q5_1) {
    decode_nibbles(raw + 4, codes);
    add_fifth_bits(raw, codes);
  } else {
    decode_nibbles(raw, codes);
  }
}

// 64 bytes with two bits of 256 numbers: four runs of 32 numbers share 32 bytes
void add_pairs_of_bits(const uint8_t* packed, int shift, uint8_t* codes) {
  for (int i = 0; i < 256; i++)
    codes[i] |= (packed[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << shift;
}

// 128 bytes, of which 32 contain two runs of 32 numbers
void decode_runs(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < 256; i++) codes[i] = packed[i / 64 * 32 + i % 32] >> i % 64 / 32 * 4 & 15;
}

void decode_six_bit_scales(const uint8_t* packed, DecodedChunk& out) {
  for (int j = 0; j < 4; j++) {
    out.scales[j][0] = packed[j] & 63;
    out.minima[j][0] = packed[4 + j] & 63;
    out.scales[4 + j][0] = (packed[8 + j] & 15) | packed[j] >> 6 << 4;
    out.minima[4 + j][0] = packed[8 + j] >> 4 | packed[4 + j] >> 6 << 4;
  }
}

void decode_long_block(WeightFormat format, const uint8_t* raw, DecodedChunk& out) {
  std::memset(out.codes, 0, sizeof out.codes);
  switch (format) {
    case WeightFormat::ggml_q4_k:
    case WeightFormat::ggml_q5_k: {
      const bool has_high = format == WeightFormat::ggml_q5_k;
      copy_half(raw, out.d), copy_half(raw + 2, out.dmin);
      decode_six_bit_scales(raw + 4, out);
      decode_runs(raw + (has_high ? 48 : 16), out.codes);
      for (int i = 0; has_high && i < 256; i++)
        out.codes[i] |= (raw[16 + i % 32] >> i / 32 & 1) << 4;
      return;
    }
    case WeightFormat::ggml_q6_k:
      for (int i = 0; i < 256; i++)  // in each half, the low nibbles of 64 bytes, then the high ones
        out.codes[i] = raw[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15;
      add_pairs_of_bits(raw + 128, 4, out.codes);
      for (int j = 0; j < 16; j++) out.scales[j][0] = raw[192 + j];
      return copy_half(raw + 208, out.d);
    case WeightFormat::ggml_q2_k:
      for (int j = 0; j < 16; j++) out.scales[j][0] = raw[j];
      add_pairs_of_bits(raw + 16, 0, out.codes);
      copy_half(raw + 80, out.d);
      return copy_half(raw + 82, out.dmin);
    case WeightFormat::ggml_q3_k:
      add_pairs_of_bits(raw + 32, 0, out.codes);
      for (int i = 0; i < 256; i++) out.codes[i] |= (raw[i % 32] >> i / 32 & 1) << 2;
      for (int j = 0; j < 16; j++) {
        const int low = raw[96 + j % 8] >> j / 8 * 4 & 15;
        const int high = raw[104 + j % 4] >> j / 4 * 2 & 3;
        out.scales[j][0] = static_cast<uint8_t>((low | high << 4) - 32);
      }
      return copy_half(raw + 108, out.d);
    default: {  // iq4_xs
      copy_half(raw, out.d);
      const int high = raw[2] | raw[3] << 8;
      for (int j = 0; j < 8; j++) {
        const int low = raw[4 + j / 2] >> j % 2 * 4 & 15;
        out.scales[j][0] = static_cast<uint8_t>((low | (high >> 2 * j & 3) << 4) - 32);
        decode_nibbles(raw + 8 + 16 * j, out.codes + 32 * j);
      }
    }
  }
}

// Stores `bits` bits of the codes of row n, from bit `from` on. Returns the place behind the words.
std::uint32_t* store_codes(const uint8_t* codes, int numbers, int from, int bits, int64_t n,
                           std::uint32_t* out) {
  const int per_word = 32 / bits;
  for (int i = 0; i < numbers; i += per_word, out += kPanelRows) {
    std::uint32_t word = 0;
    for (int k = 0; k < per_word; k++)
      word |= (codes[i + k] >> from & ((1u << bits) - 1)) << (k % 4 * 8 + k / 4 * bits);
    out[n] = word;
  }
  return out;
}

void store_chunk(const BlockFormat& f, const DecodedChunk& decoded, int64_t numbers, int64_t n,
                 char* chunk) {
  const ChunkParts parts = chunk_parts(f, numbers);
  auto* words = reinterpret_cast<std::uint32_t*>(chunk);
  const int span = span_numbers(f.high_bits);
  for (int64_t k = 0; k < numbers; k += span) {
    words = store_codes(decoded.codes + k, span, 0, f.low_bits, n, words);
    if (f.high_bits)
      words = store_codes(decoded.codes + k, span, f.low_bits, f.high_bits, n, words);
  }
  char* small = chunk + parts.codes * kPanelRows;
  const int64_t groups = numbers / f.group;
  const bool pair = f.scales == BlockScales::f16_pair || f.scales == BlockScales::k_pair;
  const int64_t size = parts.scales / (groups * (1 + pair));
  for (int64_t g = 0; g < groups; g++) {
    std::memcpy(small + (g * kPanelRows + n) * size, decoded.scales[g], size);
    if (pair)
      std::memcpy(small + ((groups + g) * kPanelRows + n) * size, decoded.minima[g], size);
  }
  char* supers = small + parts.scales * kPanelRows;
  if (parts.supers) std::memcpy(supers + 2 * n, decoded.d, 2);
  if (parts.supers == 4) std::memcpy(supers + 2 * (kPanelRows + n), decoded.dmin, 2);
}

void repack_row(WeightFormat format, const uint8_t* raw, int64_t width, int64_t n, char* panel) {
  const BlockFormat f = block_format(format);
  const BlockSize size = block_size(format);
  DecodedChunk decoded{};
  for (int64_t k = 0; k < width; k += kChunkNumbers) {
    const int64_t numbers = std::min(width - k, kChunkNumbers);
    if (size.numbers == kChunkNumbers) {
      decode_long_block(format, raw, decoded);
      raw += size.bytes;
    } else {
      for (int i = 0; i < numbers / size.numbers; i++, raw += size.bytes)
        decode_short_block(format, raw, i, decoded);
    }
    store_chunk(f, decoded, numbers, n, panel);
    panel += chunk_parts(f, numbers).bytes() * kPanelRows;
  }
}

class RepackBlocksPrimitive : public CpuPrimitive {
 public:
  RepackBlocksPrimitive(mx::Stream stream, WeightFormat format)
      : CpuPrimitive(stream), format_(format) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate_aligned(outs[0]);
    const int64_t rows = in[0].shape(-2), raw_bytes = in[0].shape(-1),
                  row_bytes = outs[0].shape(-1);
    const int64_t width = count_block_weights(format_, raw_bytes);
    const int64_t panels = outs[0].shape(-2) / kPanelRows;
    const int64_t count =
        static_cast<int64_t>(outs[0].size()) / (row_bytes * kPanelRows);  // in all matrices
    mx::cpu::get_command_encoder(stream()).dispatch(
        [=, format = format_, src = in[0].data<uint8_t>(), dst = outs[0].data<char>()] {
          ThreadPool::shared().run(count, [=](int64_t i) {
            const int64_t first = i % panels * kPanelRows;
            char* panel = dst + i * kPanelRows * row_bytes;
            if (rows - first < kPanelRows) std::memset(panel, 0, kPanelRows * row_bytes);
            for (int64_t n = 0; n < std::min(kPanelRows, rows - first); n++)
              repack_row(format, src + (i / panels * rows + first + n) * raw_bytes, width, n, panel);
          });
        });
  }

  const char* name() const override { return "mlxrunner::RepackBlocks"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  WeightFormat format_;
};

}  // namespace

WeightFormat parse_block_type(int type_id) {
  using enum WeightFormat;
  switch (type_id) {
    case 2:
      return ggml_q4_0;
    case 3:
      return ggml_q4_1;
    case 6:
      return ggml_q5_0;
    case 7:
      return ggml_q5_1;
    case 8:
      return ggml_q8_0;
    case 10:
      return ggml_q2_k;
    case 11:
      return ggml_q3_k;
    case 12:
      return ggml_q4_k;
    case 13:
      return ggml_q5_k;
    case 14:
      return ggml_q6_k;
    case 20:
      return ggml_iq4_nl;
    case 23:
      return ggml_iq4_xs;
    case 39:
      return ggml_mxfp4;
    default:
      throw std::invalid_argument("no block type has the number " + std::to_string(type_id));
  }
}

std::int64_t count_block_weights(WeightFormat format, std::int64_t bytes) {
  const BlockSize size = block_size(format);
  if (bytes % size.bytes) throw std::invalid_argument("a row must consist of whole blocks");
  return bytes / size.bytes * size.numbers;
}

mx::array repack_blocks(const mx::array& raw, int type_id) {
  const WeightFormat format = parse_block_type(type_id);
  require(raw.ndim() >= 2 && raw.dtype() == mx::uint8, "blocks must be uint8 [..., out, bytes]");
  const std::int64_t width = count_block_weights(format, raw.shape(-1));
  mx::Shape shape = raw.shape();
  shape.end()[-2] = static_cast<int>((shape.end()[-2] + kPanelRows - 1) / kPanelRows * kPanelRows);
  shape.back() = static_cast<int>(block_row_bytes(format, width));
  return mx::array(std::move(shape), mx::uint8, std::make_shared<RepackBlocksPrimitive>(cpu(), format),
                   std::vector<mx::array>{contiguous_rows(raw)});
}

}  // namespace mlxrunner
