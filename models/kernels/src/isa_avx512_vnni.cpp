// The kernels for AVX-512 with VNNI. Only this file is compiled for that instruction set.
#if defined(__x86_64__)

#define ISA avx512_vnni
#include "simd_avx512.hpp"
#include "int8_vnni.hpp"
#include "kernel_table.hpp"

namespace mlxrunner {

const Kernels* kernels_avx512_vnni() {
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vnni");
  return has ? &avx512_vnni::kTable : nullptr;
}

}  // namespace mlxrunner

#else
#include "kernels.hpp"
namespace mlxrunner {
const Kernels* kernels_avx512_vnni() { return nullptr; }
}  // namespace mlxrunner
#endif
