// Compiled for AVX-512 with VNNI, whatever the rest is compiled for.
#if defined(__x86_64__)

#define ISA avx512_vnni
#include "lanes_avx512.hpp"
#include "whole_quads.hpp"
#include "table.hpp"

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
