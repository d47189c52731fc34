// What becomes of memory that arrays let go of.
#pragma once

namespace mlxrunner {

// MLX has no cache of its own on a CPU: each array is malloc's, and a prompt's are megabytes, which
// malloc hands back to the system at once and asks for again, page by page, with the next layer.
// From now on it keeps some of it. For the process; where malloc is not glibc's, nothing happens.
void keep_memory();

// All that is free goes back now.
void return_memory();

}  // namespace mlxrunner
