#include "heap.hpp"

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

namespace mlxrunner {

void retain_freed_memory() {
#if defined(__GLIBC__)
  // larger arrays, for example those of a long prompt, are still requested from the system and
  // returned to it, because glibc does not allow a larger threshold
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 128 << 20);
  // arenas of other threads release memory regardless of these thresholds
  mallopt(M_ARENA_MAX, 1);
#endif
}

void trim_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace mlxrunner
