// The memory policy. It determines how malloc handles freed array memory.
#pragma once

namespace mlxrunner {

// MLX has no buffer cache on the CPU, so each array is allocated with malloc. The arrays of a
// prompt have several megabytes. malloc returns such memory to the system immediately, and requests
// it again, page by page, for the next layer. After this call, malloc keeps part of the freed
// memory, in the whole process. The call has no effect if malloc is not glibc's.
void retain_freed_memory();

// Returns all free memory to the system.
void trim_memory();

}  // namespace mlxrunner
