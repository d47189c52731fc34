"""The engine. Whichever of its modules is imported first, what MLX computes with is settled before
MLX is imported."""

from models import cpu_backend as cpu_backend
