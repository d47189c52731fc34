// Compiled for what the rest is compiled for; every machine has it.
#define ISA scalar
#include "lanes_scalar.hpp"
#include "whole_pairs.hpp"
#include "table.hpp"

namespace mlxrunner {

const Kernels* kernels_scalar() { return &scalar::kTable; }

}  // namespace mlxrunner
