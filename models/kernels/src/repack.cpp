#include "stripped.hpp"

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "kernels.hpp"
#include "pool.hpp"

namespace mlxrunner {

namespace {

struct ForStrip;

// Of eight numbers the first four into the lower halves of the four bytes.
std::uint32_t parted(std::uint32_t word) {
  std::uint32_t out = 0;
  for (int i = 0; i < 8; i++) out |= (word >> 4 * i & 15) << (i % 4 * 8 + i / 4 * 4);
  return out;
}

std::uint32_t joined(std::uint32_t word) {
  std::uint32_t out = 0;
  for (int i = 0; i < 8; i++) out |= (word >> (i % 4 * 8 + i / 4 * 4) & 15) << 4 * i;
  return out;
}

// What becomes of a number on its way: `of` a word, or nothing.
template <class T, class F>
void turn(const T* from, T* into, std::int64_t rows, std::int64_t width, bool back, F of) {
  T* room = reinterpret_cast<T*>(scratch<ForStrip>(static_cast<std::size_t>(rows * width)));
  std::memcpy(room, from, static_cast<std::size_t>(rows * width) * sizeof(T));
  for (std::int64_t r = 0; r < rows; r++)
    for (std::int64_t k = 0; k < width; k++) {
      const std::int64_t natural = r * width + k, beside = k * rows + r;
      into[back ? natural : beside] = of(room[back ? beside : natural]);
    }
}

class StripsPrimitive : public CpuPrimitive {
 public:
  StripsPrimitive(mx::Stream stream, int bits, bool back)
      : CpuPrimitive(stream), bits_(bits), back_(back) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    const mx::array& a = in[0];
    if (a.is_donatable()) outs[0].copy_shared_buffer(a);
    else allocate(outs[0]);
    if (a.size() == 0) return;
    const std::int64_t outputs = a.shape(-2), width = a.shape(-1);
    const std::int64_t each = (outputs + kStrip - 1) / kStrip;
    const std::int64_t count = static_cast<std::int64_t>(a.size()) / (outputs * width) * each;
    const auto work = [=, bits = bits_, back = back_](auto* from, auto* into) {
      Pool::shared().run(count, [=](std::int64_t i) {
        const std::int64_t row = i % each * kStrip, rows = std::min(kStrip, outputs - row);
        const std::int64_t at = (i / each * outputs + row) * width;
        turn_strip(bits, back, from + at, into + at, rows, width);
      });
    };
    auto& encoder = mx::cpu::get_command_encoder(stream());
    if (a.itemsize() == 4)
      encoder.dispatch([work, from = a.data<std::uint32_t>(),
                        into = outs[0].data<std::uint32_t>()] { work(from, into); });
    else
      encoder.dispatch([work, from = a.data<std::uint16_t>(),
                        into = outs[0].data<std::uint16_t>()] { work(from, into); });
  }

  const char* name() const override { return "mlxrunner::Strips"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  template <class T>
  static void turn_strip(int bits, bool back, const T* from, T* into, std::int64_t rows,
                         std::int64_t width) {
    if (bits == 4) turn(from, into, rows, width, back, back ? joined : parted);
    else turn(from, into, rows, width, back, [](T number) { return number; });
  }

  int bits_;
  bool back_;
};

}  // namespace

mx::array strips(const mx::array& a, int bits, bool back) {
  if (a.ndim() < 2) throw std::invalid_argument("a matrix has two axes, a stack more");
  if (bits ? (bits != 4 && bits != 8) || a.dtype() != mx::uint32
           : a.itemsize() != 2 && a.itemsize() != 4)
    throw std::invalid_argument("only 4- and 8-bit words, floats and scales can be repacked");
  return mx::array(a.shape(), a.dtype(), std::make_shared<StripsPrimitive>(cpu(), bits, back),
                   std::vector<mx::array>{lined(a)});
}

}  // namespace mlxrunner
