"""The model stores. This package resolves a model name to `ModelFiles`. It never reads tensor data
and never uses the network.

Knows: the order of the sources. Must not know: the contents of a model.

    builtin                 the model that ships with the project
    a folder                in the layout of the Hugging Face hub; anything that looks like a path
    a GGUF file             or a folder with one model in GGUF
    org/name[@revision]     the Hugging Face cache, then LM Studio's folder; with :Q4_K_M for one
                            GGUF file
    [[host/]ns/]name[:tag]  Ollama's store
    name[:tag]              the same model of Ollama's library in the Hugging Face cache
    name of a GGUF file     the folders of LM Studio and llama.cpp

The sources are searched in this order, and the first match is used. app.store.hub can download
models that were not found.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from app.core.errors import AppError, suggest
from app.core.model_files import ModelFiles
from app.store import hf_folder, local_apps
from app.store.config_files import unreadable_error
from app.store.digests import DigestCache
from app.store.gguf import model as gguf_model
from app.store.gguf.errors import UnsupportedGGUFError
from app.store.gguf.projector import find_projectors
from app.store.library_names import find_equivalent_of, suggest_names
from app.store.model_names import (
    BUILTIN,
    HubName,
    ModelName,
    ModelNotFoundError,
    is_format_folder,
    parse_hub_name,
    parse_model_name,
)
from app.store.ollama import manifest, model

_Name = TypeVar("_Name")

# the start of the name of a repository's folder in the Hugging Face cache
_REPO_PREFIX = "models--"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """An installed model, which may be incomplete. source: the name of its source. read: a function
    that reads the model's files and raises AppError if the model cannot be served."""

    name: str
    source: str
    path: Path
    read: Callable[[], ModelFiles]


def resolve(name: str | None) -> ModelFiles:
    """Finds a model like `find`, and verifies all blobs whose file names contain a digest."""
    files = find(name)
    blobs = files.shards if files.projector_path is None else (*files.shards, files.projector_path)
    DigestCache().verify(manifest.get_digests(blobs))
    return files


@contextlib.contextmanager
def _translate_os_errors() -> Generator[None]:
    """Raises AppError(MODEL_FILES) for a file or folder that cannot be read or disappears, which
    can happen at any disk access."""
    try:
        yield
    except OSError as error:
        raise unreadable_error(
            Path(error.filename or "a file"), error.strerror or str(error)
        ) from error


@_translate_os_errors()
def find(name: str | None) -> ModelFiles:
    """Finds a model. Reads only JSON files and tensor headers. name: None for the built-in model.

    Raises ModelNotFoundError if no source has the model. Raises AppError(MODEL_FILES), with a
    message of one line, if the files of the first match are invalid.
    """
    if name is None or name == BUILTIN:
        return _read_builtin()
    parsed = parse_model_name(name)
    files = (
        _find_in_folder(parsed)
        or _find_in_hub_cache(parsed.hub)
        or _find_in_lm_studio(parsed.hub)
        or _find_in_ollama_store(parsed)
        or local_apps.find_gguf(name)
    )
    if files is not None:
        return files
    if parsed.hub is None and parsed.folder is not None and parsed.folder.is_dir():
        return hf_folder.read(parsed.folder, name=name)  # the error names the missing files
    raise _not_found_error(parsed)


@_translate_os_errors()
def find_model_folder(name: str) -> Path | None:
    """Returns the folder that `find` would read for this name, without links and `~`; None if it
    would read no folder. Raises AppError for an invalid name or a folder that cannot be read."""
    if name == BUILTIN:
        return None
    folder = _select_folder(parse_model_name(name))
    return None if folder is None else folder.resolve()


def list_installed() -> Iterator[InstalledModel]:
    """Yields every installed model."""
    yield InstalledModel(
        name=BUILTIN, source="built in", path=_builtin_folder(), read=_read_builtin
    )
    # imported here, because the import takes a sixth of a second
    from app.store.hub import cache

    with _translate_os_errors():
        entries, names = list(cache.list_revisions()), list(manifest.list_names())
        others = list(local_apps.list_lm_studio_models())
    for entry in entries:
        read = _make_reader(entry.name, cache.find)
        yield InstalledModel(name=str(entry.name), source="hub", path=entry.folder, read=read)
    for other in others:
        read = _make_reader(other.name, _find_in_lm_studio)
        yield InstalledModel(name=str(other.name), source="lm studio", path=other.folder, read=read)
    for name in names:
        read = _make_reader(name, model.find)
        yield InstalledModel(
            name=str(name), source="ollama", path=manifest.get_manifest_path(name), read=read
        )

    for file in local_apps.list_gguf_files():
        yield InstalledModel(
            name=file.name,
            source=file.source,
            path=file.path,
            read=_make_reader(file, local_apps.read_gguf),
        )


