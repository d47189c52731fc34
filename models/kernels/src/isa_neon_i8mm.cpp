// The kernels for NEON with dot products of unsigned and signed bytes (FEAT_I8MM). Only this file
// is compiled for that instruction set, and only if the compiler supports it.
#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)

#define ISA neon_i8mm
#include "int8_neon.hpp"
#include "arm_features.hpp"
#include "kernel_table.hpp"

namespace mlxrunner {

const Kernels* kernels_neon_i8mm() {
  return has_feature(kInt8Matmul) ? &neon_i8mm::kTable : nullptr;
}

}  // namespace mlxrunner

#else
#include "kernels.hpp"
namespace mlxrunner {
const Kernels* kernels_neon_i8mm() { return nullptr; }
}  // namespace mlxrunner
#endif
