// How sixteen rows of a matrix lie together; stripped.hpp makes them so.
#pragma once

#include "kernels.hpp"

namespace mlxrunner::ISA {

using i64 = std::int64_t;

// Loops over registers: unrolled, or the registers would lie in memory.
#define MLXRUNNER_UNROLL _Pragma("GCC unroll 32")

// Memory is asked for this many bytes ahead.
inline constexpr std::uintptr_t kAhead = 8192;

// `lines` of `rows` numbers of `size` bytes -> of kStrip numbers, zeros behind.
inline void widen_lines(const void* from, i64 lines, i64 rows, i64 size, void* into) {
  for (i64 i = 0; i < lines; i++) {
    char* line = static_cast<char*>(into) + i * kStrip * size;
    __builtin_memset(line, 0, static_cast<std::size_t>(kStrip * size));
    __builtin_memcpy(line, static_cast<const char*>(from) + i * rows * size,
                     static_cast<std::size_t>(rows * size));
  }
}

}  // namespace mlxrunner::ISA
