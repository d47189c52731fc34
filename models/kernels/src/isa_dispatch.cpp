#include "isa_dispatch.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace mlxrunner {

namespace {

const Kernels& select_kernels() {
  const Kernels* all[] = {kernels_avx512_vnni(), kernels_avx512(), kernels_avx2(),
                          kernels_neon(), kernels_scalar()};
  const char* requested = std::getenv("MLXRUNNER_ISA");
  std::string available;
  for (const Kernels* one : all) {
    if (!one) continue;
    if (!requested || !*requested || std::string(requested) == one->name) return *one;
    available += std::string(available.empty() ? "" : ", ") + one->name;
  }
  throw std::runtime_error(std::string("MLXRUNNER_ISA is '") + requested +
                           "', but this machine supports " + available);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& selected = select_kernels();
  return selected;
}

}  // namespace mlxrunner
