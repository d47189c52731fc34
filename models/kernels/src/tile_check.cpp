#include "tile_check.hpp"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mlxrunner {

namespace {

// the exit status of the child process after a difference
constexpr int kDifferent = 1;

constexpr std::int64_t kOutputs = 53, kMaxInputs = 384, kMaxCount = 40;
constexpr std::int64_t kCounts[] = {1, 7, 16, 33, kMaxCount};

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;

Buffer allocate_floats(std::int64_t count) {
  const auto bytes = static_cast<std::size_t>((count * 4 + 63) / 64 * 64);
  return Buffer(static_cast<float*>(std::aligned_alloc(64, bytes)));
}

std::uint32_t next_random(std::uint32_t& state) {
  state = state * 1664525 + 1013904223;
  return state >> 8;
}

// The memory of all products, allocated before the fork, because a child of a process with several
// threads must not allocate memory.
class Products {
 public:
  explicit Products(const Kernels& tested) : tested_(tested) {
    std::uint32_t state = 1;
    for (std::uint32_t& word : words_) word = next_random(state) * 257;
    for (float& scale : scales_) scale = static_cast<float>(next_random(state) % 1000) / 1e5f;
    // bfloat16 numbers of a limited size
    for (std::uint16_t& number : halves_)
      number = static_cast<std::uint16_t>((next_random(state) & 0x8000) | (0x3a00 + next_random(state) % 0x580));
    for (float& value : x_) value = static_cast<float>(next_random(state) % 2000) / 999 - 1;
    std::int64_t packed = 1, scratch = 1, reference = 1;
    for (const Matrix& w : matrices()) {
      for (const std::int64_t count : kCounts) packed = std::max(packed, packed_floats(w, count));
      scratch = std::max(scratch, tested.matmul_scratch(w));
      const auto find_size =
          is_bf16(w) ? tested.bf16_tile_reference_scratch : tested.reference_scratch;
      reference = std::max(reference, find_size(w, kMaxCount));
    }
    packed_ = allocate_floats(packed), scratch_ = allocate_floats(scratch);
    reference_ = allocate_floats(reference);
  }

  bool are_equal() {
    for (const Matrix& w : all_)
      for (const std::int64_t count : kCounts)
        if (!is_equal(w, count)) return false;
    return true;
  }

 private:
  const std::vector<Matrix>& matrices() {
    for (const auto format : {WeightFormat::q4, WeightFormat::q8})
      for (const int planes : {1, 2, 3})
        for (const int group : {64, 128})
          all_.push_back({format, ScaleType::f32, group, planes, kOutputs, 3 * group,
                          words_.data(), scales_.data(), scales_.data() + 7});
    if (tested_.bf16_on_tiles)
      for (const int planes : {2, 3})
        for (const std::int64_t width : {64, 161, 384})
          for (const std::int64_t rows : {kOutputs, kOutputs - 5})
            all_.push_back({WeightFormat::bf16, ScaleType::f32, 0, planes, rows, width,
                            halves_.data(), nullptr, nullptr});
    return all_;
  }

  static bool is_bf16(const Matrix& w) { return w.format == WeightFormat::bf16; }

  std::int64_t packed_floats(const Matrix& w, std::int64_t count) {
    const std::int64_t block = tested_.input_block(w, count);
    return (count + block - 1) / block * block * tested_.packed_input_stride(w, count);
  }

  bool is_equal(const Matrix& w, std::int64_t count) {
    const std::int64_t stride = tested_.packed_input_stride(w, count);
    tested_.pack_input(w, x_.data(), count, 0, count, packed_.get());
    tested_.matmul(w, {packed_.get(), count, stride}, nullptr, found_.data(), w.rows, 0, w.rows,
                   scratch_.get());
    const auto multiply = is_bf16(w) ? tested_.bf16_tile_reference : tested_.multiply_by_reference;
    multiply(w, x_.data(), count, expected_.data(), reference_.get());
    return !std::memcmp(found_.data(), expected_.data(),
                        static_cast<std::size_t>(count * w.rows) * sizeof(float));
  }

  const Kernels& tested_;
  std::vector<Matrix> all_;
  std::vector<std::uint32_t> words_ = std::vector<std::uint32_t>(kOutputs * kMaxInputs / 4);
  std::vector<std::uint16_t> halves_ = std::vector<std::uint16_t>(kOutputs * kMaxInputs);
  std::vector<float> scales_ = std::vector<float>(kOutputs * kMaxInputs / 64 + 7),
                     x_ = std::vector<float>(kMaxCount * kMaxInputs),
                     found_ = std::vector<float>(kMaxCount * kOutputs),
                     expected_ = std::vector<float>(kMaxCount * kOutputs);
  Buffer packed_, scratch_, reference_;
};

[[noreturn]] void run_child(Products& products, unsigned max_seconds) {
  // no core file, and no handlers of the parent, such as Python's faulthandler
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  sigset_t all;
  sigfillset(&all);
  for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGALRM})
    std::signal(signal, SIG_DFL);
  sigprocmask(SIG_UNBLOCK, &all, nullptr);
  alarm(max_seconds);
  _exit(products.are_equal() ? 0 : kDifferent);
}

}  // namespace

std::string find_tile_obstacle() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxTile) == 0 || (d & kAmxInt8) == 0)
    return "the processor has no AMX";
  // ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA; the kernel grants it to the whole process
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0)
    return std::string("the system does not permit AMX: ") + std::strerror(errno);
  return "";
#else
  return "the processor has no AMX";
#endif
}

std::string find_bf16_tile_obstacle() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned kAmxBf16 = 1u << 22;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAmxBf16) != 0) return "";
#endif
  return "the processor has no AMX-BF16";
}

std::string find_tile_fault(const Kernels& tested, unsigned max_seconds) {
  Products products(tested);
  const pid_t child = fork();
  if (child < 0) return std::string("it cannot start a process: ") + std::strerror(errno);
  if (child == 0) run_child(products, max_seconds);
  int status = 0;
  pid_t ended;
  while ((ended = waitpid(child, &status, 0)) < 0 && errno == EINTR) {
  }
  if (ended < 0) return std::string("its process cannot be watched: ") + std::strerror(errno);
  if (WIFSIGNALED(status))
    return WTERMSIG(status) == SIGALRM
               ? "it did not end"
               : "its process died of signal " + std::to_string(WTERMSIG(status));
  return WEXITSTATUS(status) == 0 ? "" : "a product differs from the reference";
}

}  // namespace mlxrunner
