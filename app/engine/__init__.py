"""The engine.

Importing any of its modules first imports `models.cpu_backend`, because the compute backend must be
selected before MLX is imported.
"""

from models import cpu_backend as cpu_backend
