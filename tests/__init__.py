"""Tests. What MLX computes with is settled before any of them imports it, as it is where mlxrunner
serves: they run on the BLAS and the kernels that users get."""

import importlib.util

# what is measured against others runs beside them, where MLX is not (tests/bench/cpu_llama.py)
if importlib.util.find_spec("mlx"):
    import models as models
