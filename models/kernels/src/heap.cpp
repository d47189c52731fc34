#include "heap.hpp"

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

namespace mlxrunner {

void keep_memory() {
#if defined(__GLIBC__)
  // larger ones, as a long prompt's, still come from the system and go back there: glibc takes no
  // larger threshold
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 128 << 20);
  // arenas of other threads than the main one give back whatever these say
  mallopt(M_ARENA_MAX, 1);
#endif
}

void return_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace mlxrunner
