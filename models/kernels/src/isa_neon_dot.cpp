// The kernels for NEON with dot products of signed bytes (FEAT_DotProd). Only this file is compiled
// for that instruction set, and only if the compiler supports it.
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)

#define ISA neon_dot
#include "int8_neon.hpp"
#include "arm_features.hpp"
#include "kernel_table.hpp"

namespace mlxrunner {

const Kernels* kernels_neon_dot() {
  return has_feature(kDotProduct) ? &neon_dot::kTable : nullptr;
}

}  // namespace mlxrunner

#else
#include "kernels.hpp"
namespace mlxrunner {
const Kernels* kernels_neon_dot() { return nullptr; }
}  // namespace mlxrunner
#endif
