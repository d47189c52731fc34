// Every 64-bit ARM has NEON, with fused multiply-add.
#if defined(__aarch64__) && defined(__ARM_NEON)

#define ISA neon
#include "lanes_neon.hpp"
#include "whole_pairs.hpp"
#include "table.hpp"

namespace mlxrunner {

const Kernels* kernels_neon() { return &neon::kTable; }

}  // namespace mlxrunner

#else
#include "kernels.hpp"
namespace mlxrunner {
const Kernels* kernels_neon() { return nullptr; }
}  // namespace mlxrunner
#endif
