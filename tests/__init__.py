"""Tests. The compute backend is set up before MLX is imported, as in mlxrunner: tests run with the
BLAS and the kernels that users get."""

import importlib.util

# benchmarks of other servers run in their environments, without MLX (tests/bench/cpu_openvino.py)
if importlib.util.find_spec("mlx"):
    import models as models
