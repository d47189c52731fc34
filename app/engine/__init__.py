"""The engine.

Importing the package imports `models.cpu_backend` first, because the compute backend must be
selected before MLX is imported.
"""

from models import cpu_backend as cpu_backend
