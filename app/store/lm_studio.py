"""Models that LM Studio downloaded: folders `<publisher>/<repository>` in the layout of the hub.

Knows: the location of LM Studio's folder. Must not know: the network, the contents of a model.

LM Studio keeps its files in ~/.lmstudio, or in the folder named by ~/.lmstudio-home-pointer; before
version 0.3.5 in ~/.cache/lm-studio.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.store.config_files import read_text
from app.store.model_names import HubName, parse_hub_name

_POINTER, _DEFAULT_HOME, _OLD_HOME = ".lmstudio-home-pointer", ".lmstudio", ".cache/lm-studio"

_MAX_POINTER_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LMStudioModel:
    """A model folder of LM Studio."""

    name: HubName
    folder: Path


def find_folder(name: HubName) -> Path | None:
    """Returns the folder of a model with safetensors files, or None. A name with a revision is
    never found, because LM Studio does not record it; neither is the name of a GGUF file."""
    if name.revision is not None or name.quantization is not None:
        return None
    for models in list_model_folders():
        folder = models / name.repo_id
        folder = folder if name.subfolder is None else folder / name.subfolder
        if (folder / "config.json").is_file():
            return folder
    return None


def list_models() -> Iterator[LMStudioModel]:
    """Yields every model folder with a config.json, which models in GGUF do not have. Raises
    OSError if a folder cannot be read."""
    seen: set[str] = set()
    for models in list_model_folders():
        for publisher in _list_folders(models):
            for folder in _list_folders(publisher):
                name = parse_hub_name(f"{publisher.name}/{folder.name}")
                if name and str(name) not in seen and os.path.lexists(folder / "config.json"):
                    seen.add(str(name))
                    yield LMStudioModel(name=name, folder=folder)


def list_model_folders() -> list[Path]:
    """Returns the folders of models, which contain a folder per publisher, without duplicates."""
    home = Path.home()
    pointer = home / _POINTER
    text = read_text(pointer, max_bytes=_MAX_POINTER_BYTES) if pointer.is_file() else None
    chosen = Path(text.strip()) if text and text.strip() else home / _DEFAULT_HOME
    return list(dict.fromkeys([chosen / "models", home / _OLD_HOME / "models"]))


def _list_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir())
