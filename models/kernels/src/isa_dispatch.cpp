#include "cpu.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace mlxrunner {

namespace {

const Kernels& choose() {
  const Kernels* all[] = {kernels_avx512_vnni(), kernels_avx512(), kernels_avx2(),
                          kernels_neon(), kernels_scalar()};
  const char* asked = std::getenv("MLXRUNNER_ISA");
  std::string have;
  for (const Kernels* one : all) {
    if (!one) continue;
    if (!asked || !*asked || std::string(asked) == one->name) return *one;
    have += std::string(have.empty() ? "" : ", ") + one->name;
  }
  throw std::runtime_error(std::string("MLXRUNNER_ISA is '") + asked +
                           "', but this machine supports " + have);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace mlxrunner