def _make_reader(
    name: _Name, find: Callable[[_Name], ModelFiles | None]
) -> Callable[[], ModelFiles]:
    @_translate_os_errors()
    def read() -> ModelFiles:
        files = find(name)
        if files is None:
            raise ModelNotFoundError(f"{name} was removed while it was being read")
        return files

    return read


def _find_in_folder(name: ModelName) -> ModelFiles | None:
    """Reads a folder or a GGUF file. The model is named after the folder or file, or after the
    repository if the folder is a snapshot of one. Links are resolved first, except those to
    blobs."""
    folder = _select_folder(name)
    if folder is None:
        return None
    if not folder.is_dir():
        # the link of a file in the Hugging Face cache has the projector next to it, not the file
        projectors = find_projectors(folder)
        path = folder.resolve()
        if folder.suffix == ".gguf" != path.suffix:  # a link to a blob, whose name is a digest
            path = folder.absolute()
        return _read_gguf(path, gguf_model.get_name(path), projectors)
    found = gguf_model.find_in_folder(folder)
    if found is not None:
        return _read_gguf(found, _name_folder(folder.resolve()), find_projectors(found))
    return hf_folder.read(folder, name=_name_folder(folder.resolve()))


def _read_gguf(path: Path, name: str, projectors: Sequence[Path]) -> ModelFiles:
    try:
        return gguf_model.read(path, name=name, projectors=projectors)
    except UnsupportedGGUFError as error:
        twin = _find_installed_twin(gguf_model.get_base_name(path))
        if twin is None:
            raise
        raise AppError(
            error.kind, f"{error.message}; the same model may be installed as {twin}"
        ) from error


def _find_installed_twin(base_name: str) -> str | None:
    """Returns the name of an installed model in MLX's format by the name of a model without its
    quantization."""
    try:
        for installed in list_installed():
            own = installed.name.rpartition("/")[2].casefold()
            is_same = f"{own}-".startswith(f"{base_name.casefold()}-")
            # in the Hugging Face cache, the path is a repository's
            places = (installed.path, *installed.path.glob("snapshots/*"))
            if is_same and any((place / "config.json").is_file() for place in places):
                return installed.name
    except AppError:  # a store that cannot be read
        pass
    return None


def _name_folder(folder: Path) -> str:
    snapshot = folder.parent if is_format_folder(folder.name) else folder
    storage = snapshot.parent.parent
    hub = None
    if snapshot.parent.name == "snapshots" and storage.name.startswith(_REPO_PREFIX):
        repo = storage.name.removeprefix(_REPO_PREFIX).replace("--", "/")
        hub = parse_hub_name(repo if snapshot == folder else f"{repo}/{folder.name}")
    return folder.name if hub is None else str(hub)


def _select_folder(name: ModelName) -> Path | None:
    """Returns the folder or GGUF file to which a name refers. An explicit path must be a model. A
    name is resolved to a folder only if the folder looks like a model."""
    folder = name.folder
    if folder is None:
        return None
    if not folder.is_dir():
        return folder if gguf_model.is_gguf(folder) else None
    is_path = name.hub is None and name.ollama is None
    folder = _enter_folder(folder)
    is_model = (folder / "config.json").is_file() or gguf_model.find_in_folder(folder) is not None
    return folder if is_path or is_model else None


def _enter_folder(folder: Path) -> Path:
    """Returns the folder of the model inside a repository's folder in the Hugging Face cache, and
    inside a folder that has a model in a folder of each format."""
    if (folder / "config.json").exists():
        return folder
    if folder.resolve().name.startswith(_REPO_PREFIX) and (folder / "snapshots").is_dir():
        ref = folder / "refs" / "main"
        commit = ref.read_text(errors="replace").strip() if ref.is_file() else ""
        snapshots = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
        named = [path for path in snapshots if path.name == commit]
        if named or len(snapshots) == 1:
            folder = (named or snapshots)[0]
    if (folder / "config.json").exists():
        return folder
    from app.store.hub.required_files import choose_subfolder

    paths = (path.relative_to(folder).as_posix() for path in folder.glob("*/*.safetensors"))
    subfolder = choose_subfolder(paths)
    return folder if subfolder is None else folder / subfolder


def _find_in_hub_cache(name: HubName | None) -> ModelFiles | None:
    if name is None:
        return None
    from app.store.hub import cache

    return cache.find(name)


