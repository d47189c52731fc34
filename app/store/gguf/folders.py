"""GGUF files in the folders of other programs: LM Studio and llama.cpp.

Knows: the location and the layout of these folders. Must not know: the contents of files.

    ~/.lmstudio/models/<org>/<repository>/<file>.gguf     or elsewhere, see app.store.lm_studio
    $LLAMA_CACHE/<org>_<repository>_<file>.gguf           llama.cpp's downloads (-hf)

A model has the name of its file. If several files have a name, the first one is used. In LM
Studio's folder, a model can also be named as on the hub: `org/repository:Q4_K_M`.
"""

import itertools
import os
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.core.model_files import ModelFiles
from app.store.gguf import model
from app.store.gguf.projector import find_projectors
from app.store.lm_studio import list_model_folders

# categories of characters: controls, such as those of a terminal, bytes of invalid UTF-8, and the
# ends of lines and paragraphs
_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")

# the maximum number of files to check, because the folder may contain something else
_MAX_FILES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFileEntry:
    """A file. source: the program to whose folder it belongs."""

    name: str
    source: str
    path: Path


def find(name: str) -> ModelFiles | None:
    """Finds a model by the name of its file. Raises AppError(MODEL_FILES) for an unusable file."""
    found = find_entry(name)
    return None if found is None else read(found)


def find_entry(name: str) -> GGUFFileEntry | None:
    """Finds a file by the name of its model."""
    return next((entry for entry in list_files() if entry.name == name), None)


def read(entry: GGUFFileEntry) -> ModelFiles:
    """Reads a listed model. Raises AppError(MODEL_FILES) for an unusable file."""
    return model.read(entry.path, name=entry.name, projectors=find_projectors(entry.path))


def list_files() -> Iterator[GGUFFileEntry]:
    """Yields the models in the folders. Folders that do not exist or cannot be read are empty, and
    files whose name is not valid text are skipped."""
    seen: set[str] = set()
    for source, folder, pattern in _list_folders():
        for path in sorted(itertools.islice(folder.glob(pattern), _MAX_FILES)):
            name = model.get_name(path)
            is_shown = name not in seen and _is_text(str(path.relative_to(folder)))
            if is_shown and model.is_model_file(path):
                seen.add(name)
                yield GGUFFileEntry(name=name, source=source, path=path)


def _is_text(name: str) -> bool:
    """Returns whether a name can be shown in a line and sent in JSON: it has no control characters,
    and is valid UTF-8."""
    return not any(unicodedata.category(character) in _NO_TEXT for character in name)


def _list_folders() -> Iterator[tuple[str, Path, str]]:
    """Yields the program, its folder, and the pattern of files in it."""
    for folder in list_model_folders():
        yield "lm studio", folder, "*/*/*.gguf"
    given = os.environ.get("LLAMA_CACHE")
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / usual) / "llama.cpp"
    yield "llama.cpp", Path(given) if given else cache, "*.gguf"
