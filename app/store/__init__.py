"""The model stores: resolves a name to `ModelFiles`. Never opens a tensor, never uses the network.

Knows: the order in which sources are searched. Must not know: the contents of a model.

    builtin                 the model that ships with the project
    a folder                in the layout of the Hugging Face hub; anything that looks like a path
    org/name[@revision]     the Hugging Face cache
    [[host/]ns/]name[:tag]  Ollama's store

A name is looked up in this order, and the first match wins. A model that is not found may be
downloadable; app.store.hub handles that.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from app.core.model_files import ModelFiles
from app.store import hf_folder
from app.store.config_files import unreadable_error
from app.store.digests import DigestCache
from app.store.model_names import BUILTIN, HubName, ModelName, ModelNotFoundError, parse_model_name
from app.store.ollama import manifest, model

_Name = TypeVar("_Name")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """An installed model, perhaps incomplete. source: the name of its source. read: reads its
    files; raises AppError if it cannot be served."""

    name: str
    source: str
    path: Path
    read: Callable[[], ModelFiles]


def resolve(name: str | None) -> ModelFiles:
    """Finds a model as `find` does, and verifies the digest of every blob that is named by one."""
    files = find(name)
    DigestCache().verify(manifest.get_digests(files.shards))
    return files


@contextlib.contextmanager
def _translate_os_errors() -> Generator[None]:
    """Raises AppError(MODEL_FILES) for a file or folder that cannot be read or disappears, which
    any disk access may find."""
    try:
        yield
    except OSError as error:
        raise unreadable_error(
            Path(error.filename or "a file"), error.strerror or str(error)
        ) from error


@_translate_os_errors()
def find(name: str | None) -> ModelFiles:
    """Finds a model; reads JSON and tensor headers only. name: None for the built-in model.

    Raises ModelNotFoundError if no source has it, and AppError(MODEL_FILES) with a message of one
    line if the files of the first match are invalid.
    """
    if name is None or name == BUILTIN:
        return _read_builtin()
    wanted = parse_model_name(name)
    found = (
        _find_in_folder(wanted) or _find_in_hub_cache(wanted.hub) or _find_in_ollama_store(wanted)
    )
    if found is not None:
        return found
    if wanted.hub is None and wanted.folder is not None and wanted.folder.is_dir():
        return hf_folder.read(wanted.folder, name=name)  # names the missing files
    raise _not_found_error(wanted)


def list_installed() -> Iterator[InstalledModel]:
    """Yields every installed model."""
    yield InstalledModel(
        name=BUILTIN, source="built in", path=_builtin_folder(), read=_read_builtin
    )
    # takes a sixth of a second to import, which is only spent where needed
    from app.store.hub import cache

    with _translate_os_errors():
        entries, names = list(cache.list_revisions()), list(manifest.list_names())
    for entry in entries:
        read = _make_reader(entry.name, cache.find)
        yield InstalledModel(name=str(entry.name), source="hub", path=entry.folder, read=read)
    for name in names:
        read = _make_reader(name, model.find)
        yield InstalledModel(
            name=str(name), source="ollama", path=manifest.get_manifest_path(name), read=read
        )


def _make_reader(
    name: _Name, find: Callable[[_Name], ModelFiles | None]
) -> Callable[[], ModelFiles]:
    @_translate_os_errors()
    def read() -> ModelFiles:
        found = find(name)
        if found is None:
            raise ModelNotFoundError(f"{name} was removed while it was being read")
        return found

    return read


def _find_in_folder(wanted: ModelName) -> ModelFiles | None:
    """Reads a folder. An explicit path must be a model; a name that is also a folder only counts if
    it looks like one."""
    folder = wanted.folder
    if folder is None or not folder.is_dir():
        return None
    is_path = wanted.hub is None and wanted.ollama is None
    if not is_path and not (folder / "config.json").is_file():
        return None
    return hf_folder.read(folder, name=folder.resolve().name)


def _find_in_hub_cache(name: HubName | None) -> ModelFiles | None:
    if name is None:
        return None
    from app.store.hub import cache

    return cache.find(name)


def _find_in_ollama_store(wanted: ModelName) -> ModelFiles | None:
    return None if wanted.ollama is None else model.find(wanted.ollama)


def _not_found_error(wanted: ModelName) -> ModelNotFoundError:
    """Returns the error with the places searched and a suggestion."""
    if wanted.hub is None and wanted.ollama is None:
        return ModelNotFoundError(f"{wanted.text} is not a folder: check the path")
    is_folder = wanted.folder is not None and wanted.folder.is_dir()
    looked = ["the folder of that name holds no model" if is_folder else "no such folder"]
    if wanted.hub is not None:
        from app.store.hub import cache

        looked.append(f"not in the Hugging Face cache ({cache.cache_folder()})")
    if wanted.ollama is not None:
        looked.append(f"not in Ollama's store ({manifest.store_folder()})")
    said = f"model {wanted.text} was not found: {', '.join(looked)}"
    if wanted.hub is None:
        return ModelNotFoundError(
            f"{said}; run `mlxrunner list` to see local models, or download it with `ollama pull`"
        )
    return ModelNotFoundError(
        f"{said}; run `mlxrunner pull {wanted.text}` to download it, or serve it with --pull",
        hub=wanted.hub,
    )


def is_builtin(files: ModelFiles) -> bool:
    """Returns whether the model is the one that ships with the project."""
    return files.path == _builtin_folder()


def _read_builtin() -> ModelFiles:
    return hf_folder.read(_builtin_folder(), name=BUILTIN)


def _builtin_folder() -> Path:
    return Path(__file__).resolve().parents[2] / "models" / "builtin"
