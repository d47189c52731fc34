"""Where models lie: a name in, `ModelFiles` out. Never opens a tensor.

Knows: the order in which sources are asked. Must not know: what a model is made of.
"""

from pathlib import Path

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.store import hf

BUILTIN = "builtin"


def resolve(name: str | None) -> ModelFiles:
    """name: a folder, or None for the model that ships with the project.

    Raises AppError(MODEL_FILES) with one line that says what is wrong with it.
    """
    if name is None or name == BUILTIN:
        return hf.read(_builtin(), name=BUILTIN)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise AppError(
            Kind.MODEL_FILES,
            f"{name} is not a folder: give the path of a model folder, or nothing for the built-in "
            "model",
        )
    return hf.read(folder, name=folder.resolve().name)


def _builtin() -> Path:
    return Path(__file__).resolve().parents[2] / "models" / "builtin"
