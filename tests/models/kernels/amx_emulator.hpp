// Emulates the instructions of AmxTiles (models/kernels/src/tiles.hpp) in a handler of SIGILL, for
// processors without AMX, and for programs that have `ud2` before each of them. It decodes only the forms of instructions and addresses that compilers
// emit there. Instruction encodings and semantics: Intel's Software Developer's Manual, volume 2.
#pragma once

#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <unistd.h>

class AmxEmulator {
 public:
  // in_use: whether tiles are configured. count: the number of emulated instructions.
  static inline bool in_use = false;
  static inline long count = 0;

  static void install() {
    struct sigaction action {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
  }

 private:
  struct Config {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t bytes_per_row[16];
    std::uint8_t rows[16];
  };
  static inline Config config{};
  static inline std::uint8_t tiles[8][16][64];

  [[noreturn]] static void stop(const char* what) {
    std::fprintf(stderr, "emulator: %s\n", what);
    _exit(3);
  }

  struct Operand {
    std::uint64_t base, index;  // of a register; index is the stride of a tile
  };

  static std::uint64_t read_register(const ucontext_t* context, int number) {
    static constexpr int kGregs[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                     REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                     REG_R12, REG_R13, REG_R14, REG_R15};
    return static_cast<std::uint64_t>(context->uc_mcontext.gregs[kGregs[number]]);
  }

  // p: at the ModRM byte, and then after the operand.
  static Operand read_memory(const ucontext_t* context, const std::uint8_t*& p, bool x, bool b) {
    const int mod = *p >> 6, rm = *p & 7;
    p++;
    if (mod == 3 || (mod == 0 && rm == 5)) stop("an unknown address");
    Operand found{0, 0};
    bool has_base = true;
    if (rm == 4) {
      const int scale = *p >> 6, index = (*p >> 3 & 7) + 8 * x, base = (*p & 7) + 8 * b;
      has_base = mod != 0 || (*p & 7) != 5;
      p++;
      if (index != 4) found.index = read_register(context, index) << scale;
      if (has_base) found.base = read_register(context, base);
    } else {
      found.base = read_register(context, rm + 8 * b);
    }
    std::int32_t displacement = 0;
    if (mod == 1) displacement = static_cast<std::int8_t>(*p), p += 1;
    else if (mod == 2 || !has_base) std::memcpy(&displacement, p, 4), p += 4;
    found.base += static_cast<std::uint64_t>(static_cast<std::int64_t>(displacement));
    return found;
  }

  static void check_tile(int tile) {
    if (!in_use || !config.rows[tile] || config.bytes_per_row[tile] != 64) stop("no such tile");
  }

  static void copy_tile(int tile, Operand memory, bool store) {
    check_tile(tile);
    for (int row = 0; row < config.rows[tile]; row++) {
      void* at = reinterpret_cast<void*>(memory.base + memory.index * static_cast<unsigned>(row));
      if (store) std::memcpy(at, tiles[tile][row], 64);
      else std::memcpy(tiles[tile][row], at, 64);
    }
    if (!store)
      for (int row = config.rows[tile]; row < 16; row++) std::memset(tiles[tile][row], 0, 64);
  }

  // sums += signed bytes of a * unsigned bytes of b
  static void add_dot(int sums, int a, int b) {
    for (int tile : {sums, a, b}) check_tile(tile);
    if (config.rows[sums] != config.rows[a] || config.rows[b] != 16) stop("tiles do not fit");
    for (int m = 0; m < config.rows[sums]; m++)
      for (int n = 0; n < 16; n++) {
        std::int32_t sum;
        std::memcpy(&sum, &tiles[sums][m][4 * n], 4);
        for (int k = 0; k < 64; k++)
          sum += static_cast<std::int8_t>(tiles[a][m][k]) * tiles[b][k / 4][4 * n + k % 4];
        std::memcpy(&tiles[sums][m][4 * n], &sum, 4);
      }
  }

  static float to_float(std::uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
  }
  // denormal numbers become zero
  static float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0 : x; }
  static float read_bf16(const std::uint8_t* p) {
    std::uint16_t half;
    std::memcpy(&half, p, 2);
    return flush(to_float(static_cast<std::uint32_t>(half) << 16));
  }

  // sums += pairs of bfloat16 of a * pairs of b
  static void add_bf16_dot(int sums, int a, int b) {
    for (int tile : {sums, a, b}) check_tile(tile);
    if (config.rows[sums] != config.rows[a] || config.rows[b] != 16) stop("tiles do not fit");
    for (int m = 0; m < config.rows[sums]; m++)
      for (int n = 0; n < 16; n++) {
        float pair[2] = {0, 0}, sum;
        for (int k = 0; k < 16; k++)
          for (int i = 0; i < 2; i++)
            pair[i] = flush(std::fma(read_bf16(&tiles[a][m][4 * k + 2 * i]),
                                     read_bf16(&tiles[b][k][4 * n + 2 * i]), pair[i]));
        std::memcpy(&sum, &tiles[sums][m][4 * n], 4);
        sum = flush(flush(sum) + flush(pair[0] + pair[1]));
        std::memcpy(&tiles[sums][m][4 * n], &sum, 4);
      }
  }

  static void handle(int, siginfo_t*, void* state) {
    auto* context = static_cast<ucontext_t*>(state);
    auto* p = reinterpret_cast<const std::uint8_t*>(context->uc_mcontext.gregs[REG_RIP]);
    if (p[0] == 0x0f && p[1] == 0x0b) p += 2;  // ud2 before an instruction that would not trap
    // a three-byte VEX prefix with the opcode map 0F38, W0 and L0
    if (p[0] != 0xc4 || (p[1] & 0x1f) != 2 || (p[2] & 0x84) != 0) stop("not an AMX instruction");
    const bool x = !(p[1] & 0x40), b = !(p[1] & 0x20);
    const int third = ~p[2] >> 3 & 15, prefix = p[2] & 3, opcode = p[3];
    const int reg = p[4] >> 3 & 7, rm = p[4] & 7;
    const bool is_register = p[4] >> 6 == 3;
    enum { kNone = 0, kF3 = 2, kF2 = 3 };
    p += 4;
    count++;
    if (opcode == 0x49 && prefix == kNone && is_register) {
      p++, in_use = false;
    } else if (opcode == 0x49 && prefix == kNone) {
      std::memcpy(&config, reinterpret_cast<void*>(read_memory(context, p, x, b).base), 64);
      if (config.palette != 1) stop("an unknown palette");
      std::memset(tiles, 0, sizeof tiles), in_use = true;
    } else if (opcode == 0x49 && prefix == kF2 && is_register) {
      check_tile(reg), p++, std::memset(tiles[reg], 0, sizeof tiles[reg]);
    } else if (opcode == 0x4b && (prefix == kF2 || prefix == kF3) && !is_register && rm == 4) {
      copy_tile(reg, read_memory(context, p, x, b), prefix == kF3);
    } else if (opcode == 0x5e && prefix == kF3 && is_register) {
      p++, add_dot(reg, rm, third);
    } else if (opcode == 0x5c && prefix == kF3 && is_register) {
      p++, add_bf16_dot(reg, rm, third);
    } else {
      stop("an unknown instruction");
    }
    context->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(p);
  }
};
