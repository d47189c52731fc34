// The peak performance of this processor: one line of JSON per figure.
//
//     c++ -O3 -march=native -pthread cpu_limits.cpp -o cpu_limits && ./cpu_limits THREADS...
//
// Read bandwidth of memory, and multiplications and additions per second in registers: of
// float32, of bytes (VNNI, NEON's dot product), and of tiles (Intel AMX) of bytes and of bfloat16.
// An instruction that the compiler does not target with -march=native is skipped. Figures are
// medians of rounds, of all threads together.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kRounds = 5;
constexpr double kSeconds = 0.1;
// of all threads: larger than caches
constexpr std::size_t kMemory = std::size_t{1} << 30;

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

void use_cpu(int index) {
  cpu_set_t allowed, one;
  CPU_ZERO(&one);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &allowed) && index-- == 0) CPU_SET(cpu, &one);
  if (CPU_COUNT(&one) == 1) sched_setaffinity(0, sizeof one, &one);
}

// Runs `work` until the time is up, and returns the sum of its results per second.
double measure_rate(const std::function<double()>& work) {
  const double begun = now();
  double amount = 0, passed = 0;
  while (passed < kSeconds) {
    amount += work();
    passed = now() - begun;
  }
  return amount / passed;
}

// work: of the thread with this index, returns bytes or operations.
void report(const char* name, const char* instruction, const char* unit, int threads,
            const std::function<double(int)>& work) {
  std::vector<double> rates;
  for (int round = 0; round < kRounds; round++) {
    std::vector<double> found(threads);
    std::barrier<> start(threads);
    std::vector<std::thread> all;
    for (int i = 0; i < threads; i++)
      all.emplace_back([&, i] {
        use_cpu(i);
        work(i);
        start.arrive_and_wait();
        found[i] = measure_rate([&] { return work(i); });
      });
    for (std::thread& one : all) one.join();
    double sum = 0;
    for (double rate : found) sum += rate;
    rates.push_back(sum / 1e9);
  }
  std::sort(rates.begin(), rates.end());
  std::printf(
      "{\"name\": \"%s\", \"instruction\": \"%s\", \"unit\": \"%s\", \"threads\": %d, "
      "\"median\": %.1f, \"least\": %.1f, \"most\": %.1f}\n",
      name, instruction, unit, threads, rates[kRounds / 2], rates.front(), rates.back());
  std::fflush(stdout);
}

typedef std::int64_t Line __attribute__((vector_size(64)));

double read_memory(const char* from, std::size_t bytes) {
  Line a{}, b{}, c{}, d{};
  for (std::size_t i = 0; i < bytes; i += 256) {
    for (std::size_t line = 0; line < 256; line += 64) __builtin_prefetch(from + i + 4096 + line);
    const Line* at = reinterpret_cast<const Line*>(from + i);
    a ^= at[0], b ^= at[1], c ^= at[2], d ^= at[3];
  }
  a ^= b ^ c ^ d;
  asm volatile("" ::"r"(a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7]));
  return static_cast<double>(bytes);
}

#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
constexpr long kRepeats = 1'000'000;

// A loop of twelve independent instructions on registers of one type.
#define DECLARE(i) Register sum##i{};
#define KEEP(i) asm volatile("" : "+" REGISTER(sum##i));
#define PEAK(name, instruction, operations)                            \
  double name() {                                                      \
    Register x{};                                                      \
    TWELVE(DECLARE)                                                    \
    for (long n = 0; n < kRepeats; n++) { TWELVE(instruction) }        \
    TWELVE(KEEP)                                                       \
    return 12.0 * kRepeats * (operations);                             \
  }

