// Memory policy: what malloc does with freed array memory.
#pragma once

namespace mlxrunner {

// MLX has no buffer cache on the CPU: each array is allocated with malloc. The arrays of a prompt
// are megabytes, which malloc returns to the system at once and requests again, page by page, for
// the next layer. After this call malloc keeps part of the freed memory, in the whole process. No
// effect if malloc is not glibc's.
void retain_freed_memory();

// Returns all free memory to the system.
void trim_memory();

}  // namespace mlxrunner
