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
  for (int run = 0; run < 8; run++)
    for (int i = 0; i < 32; i++)
      codes[32 * run + i] |= (packed[run / 4 * 32 + i] >> run % 4 * 2 & 3) << shift;
}

// one bit of 256 numbers: eight runs of 32 numbers share 32 bytes
void add_single_bits(const uint8_t* packed, int shift, uint8_t* codes) {
  for (int run = 0; run < 8; run++)
    for (int i = 0; i < 32; i++) codes[32 * run + i] |= (packed[i] >> run & 1) << shift;
}

// 128 bytes, of which `kBytes` contain two runs of as many numbers
template <int kBytes>
void decode_runs(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < 128; i += kBytes, packed += kBytes, codes += 2 * kBytes)
    for (int k = 0; k < kBytes; k++) codes[k] = packed[k] & 15, codes[k + kBytes] = packed[k] >> 4;
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
      decode_runs<32>(raw + (has_high ? 48 : 16), out.codes);
      if (has_high) add_single_bits(raw + 16, 4, out.codes);
      return;
    }
    case WeightFormat::ggml_q6_k:
      decode_runs<64>(raw, out.codes);
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
      add_single_bits(raw, 2, out.codes);
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

// Stores kBits bits of the codes of row n, from bit kFrom on. Returns the place behind the words.
template <int kFrom, int kBits>
std::uint32_t* store_codes(const uint8_t* codes, int numbers, int64_t n, std::uint32_t* out) {
  constexpr int kFours = 8 / kBits;  // fours in a word
  constexpr std::uint32_t kMask = ((1u << kBits) - 1) * 0x01010101u;
  for (int i = 0; i < numbers; i += 4 * kFours, out += kPanelRows) {
    std::uint32_t word = 0;
    for (int k = 0; k < kFours; k++) {
      std::uint32_t four;
      std::memcpy(&four, codes + i + 4 * k, sizeof four);
      word |= (four >> kFrom & kMask) << k * kBits;
    }
    out[n] = word;
  }
  return out;
}

template <int kLow, int kHigh>
void store_spans(const uint8_t* codes, int64_t numbers, int64_t n, std::uint32_t* words) {
  constexpr int kSpan = span_numbers(kHigh);
  for (int64_t k = 0; k < numbers; k += kSpan) {
    words = store_codes<0, kLow>(codes + k, kSpan, n, words);
    if constexpr (kHigh != 0) words = store_codes<kLow, kHigh>(codes + k, kSpan, n, words);
  }
}

void store_chunk(const BlockFormat& f, const DecodedChunk& decoded, int64_t numbers, int64_t n,
                 char* chunk) {
  const ChunkParts parts = chunk_parts(f, numbers);
  auto* words = reinterpret_cast<std::uint32_t*>(chunk);
  if (f.low_bits == 8) store_spans<8, 0>(decoded.codes, numbers, n, words);
  else if (f.low_bits == 2 && f.high_bits == 0) store_spans<2, 0>(decoded.codes, numbers, n, words);
  else if (f.low_bits == 2) store_spans<2, 1>(decoded.codes, numbers, n, words);
  else if (f.high_bits == 0) store_spans<4, 0>(decoded.codes, numbers, n, words);
  else if (f.high_bits == 1) store_spans<4, 1>(decoded.codes, numbers, n, words);
  else store_spans<4, 2>(decoded.codes, numbers, n, words);
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

// raw: the first of `rows` rows, which are `raw_bytes` apart. A chunk of the panel stays in the first
// cache until it has all rows.
void repack_panel(WeightFormat format, const uint8_t* raw, int64_t raw_bytes, int64_t width,
                  int64_t rows, char* panel) {
  const BlockFormat f = block_format(format);
  const BlockSize size = block_size(format);
  DecodedChunk decoded{};
  for (int64_t k = 0; k < width; k += kChunkNumbers) {
    const int64_t numbers = std::min(width - k, kChunkNumbers);
    const int64_t blocks = numbers / size.numbers;
    for (int64_t n = 0; n < rows; n++) {
      const uint8_t* row = raw + n * raw_bytes;
      if (size.numbers == kChunkNumbers) decode_long_block(format, row, decoded);
      else
        for (int i = 0; i < blocks; i++)
          decode_short_block(format, row + i * size.bytes, i, decoded);
      store_chunk(f, decoded, numbers, n, panel);
    }
    raw += blocks * size.bytes;
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
            repack_panel(format, src + (i / panels * rows + first) * raw_bytes, raw_bytes, width,
                         std::min(kPanelRows, rows - first), panel);
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
