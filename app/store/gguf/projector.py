"""Finds and reads the projector of a GGUF model: a file with its vision tower.

Knows: the names under which projectors are published. Must not know: keys and tensors, pixels.

A projector is next to the model's file and has `mmproj` in its name (`mmproj-model-f16.gguf`). In a
folder with several models, the names of a model and its projector begin with the same text
(`org_repository_model-Q4_K_M.gguf`, `org_repository_mmproj-model-f16.gguf`). The file of a model
that Ollama's own converter wrote contains its tower, and is therefore also its projector.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.model_files import AddedToken, Json
from app.store.gguf.errors import translate_gguf_errors
from app.store.gguf.tokenizer import Vocabulary
from models.gguf import reader
from models.gguf.metadata import Metadata
from models.gguf.ollama_towers import read_projector
from models.gguf.projectors import ARCHITECTURE, find_projector, fits, read_config
from models.gguf.reader import GGUFError, GGUFFile

log = logging.getLogger(__name__)

_MARK, _SUFFIX = "mmproj", ".gguf"

# the first one that exists is used; others are used in the order of their names
_PREFERRED_TYPES = ("F16", "BF16", "F32", "Q8_0")

_TYPE = re.compile(r"(?<![A-Z0-9])(F16|BF16|F32|Q8_0)(?![A-Z0-9])")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFiles:
    """The parts that a projector adds to a model. config: the config of the whole model.
    processor_config, added_tokens: see `ModelFiles`."""

    file: GGUFFile
    config: Json
    processor_config: Json
    added_tokens: tuple[AddedToken, ...]


def is_projector(name: str) -> bool:
    """Returns whether this is the name of a projector file."""
    return name.endswith(_SUFFIX) and _MARK in name.lower()


def has_projector_header(path: Path) -> bool:
    """Returns whether the content of a GGUF file is a projector's, whatever its name. Raises
    AppError(MODEL_FILES) for an invalid header."""
    with translate_gguf_errors():
        metadata = reader.read(path).metadata
    is_clip = metadata.get("general.architecture") == ARCHITECTURE
    return is_clip or metadata.get("general.type") == "mmproj"


def choose_projectors(model: str, names: Iterable[str]) -> list[str]:
    """Returns the projectors among the names of files that may belong to a model, the best one
    first. model: the name of the model's file. Names may include a folder: that of the model, or
    the one above."""
    found = [name for name in names if is_projector(name) and _belongs(name, model)]
    return sorted(found, key=lambda name: (_rank_type(name), name))


def find_projectors(path: Path) -> list[Path]:
    """Returns the projectors next to a model's file, the best one first."""
    names = [one.name for one in path.parent.glob(f"*{_SUFFIX}") if is_projector(one.name)]
    found = [path.parent / name for name in choose_projectors(path.name, names)]
    return [one for one in found if one.is_file()]


def read_vision(
    projectors: Iterable[Path], text: Mapping[str, Any], vocabulary: Vocabulary
) -> VisionFiles | None:
    """Reads the first projector that fits the model. text: the config of the text model. Returns
    None if there is none. If a projector cannot be used, only images are unavailable, and a log
    line gives the reason."""
    for path in projectors:
        try:
            file = read_projector(path)
            if not fits(file, text):
                log.info("%s belongs to a different model than %s", path, vocabulary.file.path)
                continue
            config, processor = read_config(file, text)
            token = find_projector(Metadata(file)).image_token
        except GGUFError as error:
            log.warning("%s; the model cannot process images", error)
            continue
        return VisionFiles(
            file=file,
            config=config,
            processor_config=processor,
            added_tokens=_add_token(token, vocabulary),
        )
    return None


def _add_token(token: str | None, vocabulary: Vocabulary) -> tuple[AddedToken, ...]:
    """Returns a token that the vocabulary lacks, with the next ID. The model never gets it, because
    image rows replace it."""
    if token is None or token in vocabulary.tokens:
        return ()
    return (AddedToken(id=len(vocabulary.tokens), content=token, special=True),)


def _belongs(name: str, model: str) -> bool:
    (folder, _, own), (model_folder, _, model_own) = name.rpartition("/"), model.rpartition("/")
    start = own.lower().partition(_MARK)[0]
    return folder in ("", model_folder) and model_own.lower().startswith(start)


def _rank_type(name: str) -> int:
    match = _TYPE.search(name.upper())
    return _PREFERRED_TYPES.index(match[1]) if match else len(_PREFERRED_TYPES)
