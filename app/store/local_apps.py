"""Models that other local apps downloaded: LM Studio and llama.cpp.

Knows: the location and the layout of their folders. Must not know: the network, the contents of
files.

    ~/.lmstudio/models/<publisher>/<repository>/     in the layout of the hub, or with GGUF files
    $LLAMA_CACHE/<org>_<repository>_<file>.gguf      llama.cpp's downloads (-hf)

LM Studio keeps its files in ~/.lmstudio, or in the folder named by ~/.lmstudio-home-pointer; before
version 0.3.5 in ~/.cache/lm-studio.

A model in GGUF has the name of its file. If several files have a name, the first one is used. In LM
Studio's folder, such a model can also be named as on the hub: `org/repository:Q4_K_M`.
"""

import itertools
import os
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.core.model_files import ModelFiles
from app.store.config_files import read_text
from app.store.gguf import model
from app.store.gguf.projector import find_projectors
from app.store.model_names import HubName, parse_hub_name

_POINTER, _DEFAULT_HOME, _OLD_HOME = ".lmstudio-home-pointer", ".lmstudio", ".cache/lm-studio"

_MAX_POINTER_BYTES = 4096

# categories of characters: controls, such as those of a terminal, bytes of invalid UTF-8, and the
# ends of lines and paragraphs
_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")

# the maximum number of files to check, because the folder may contain something else
_MAX_FILES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LMStudioModel:
    """A model folder of LM Studio."""

    name: HubName
    folder: Path


def find_lm_studio_folder(name: HubName) -> Path | None:
    """Returns the folder of a model with safetensors files, or None. A name with a revision is
    never found, because LM Studio does not record it; neither is the name of a GGUF file."""
    if name.revision is not None or name.quantization is not None:
        return None
    for models in list_lm_studio_folders():
        folder = models / name.repo_id
        folder = folder if name.subfolder is None else folder / name.subfolder
        if (folder / "config.json").is_file():
            return folder
    return None


def list_lm_studio_models() -> Iterator[LMStudioModel]:
    """Yields every model folder with a config.json, which models in GGUF do not have. Raises
    OSError if a folder cannot be read."""
    seen: set[str] = set()
    for models in list_lm_studio_folders():
        for publisher in _list_subfolders(models):
            for folder in _list_subfolders(publisher):
                name = parse_hub_name(f"{publisher.name}/{folder.name}")
                if name and str(name) not in seen and os.path.lexists(folder / "config.json"):
                    seen.add(str(name))
                    yield LMStudioModel(name=name, folder=folder)


def list_lm_studio_folders() -> list[Path]:
    """Returns the folders of models, which contain a folder per publisher, without duplicates."""
    home = Path.home()
    pointer = home / _POINTER
    text = read_text(pointer, max_bytes=_MAX_POINTER_BYTES) if pointer.is_file() else None
    chosen = Path(text.strip()) if text and text.strip() else home / _DEFAULT_HOME
    return list(dict.fromkeys([chosen / "models", home / _OLD_HOME / "models"]))


def _list_subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir())


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFileEntry:
    """A file. source: the program to whose folder it belongs."""

    name: str
    source: str
    path: Path


def find_gguf(name: str) -> ModelFiles | None:
    """Finds a model by the name of its file. Raises AppError(MODEL_FILES) for an unusable file."""
    found = find_gguf_file(name)
    return None if found is None else read_gguf(found)


def find_gguf_file(name: str) -> GGUFFileEntry | None:
    """Finds a file by the name of its model."""
    return next((entry for entry in list_gguf_files() if entry.name == name), None)


def read_gguf(entry: GGUFFileEntry) -> ModelFiles:
    """Reads a listed model. Raises AppError(MODEL_FILES) for an unusable file."""
    return model.read(entry.path, name=entry.name, projectors=find_projectors(entry.path))


def list_gguf_files() -> Iterator[GGUFFileEntry]:
    """Yields the models in the folders. Folders that do not exist or cannot be read are empty, and
    files whose name is not valid text are skipped."""
    seen: set[str] = set()
    for source, folder, pattern in _list_gguf_folders():
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


def _list_gguf_folders() -> Iterator[tuple[str, Path, str]]:
    """Yields the program, its folder, and the pattern of files in it."""
    for folder in list_lm_studio_folders():
        yield "lm studio", folder, "*/*/*.gguf"
    given = os.environ.get("LLAMA_CACHE")
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / usual) / "llama.cpp"
    yield "llama.cpp", Path(given) if given else cache, "*.gguf"
