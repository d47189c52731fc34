// The portable kernels, compiled for the default target. Every machine can run them.
#define ISA scalar
#include "simd_scalar.hpp"
#include "int16_dot.hpp"
#include "kernel_table.hpp"

namespace mlxrunner {

const Kernels* kernels_scalar() { return &scalar::kTable; }

}  // namespace mlxrunner
