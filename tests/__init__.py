"""Tests. The compute backend is set up before MLX is imported, as in mlxrunner: tests run with the
BLAS and the kernels that users get."""

import models as models
