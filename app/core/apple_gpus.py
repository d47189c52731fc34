"""Metal's names of GPU architectures.

Knows: the form of the names. Must not know: MLX, the machine.
"""

import re

# The first generations of GPUs with neural accelerators, of computers and of phones
# (mlx/backend/metal/device.cpp, `is_nax_available`).
_ACCELERATOR_GENERATION, _PHONE_GENERATION = 17, 18


def has_accelerator_hardware(architecture: str) -> bool:
    """Returns whether a GPU has neural accelerators, from Metal's name of its architecture."""
    match = re.fullmatch(r"applegpu_g(\d\d)(\w)", architecture)
    if match is None:
        return False
    least = _PHONE_GENERATION if match[2] == "p" else _ACCELERATOR_GENERATION
    return int(match[1]) >= least
