// The kernels for NEON. Every 64-bit ARM processor has NEON with fused multiply-add.
#if defined(__aarch64__) && defined(__ARM_NEON)

#define ISA neon
#include "int16_neon.hpp"
#include "int16_dot.hpp"
#include "kernel_table.hpp"

namespace mlxrunner {

const Kernels* kernels_neon() { return &neon::kTable; }

}  // namespace mlxrunner

#else
#include "kernels.hpp"
namespace mlxrunner {
const Kernels* kernels_neon() { return nullptr; }
}  // namespace mlxrunner
#endif
