"""MLX model architectures; models/architectures.py is the entry point.

Knows: tensors. Must not know: servers, disks, text. Importing any of its modules first imports
`models.cpu_backend`, because the compute backend must be selected before MLX is imported. This file
does not import MLX, so that commands can check a config without it.
"""

from models import cpu_backend as cpu_backend