#if defined(__AVX512F__)
typedef float Register __attribute__((vector_size(64)));
#define REGISTER "v"
#define FMA(i) asm volatile("vfmadd231ps %1, %1, %0" : "+v"(sum##i) : "v"(x));
#define DOT(i) asm volatile("vpdpbusd %1, %1, %0" : "+v"(sum##i) : "v"(x));
#define FMA_NAME "AVX-512 FMA"
#define DOT_NAME "AVX-512 VNNI"
#define HAS_FMA 1
#if defined(__AVX512VNNI__)
#define HAS_DOT 1
#endif
#elif defined(__FMA__)
typedef float Register __attribute__((vector_size(32)));
#define REGISTER "x"
#define FMA(i) asm volatile("vfmadd231ps %1, %1, %0" : "+x"(sum##i) : "x"(x));
#define DOT(i) asm volatile("%{vex%} vpdpbusd %1, %1, %0" : "+x"(sum##i) : "x"(x));
#define FMA_NAME "AVX2 FMA"
#define DOT_NAME "AVX-VNNI"
#define HAS_FMA 1
#if defined(__AVXVNNI__)
#define HAS_DOT 1
#endif
#elif defined(__aarch64__)
typedef float Register __attribute__((vector_size(16)));
#define REGISTER "w"
#define FMA(i) asm volatile("fmla %0.4s, %1.4s, %1.4s" : "+w"(sum##i) : "w"(x));
#define DOT(i) asm volatile("sdot %0.4s, %1.16b, %1.16b" : "+w"(sum##i) : "w"(x));
#define FMA_NAME "NEON FMA"
#define DOT_NAME "NEON dot product"
#define HAS_FMA 1
#if defined(__ARM_FEATURE_DOTPROD)
#define HAS_DOT 1
#endif
#endif

#if defined(HAS_FMA)
// a multiplication and an addition for each four bytes of a register
PEAK(multiply_floats, FMA, sizeof(Register) / 4 * 2)
#endif
#if defined(HAS_DOT)
// and for each byte
PEAK(multiply_bytes, DOT, sizeof(Register) * 2)
#endif

#if defined(__AMX_INT8__)
constexpr int kRequestPermission = 0x1023, kTileData = 18;

bool may_use_tiles() { return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0; }

struct alignas(64) TileConfig {
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t bytes_per_row[16];
  std::uint8_t rows[16];
};

// Tiles are loaded and released in each call, so that no thread keeps them.
void load_tiles() {
  TileConfig config{};
  config.palette = 1;
  for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = 16;
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

double multiply_byte_tiles() {
  load_tiles();
  for (long i = 0; i < kRepeats / 16; i++)
    asm volatile(
        "tdpbsud %tmm6, %tmm4, %tmm0\n\ttdpbsud %tmm7, %tmm4, %tmm1\n\t"
        "tdpbsud %tmm6, %tmm5, %tmm2\n\ttdpbsud %tmm7, %tmm5, %tmm3");
  asm volatile("tilerelease" ::: "memory");
  return kRepeats / 16 * 4.0 * 16 * 16 * 64 * 2;
}

double multiply_bfloat16_tiles() {
  load_tiles();
  for (long i = 0; i < kRepeats / 16; i++)
    asm volatile(
        "tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
        "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
  asm volatile("tilerelease" ::: "memory");
  return kRepeats / 16 * 4.0 * 16 * 16 * 32 * 2;
}
#endif

void report_all(const char* memory, int threads) {
  const std::size_t part = kMemory / threads / 256 * 256;
  report("read", "loads", "GB/s", threads,
         [&](int i) { return read_memory(memory + i * part, part); });
#if defined(HAS_FMA)
  report("float32", FMA_NAME, "GFLOP/s", threads, [](int) { return multiply_floats(); });
#endif
#if defined(HAS_DOT)
  report("int8", DOT_NAME, "GOP/s", threads, [](int) { return multiply_bytes(); });
#endif
#if defined(__AMX_INT8__)
  if (may_use_tiles()) {
    report("int8 tiles", "AMX", "GOP/s", threads, [](int) { return multiply_byte_tiles(); });
    report("bfloat16 tiles", "AMX", "GFLOP/s", threads,
           [](int) { return multiply_bfloat16_tiles(); });
  }
#endif
}

}  // namespace

int main(int count, char** arguments) {
  void* memory = mmap(nullptr, kMemory + 8192, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  madvise(memory, kMemory, MADV_HUGEPAGE);
  std::memset(memory, 1, kMemory);
  for (int i = 1; i < count; i++) {
    const int threads = std::atoi(arguments[i]);
    if (threads < 1) return 1;
    report_all(static_cast<const char*>(memory), threads);
  }
}
