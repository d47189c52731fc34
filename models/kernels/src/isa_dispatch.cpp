#include "isa_dispatch.hpp"

#include <cstdlib>
#include <stdexcept>

#include "tile_check.hpp"

namespace mlxrunner {

namespace {

// Returns the kernels that use tiles if they compute correctly, otherwise nullptr. obstacle: why this
// process cannot use them. why_not: set to the reason.
const Kernels* check_tile_kernels(const Kernels* found, const std::string& obstacle,
                                  std::string& why_not) {
  why_not = obstacle;
  if (!why_not.empty()) return nullptr;
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
  // the reasons for 4- and 8-bit matrices and for bfloat16 ones
  std::string why_not, why_not_bf16;
  const std::string obstacle = find_tile_obstacle();
  const std::string bf16_obstacle = obstacle.empty() ? find_bf16_tile_obstacle() : obstacle;
  const Kernels* bf16 =
      check_tile_kernels(kernels_avx512_amx_bf16(), bf16_obstacle, why_not_bf16);
  const Kernels* amx = bf16 ? kernels_avx512_amx()
                            : check_tile_kernels(kernels_avx512_amx(), obstacle, why_not);
  const Kernels* all[] = {bf16, amx, kernels_avx512_vnni(), kernels_avx512(), kernels_avx2(),
                          kernels_neon_i8mm(), kernels_neon_dot(), kernels_neon(),
                          kernels_scalar()};
  const char* variable = std::getenv("MLXRUNNER_ISA");
  const std::string requested = variable ? variable : "";
  std::string available;
  for (const Kernels* one : all) {
    if (!one) continue;
    if (requested.empty() || requested == one->name) {
      const std::string by_request = requested.empty() ? "" : "MLXRUNNER_ISA is " + requested;
      if (one == bf16) return {*one, "", ""};
      if (why_not_bf16.empty()) why_not_bf16 = by_request;
      if (one == amx) return {*one, "", why_not_bf16};
      return {*one, why_not.empty() ? by_request : why_not, why_not_bf16};
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
