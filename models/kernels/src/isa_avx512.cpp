// The kernels for AVX-512. Only this file is compiled for that instruction set.
#if defined(__x86_64__)

#define ISA avx512
#include "simd_avx512.hpp"
#include "int16_dot.hpp"
#include "kernel_table.hpp"

namespace mlxrunner {

const Kernels* kernels_avx512() {
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has ? &avx512::kTable : nullptr;
}

}  // namespace mlxrunner

#else
#include "kernels.hpp"
namespace mlxrunner {
const Kernels* kernels_avx512() { return nullptr; }
}  // namespace mlxrunner
#endif
