"""The folder for data that programs of this user keep between runs (XDG Base Directory).

Knows: the variable and its default. Must not know: what is kept there.
"""

from collections.abc import Mapping
from pathlib import Path


def find_state_folder(environment: Mapping[str, str]) -> Path | None:
    """Returns the folder, which may not exist; None without a home folder."""
    if given := environment.get("XDG_STATE_HOME"):
        return Path(given) / "mlxrunner"
    try:
        return Path.home() / ".local" / "state" / "mlxrunner"
    except RuntimeError:
        return None
