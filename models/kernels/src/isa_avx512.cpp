// Compiled for AVX-512, whatever the rest is compiled for.
#if defined(__x86_64__)

#define ISA avx512
#include "lanes_avx512.hpp"
#include "whole_pairs.hpp"
#include "table.hpp"

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
