// Checks whether this machine can use tiles (tiles.hpp), and whether they compute correctly.
#pragma once

#include <string>

#include "kernels.hpp"

namespace mlxrunner {

// Asks the system for the permission to use AMX tiles. Returns the reason why this process cannot
// use them, or "".
std::string find_tile_obstacle();

// Returns the reason why a process that can use AMX tiles cannot use them for bfloat16, or "".
std::string find_bf16_tile_obstacle();

// Compares a few products of `tested` with Kernels::multiply_by_reference and, if bf16_on_tiles, with
// Kernels::bf16_tile_reference, bit for bit, in a child process, which may crash. It needs a few
// milliseconds, and is killed after max_seconds. Returns a
// description of the difference or the crash, or "".
std::string find_tile_fault(const Kernels& tested, unsigned max_seconds = 10);

}  // namespace mlxrunner
