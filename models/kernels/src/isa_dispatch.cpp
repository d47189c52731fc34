#include "isa_dispatch.hpp"

#include <cstdlib>
#include <stdexcept>

#include "tile_check.hpp"

namespace mlxrunner {

namespace {

// Returns the kernels that use tiles, or nullptr. why_not: set to the reason.
const Kernels* find_tile_kernels(std::string& why_not) {
  why_not = find_tile_obstacle();
  if (!why_not.empty()) return nullptr;
  const Kernels* found = kernels_avx512_amx();
  if (!found) {
    why_not = "the compiler that built the kernels does not support AMX";
    return nullptr;
  }
  const std::string fault = find_tile_fault(*found);
  if (fault.empty()) return found;
  why_not = kTileTestFailed + fault;
  return nullptr;
}

Selection select() {
  std::string why_not;
  const Kernels* all[] = {find_tile_kernels(why_not), kernels_avx512_vnni(), kernels_avx512(),
                          kernels_avx2(), kernels_neon_i8mm(), kernels_neon_dot(), kernels_neon(),
                          kernels_scalar()};
  const char* variable = std::getenv("MLXRUNNER_ISA");
  const std::string requested = variable ? variable : "";
  std::string available;
  for (const Kernels* one : all) {
    if (!one) continue;
    if (requested.empty() || requested == one->name) {
      if (one == all[0]) return {*one, ""};
      return {*one, why_not.empty() ? "MLXRUNNER_ISA is " + requested : why_not};
    }
    available += (available.empty() ? "" : ", ") + std::string(one->name);
  }
  throw std::runtime_error("MLXRUNNER_ISA is '" + requested + "', but this machine supports " +
                           available);
}

}  // namespace

const Selection& selection() {
  static const Selection selected = select();
  return selected;
}

}  // namespace mlxrunner
