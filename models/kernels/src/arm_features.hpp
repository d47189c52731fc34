// Whether a 64-bit ARM processor has optional instructions.
#pragma once

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace mlxrunner {

// A feature by its bit of AT_HWCAP or AT_HWCAP2 on Linux, and by its name on macOS.
struct ArmFeature {
  unsigned long type, bit;
  const char* name;
};
inline constexpr ArmFeature kDotProduct{16, 1ul << 20, "hw.optional.arm.FEAT_DotProd"};
inline constexpr ArmFeature kInt8Matmul{26, 1ul << 13, "hw.optional.arm.FEAT_I8MM"};

// always inlined, because a shared copy could be compiled for an instruction set that this machine
// lacks
[[gnu::always_inline]] inline bool has_feature(
    [[maybe_unused]] const ArmFeature& feature) {
#if defined(__APPLE__)
  int has = 0;
  auto size = sizeof has;
  return sysctlbyname(feature.name, &has, &size, nullptr, 0) == 0 && has;
#elif defined(__linux__)
  return getauxval(feature.type) & feature.bit;
#else
  return false;
#endif
}

}  // namespace mlxrunner