def _find_in_lm_studio(name: HubName | None) -> ModelFiles | None:
    if name is None:
        return None
    if (folder := local_apps.find_lm_studio_folder(name)) is not None:
        return hf_folder.read(folder, name=str(name))
    if name.revision is not None or name.subfolder is not None:
        return None
    from app.store.hub.required_files import select_gguf

    for models in local_apps.list_lm_studio_folders():
        files = [path.name for path in (models / name.repo_id).glob("*.gguf") if path.is_file()]
        try:
            found = select_gguf(str(name), files, name.quantization)
        except AppError:  # it has other quantizations
            continue
        path = models / name.repo_id / found[0]
        return _read_gguf(path, str(name), find_projectors(path))
    return None


def _list_lm_studio_labels(name: HubName) -> list[str]:
    """Returns the quantizations of a repository's GGUF files in LM Studio's folder."""
    from app.store.hub.required_files import get_quantization

    folders = [folder / name.repo_id for folder in local_apps.list_lm_studio_folders()]
    labels = {get_quantization(path.name) for folder in folders for path in folder.glob("*.gguf")}
    return sorted(filter(None, labels))


def _find_in_ollama_store(name: ModelName) -> ModelFiles | None:
    """Reads a model of Ollama's store, otherwise its MLX version in the Hugging Face cache, which
    is also used if the store has the model in a GGUF file that is not supported."""
    if name.ollama is None:
        return None
    try:
        files = model.find(name.ollama)
    except UnsupportedGGUFError as error:
        files = _find_in_hub_cache(find_equivalent_of(name.ollama))
        if files is None:
            raise _format_error(name, error) from error
    return files or _find_in_hub_cache(find_equivalent_of(name.ollama))


def _format_error(name: ModelName, error: AppError) -> AppError:
    """Adds the command that downloads the same model in a supported format, if there is one."""
    assert name.ollama is not None
    if find_equivalent_of(name.ollama) is None:
        return error
    return AppError(
        error.kind,
        f"{error.message}; run `mlxrunner pull {name.text}` to download the same model in MLX's "
        "format",
    )


def _not_found_error(name: ModelName) -> ModelNotFoundError:
    """Returns an error that lists the searched places and suggests a remedy."""
    if name.hub is None and name.ollama is None:
        return ModelNotFoundError(
            f"{name.text} is neither a folder nor a GGUF file: check the path"
        )
    is_folder = name.folder is not None and name.folder.is_dir()
    reasons = ["the folder with this name contains no model" if is_folder else "no such folder"]
    if name.hub is not None:
        from app.store.hub import cache

        reasons.append(f"not in the Hugging Face cache ({cache.cache_folder()})")
    if name.ollama is not None:
        reasons.append(f"not in Ollama's store ({manifest.store_folder()})")
    message = f"model {name.text} was not found: {', '.join(reasons)}"
    if name.hub is not None and (labels := _list_lm_studio_labels(name.hub)):
        message += (
            f"; LM Studio's folder has it in {', '.join(labels)}: name one of them, as in "
            f"{name.hub.repo_id}:{labels[0]}"
        )
    similar = _suggest_installed(name.text)
    if name.hub is None:
        equivalent = None if name.ollama is None else find_equivalent_of(name.ollama)
        if equivalent is not None:
            return ModelNotFoundError(
                f"{message}; run `mlxrunner pull {name.text}` to download {equivalent}, or serve "
                "it with --pull",
                hub=equivalent,
            )
        library = ", ".join(suggest_names(name.text))
        return ModelNotFoundError(
            f"{message}; run `mlxrunner list` to see local models, or download one with "
            "`mlxrunner pull org/name` or `ollama pull`"
            + (similar or (library and f"; did you mean {library}?"))
        )
    return ModelNotFoundError(
        f"{message}; run `mlxrunner pull {name.text}` to download it, or serve it with --pull"
        f"{similar}",
        hub=name.hub,
    )


def _suggest_installed(name: str) -> str:
    """Suggests an installed model with a similar name."""
    try:
        return suggest(name, [installed.name for installed in list_installed()])
    except AppError:  # a store that cannot be read
        return ""


def is_builtin(files: ModelFiles) -> bool:
    """Returns whether the model is the built-in model."""
    return files.path == _builtin_folder()


def _read_builtin() -> ModelFiles:
    files = hf_folder.read(_builtin_folder(), name=BUILTIN)
    # its config contains all values that other models take from their architectures
    return replace(files, max_positions=int(files.config["max_position_embeddings"]))


def _builtin_folder() -> Path:
    return Path(__file__).resolve().parents[2] / "models" / "builtin"
