"""Benchmarks. The compute backend is set up before MLX is imported, as in mlxrunner, so that they
measure with the BLAS and the kernels that users get."""

import importlib.util

# other engines run in their own environments, without MLX (benchmarks/cpu_openvino.py)
if importlib.util.find_spec("mlx"):
    import models as models
