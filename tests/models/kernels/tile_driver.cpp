// Runs the known-answer test with right and wrong kernels: `tile_driver
// right|wrong|wrong-bf16|illegal|invalid|endless`. Compares the kernels for AMX with those for VNNI,
// and those for AMX-BF16 with the reference: `tile_driver amx|amx-bf16`, natively if possible, and
// `tile_driver emulated|emulated-bf16`.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "amx_emulator.hpp"
#include "tile_check.hpp"

using namespace mlxrunner;

namespace {


float* allocate(std::size_t count) {
  return static_cast<float*>(std::aligned_alloc(64, (count * 4 + 63) / 64 * 64));
}

// Kernels whose `matmul` uses the reference, or has a fault.
void copy_x(const Matrix& w, const float* x, std::int64_t, std::int64_t from, std::int64_t to,
            float* out) {
  std::memcpy(out + from * w.width, x + from * w.width,
              static_cast<std::size_t>((to - from) * w.width) * 4);
}
std::int64_t one_row(const Matrix&, std::int64_t) { return 1; }
std::int64_t plain_stride(const Matrix& w, std::int64_t) { return w.width; }
bool is_bf16(const Matrix& w) { return w.format == WeightFormat::bf16; }
std::int64_t scratch_size(const Matrix& w) {
  const Kernels& k = *kernels_scalar();
  return is_bf16(w) ? k.bf16_tile_reference_scratch(w, 40) : k.reference_scratch(w, 40);
}
void multiply_right(const Matrix& w, PackedRows x, const float*, float* y, std::int64_t,
                    std::int64_t, std::int64_t, float* scratch) {
  const Kernels& k = *kernels_scalar();
  (is_bf16(w) ? k.bf16_tile_reference : k.multiply_by_reference)(w, x.data, x.count, y, scratch);
}
void multiply_wrong(const Matrix& w, PackedRows x, const float* bias, float* y, std::int64_t ldy,
                    std::int64_t begin, std::int64_t end, float* scratch) {
  multiply_right(w, x, bias, y, ldy, begin, end, scratch);
  if (x.count < 33 || (w.group != 128 && !is_bf16(w))) return;
  std::uint32_t bits;
  std::memcpy(&bits, y + 32 * ldy + 5, 4);
  bits ^= 1;
  std::memcpy(y + 32 * ldy + 5, &bits, 4);
}
void multiply_wrong_bf16(const Matrix& w, PackedRows x, const float* bias, float* y, std::int64_t ldy,
                         std::int64_t begin, std::int64_t end, float* scratch) {
  (is_bf16(w) ? multiply_wrong : multiply_right)(w, x, bias, y, ldy, begin, end, scratch);
}
void multiply_illegal(const Matrix&, PackedRows, const float*, float*, std::int64_t, std::int64_t,
                      std::int64_t, float*) {
  asm volatile("ud2");
}
void multiply_invalid(const Matrix&, PackedRows, const float*, float*, std::int64_t, std::int64_t,
                      std::int64_t, float*) {
  *reinterpret_cast<volatile int*>(8) = 1;
}
void multiply_endless(const Matrix&, PackedRows, const float*, float*, std::int64_t, std::int64_t,
                      std::int64_t, float*) {
  for (;;) asm volatile("");
}

// A handler of the parent process must not run in the child.
void report_signal(int) {
  std::printf("a handler ran\n");
  std::fflush(stdout);
  _exit(4);
}

int check_fault(const std::string& action) {
  for (int signal : {SIGILL, SIGSEGV, SIGALRM}) std::signal(signal, report_signal);
  Kernels tested = *kernels_scalar();
  tested.packed_input_stride = plain_stride, tested.input_block = one_row;
  tested.pack_input = copy_x;
  tested.matmul_scratch = scratch_size;
  tested.bf16_on_tiles = action == "right" || action == "wrong-bf16";
  tested.matmul = action == "right"        ? multiply_right
                  : action == "wrong"      ? multiply_wrong
                  : action == "wrong-bf16" ? multiply_wrong_bf16
                  : action == "illegal"    ? multiply_illegal
                  : action == "invalid"    ? multiply_invalid
                                           : multiply_endless;
  std::printf("%s\n", find_tile_fault(tested, 2).c_str());
  return 0;
}

std::vector<float> multiply(const Kernels& k, const Matrix& w, const std::vector<float>& x,
                            std::int64_t count, const float* bias) {
  const std::int64_t stride = k.packed_input_stride(w, count), block = k.input_block(w, count),
                     whole = (count + block - 1) / block * block, part = whole / block / 2 * block;
  float* packed = allocate(static_cast<std::size_t>(whole * stride));
  float* scratch = allocate(static_cast<std::size_t>(k.matmul_scratch(w)) + 16);
  // two threads' parts
  k.pack_input(w, x.data(), count, 0, part, packed);
  k.pack_input(w, x.data(), count, part, count, packed);
  std::vector<float> y(static_cast<std::size_t>(count * w.rows));
  const std::int64_t middle = w.rows / 32 * 16;
  k.matmul(w, {packed, count, stride}, bias, y.data(), w.rows, 0, middle, scratch);
  k.matmul(w, {packed, count, stride}, bias, y.data(), w.rows, middle, w.rows, scratch);
  std::free(packed), std::free(scratch);
  return y;
}

int compare_bf16(bool emulate) {
  const Kernels* amx = kernels_avx512_amx_bf16();
  if (!amx) return std::printf("the processor has no AVX-512 with VNNI\n"), 77;
  const bool native =
      !emulate && find_tile_obstacle().empty() && find_bf16_tile_obstacle().empty();
  if (!native) AmxEmulator::install();
  std::srand(1);
  for (int planes : {2, 3})
    for (std::int64_t width : {1, 32, 64, 161, 1100})
      for (std::int64_t rows : {16, 48, 71, 300})
        for (std::int64_t count : {1, 6, 15, 16, 17, 33, 64, 129}) {
          if (!native && width * rows > 60000) continue;  // the emulation is slow
          std::vector<std::uint16_t> halves(static_cast<std::size_t>(rows * width));
          std::vector<float> x(static_cast<std::size_t>(count * width)),
              bias(static_cast<std::size_t>(rows), 0), expected(static_cast<std::size_t>(count * rows));
          for (auto& one : halves)  // numbers between 2^-17 and 1 of any sign, and denormal ones
            one = static_cast<std::uint16_t>(
                (std::rand() & 0x8000) | (std::rand() % 64 ? 0x3700 + std::rand() % 0x880 : 5));
          for (float& one : x) one = static_cast<float>(std::rand() % 2000001 - 1000000) / 777777;
          for (std::size_t i = 0; i < x.size(); i += 37) x[i] *= 0x1p-140f;
          const Matrix w{WeightFormat::bf16, ScaleType::f32, 0, planes, rows, width,
                         halves.data(), nullptr, nullptr};
          const auto found = multiply(*amx, w, x, count, bias.data());
          float* scratch = allocate(static_cast<std::size_t>(amx->bf16_tile_reference_scratch(w, count)));
          amx->bf16_tile_reference(w, x.data(), count, expected.data(), scratch);
          std::free(scratch);
          if (found != expected)
            return std::printf("different: %ld rows\n", static_cast<long>(count)), 1;
          if (AmxEmulator::in_use) return std::printf("tiles are not released\n"), 1;
          if (!native && !AmxEmulator::count) return std::printf("tiles are not used\n"), 1;
        }
  std::printf("equal, %s\n", native ? "native" : "emulated");
  return 0;
}

int compare_amx(bool emulate) {
  const Kernels *amx = kernels_avx512_amx(), *vnni = kernels_avx512_vnni();
  if (!amx) return std::printf("the processor has no AVX-512 with VNNI\n"), 77;
  const bool native = !emulate && find_tile_obstacle().empty();
  if (!native) AmxEmulator::install();
  std::srand(1);
  // outputs and groups: with less and more than a block of panels, and than a block of groups
  constexpr std::int64_t kShapes[][2] = {{16, 3}, {48, 9}, {71, 3}, {300, 17}};
  for (WeightFormat format : {WeightFormat::q4, WeightFormat::q8})
    for (int planes : {1, 2, 3})
      for (int group : {32, 64, 128})
        for (const auto& [rows, groups] : kShapes)
          for (std::int64_t count : {1, 6, 7, 8, 12, 15, 16, 17, 21, 33, 130}) {
            if (groups == 17 && count != 7 && count != 33) continue;  // slow if emulated
            const std::int64_t width = groups * group;
            std::vector<std::uint32_t> words(static_cast<std::size_t>(rows * width / 4));
            std::vector<float> scales(static_cast<std::size_t>(rows * groups)),
                biases(scales.size()),
                x(static_cast<std::size_t>(count * width)), bias(static_cast<std::size_t>(rows));
            for (auto& one : words) one = static_cast<std::uint32_t>(std::rand()) * 3;
            for (auto* all : {&scales, &biases, &x, &bias})
              for (float& one : *all) one = static_cast<float>(std::rand() % 2001 - 1000) / 777;
            const Matrix w{format, ScaleType::f32, group, planes, rows, width,
                           words.data(), scales.data(), biases.data()};
            const long before = AmxEmulator::count;
            const auto found = multiply(*amx, w, x, count, bias.data());
            const bool used = AmxEmulator::count > before;
            if (found != multiply(*vnni, w, x, count, bias.data()))
              return std::printf("different: %ld rows\n", static_cast<long>(count)), 1;
            if (AmxEmulator::in_use) return std::printf("tiles are not released\n"), 1;
            if (!native && used != (group != 32 && count >= 7))
              return std::printf("tiles used: %d\n", used), 1;
          }
  std::printf("equal, %s\n", native ? "native" : "emulated");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string action = argv[1];
  if (action == "amx" || action == "emulated") return compare_amx(action == "emulated");
  if (action == "amx-bf16" || action == "emulated-bf16")
    return compare_bf16(action == "emulated-bf16");
  return check_fault(action);
}
