#include "repack.hpp"

#include <cstdint>
#include <memory>
#include <utility>

#include "kernels.hpp"
#include "thread_pool.hpp"

namespace mlxrunner {

namespace {

// Moves the first four of eight 4-bit integers to the low nibbles of the four bytes.
std::uint32_t split_nibbles(std::uint32_t word) {
  std::uint32_t out = 0;
  for (int i = 0; i < 8; i++) out |= (word >> 4 * i & 15) << (i % 4 * 8 + i / 4 * 4);
  return out;
}

std::uint32_t join_nibbles(std::uint32_t word) {
  std::uint32_t out = 0;
  for (int i = 0; i < 8; i++) out |= (word >> (i % 4 * 8 + i / 4 * 4) & 15) << 4 * i;
  return out;
}

// The order of the elements of a panel: by columns, or by pairs of columns.
enum class PanelOrder : std::uint8_t { columns, pairs };

// Transposes a panel, or transposes it back if `undo`, and applies `convert` to each element.
template <class T, class F>
void transpose_panel(const T* src, T* dst, std::int64_t rows, std::int64_t width, PanelOrder order,
                     bool undo, F convert) {
  const std::int64_t paired = order == PanelOrder::pairs ? width / 2 * 2 : 0;
  for (std::int64_t r = 0; r < rows; r++)
    for (std::int64_t k = 0; k < width; k++) {
      const std::int64_t row_major = r * width + k,
                         in_panel = k < paired ? (k / 2 * rows + r) * 2 + k % 2 : k * rows + r;
      dst[undo ? row_major : in_panel] = convert(src[undo ? in_panel : row_major]);
    }
}

class RepackPrimitive : public CpuPrimitive {
 public:
  RepackPrimitive(mx::Stream stream, int bits, PanelOrder order, bool undo)
      : CpuPrimitive(stream), bits_(bits), order_(order), undo_(undo) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    const mx::array& a = in[0];
    allocate_aligned(outs[0]);
    if (a.size() == 0) return;
    const std::int64_t outputs = a.shape(-2), width = a.shape(-1);
    const std::int64_t panels = (outputs + kPanelRows - 1) / kPanelRows;
    const std::int64_t count = static_cast<std::int64_t>(a.size()) / (outputs * width) * panels;
    const auto run = [=, bits = bits_, order = order_, undo = undo_](auto* src, auto* dst) {
      ThreadPool::shared().run(count, [=](std::int64_t i) {
        const std::int64_t row = i % panels * kPanelRows,
                           rows = std::min(kPanelRows, outputs - row);
        const std::int64_t offset = (i / panels * outputs + row) * width;
        repack_panel(bits, order, undo, src + offset, dst + offset, rows, width);
      });
    };
    auto& encoder = mx::cpu::get_command_encoder(stream());
    if (a.itemsize() == 4)
      encoder.dispatch([run, src = a.data<std::uint32_t>(), dst = outs[0].data<std::uint32_t>()] {
        run(src, dst);
      });
    else
      encoder.dispatch([run, src = a.data<std::uint16_t>(), dst = outs[0].data<std::uint16_t>()] {
        run(src, dst);
      });
  }

  const char* name() const override { return "mlxrunner::Repack"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  template <class T>
  static void repack_panel(int bits, PanelOrder order, bool undo, const T* src, T* dst,
                           std::int64_t rows, std::int64_t width) {
    if (bits == 4)
      transpose_panel(src, dst, rows, width, order, undo, undo ? join_nibbles : split_nibbles);
    else transpose_panel(src, dst, rows, width, order, undo, [](T number) { return number; });
  }

  int bits_;
  PanelOrder order_;
  bool undo_;
};

mx::array make_repacked(const mx::array& a, int bits, PanelOrder order, bool undo) {
  return mx::array(a.shape(), a.dtype(),
                   std::make_shared<RepackPrimitive>(cpu(), bits, order, undo),
                   std::vector<mx::array>{contiguous_rows(a)});
}

void check_axes(const mx::array& a) {
  if (a.ndim() < 2)
    throw std::invalid_argument("a matrix must have two axes, and a stack more");
}

}  // namespace

mx::array repack(const mx::array& a, int bits, bool undo) {
  check_axes(a);
  if (bits ? (bits != 4 && bits != 8) || a.dtype() != mx::uint32
           : a.itemsize() != 2 && a.itemsize() != 4)
    throw std::invalid_argument("only 4- and 8-bit words and floats can be repacked");
  const bool is_bf16 = a.dtype() == mx::bfloat16;
  return make_repacked(a, bits, is_bf16 ? PanelOrder::pairs : PanelOrder::columns, undo);
}

mx::array repack_scales(const mx::array& a, bool undo) {
  check_axes(a);
  if (a.itemsize() != 2 && a.itemsize() != 4)
    throw std::invalid_argument("scales must be float32, bfloat16 or float16");
  return make_repacked(a, 0, PanelOrder::columns, undo);
}

}  // namespace mlxrunner
