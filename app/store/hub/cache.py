"""The Hugging Face cache, which contains models that this or another tool downloaded.

Knows: the layout of the cache, as far as huggingface_hub does not expose it. Must not know: the
network. This module never uses it.

HF_HUB_CACHE and HF_HOME set the location of the cache.
"""

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import constants, get_cached_repo_tree, try_to_load_from_cache
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.file_download import repo_folder_name

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.store import hf_folder
from app.store.gguf import model as gguf_model
from app.store.gguf.projector import choose_projectors, is_projector
from app.store.hub import required_files
from app.store.model_names import (
    HubName,
    ModelNotFoundError,
    is_format_folder,
    is_revision,
    parse_hub_name,
)

_COMMIT = re.compile(r"[0-9a-f]{7,40}")

_WEIGHTS = (".gguf", ".safetensors")

# the number of displayed digits of a commit
_SHORT_COMMIT_LENGTH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRevision:
    """One cached revision of a repository. folder: the model's folder, which may be a folder inside
    the repository."""

    name: HubName
    folder: Path


def find(name: HubName) -> ModelFiles | None:
    """Finds a model in the cache. Returns None if no file of the model is cached. Raises
    ModelNotFoundError for an interrupted download. Raises AppError(MODEL_FILES) for files that
    cannot be read."""
    storage = repo_folder(name.repo_id)
    revision = _expand_commit(storage, name.revision)
    if name.quantization is not None:
        return _find_gguf(name, storage, revision)
    config = _find_config(name.repo_id, revision, name.subfolder)
    if config is None and name.subfolder is None:
        name = replace(name, subfolder=_choose_cached_subfolder(storage, name.repo_id, revision))
        config = _find_config(name.repo_id, revision, name.subfolder)
    if config is None:
        if (files := _find_gguf(name, storage, revision)) is not None:
            return files
        if _has_partial_download(name.repo_id, revision):
            raise _incomplete_error(name)
        return None
    folder = config.parent
    missing = _find_missing_files(name.repo_id, folder, name.subfolder)
    if missing:
        raise _incomplete_error(name, *missing)
    return hf_folder.read(folder, name=str(name))


def _find_gguf(name: HubName, storage: Path, revision: str | None) -> ModelFiles | None:
    """Finds the GGUF file of a quantization or, without one, the only or usual one."""
    folder = _find_snapshot(storage, revision)
    paths = [] if folder is None else _list_gguf(folder)
    if folder is None or not paths:
        return None
    try:
        found = required_files.select_gguf(str(name), paths, name.quantization)
    except AppError:
        return None  # another quantization was downloaded
    projectors = [folder / path for path in choose_projectors(found[0], paths)]
    return gguf_model.read(folder / found[0], name=str(name), projectors=projectors)


def _find_snapshot(storage: Path, revision: str | None) -> Path | None:
    ref = storage / "refs" / (revision or constants.DEFAULT_REVISION)
    commit = ref.read_text(errors="replace").strip() if ref.is_file() else revision
    folder = storage / "snapshots" / (commit or "")
    return folder if commit and is_revision(commit) and folder.is_dir() else None


def _list_gguf(folder: Path) -> list[str]:
    """Returns the complete GGUF files of a snapshot. Links to missing blobs are omitted."""
    paths = [*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def _find_config(repo_id: str, revision: str | None, subfolder: str | None) -> Path | None:
    path = "config.json" if subfolder is None else f"{subfolder}/config.json"
    found = try_to_load_from_cache(repo_id, path, cache_dir=cache_folder(), revision=revision)
    return Path(found) if isinstance(found, str) else None


def _choose_cached_subfolder(storage: Path, repo_id: str, revision: str | None) -> str | None:
    """Returns the preferred folder of one revision that contains a complete model; if there is
    none, the preferred incomplete one."""
    snapshot = _find_snapshot(storage, revision)
    if snapshot is None:
        return None
    folders = _list_model_subfolders(snapshot)
    complete = [name for name in folders if not _find_missing_files(repo_id, snapshot / name, name)]
    return required_files.choose_subfolder(
        f"{name}/model.safetensors" for name in complete or folders
    )


def _list_model_subfolders(snapshot: Path) -> list[str]:
    return sorted(
        folder.name
        for folder in _list_folder(snapshot)
        if is_format_folder(folder.name) and os.path.lexists(folder / "config.json")
    )


def list_revisions() -> Iterator[CachedRevision]:
    """Yields every revision that looks like a language model, including incomplete revisions, and
    every repository that cannot be read. For such a repository, `find` raises the reason. Raises
    OSError if the cache folder cannot be read.

    huggingface_hub's scan_cache_dir is not used, because it omits incomplete revisions and fails at
    the first unreadable entry.
    """
    for storage in sorted(_list_folder(cache_folder())):
        kind, _, repo = storage.name.partition("--")
        name = parse_hub_name(repo.replace("--", "/"))
        if kind != "models" or name is None:
            continue
        try:
            yield from list(_list_repo_revisions(name.repo_id, storage))
        except OSError:
            yield CachedRevision(name=name, folder=storage)


def _list_repo_revisions(repo_id: str, storage: Path) -> Iterator[CachedRevision]:
    refs = _read_refs(storage / "refs")
    for folder in sorted(_list_folder(storage / "snapshots")):
        subfolders: list[str | None] = [*_list_model_subfolders(folder)]
        if os.path.lexists(folder / "config.json"):
            subfolders.insert(0, None)
        if not subfolders:
            names = refs.get(folder.name, [folder.name[:_SHORT_COMMIT_LENGTH]])
            yield from _list_quantizations(repo_id, folder, names)
        for subfolder in subfolders:
            place = folder if subfolder is None else folder / subfolder
            if not _has_weights(repo_id, place, subfolder):
                if _has_incomplete_blobs(storage):
                    name = HubName(repo_id=repo_id, subfolder=subfolder)
                    yield CachedRevision(name=name, folder=place)
                continue
            for ref in refs.get(folder.name, [folder.name[:_SHORT_COMMIT_LENGTH]]):
                revision = None if ref == "main" else ref
                name = HubName(repo_id=repo_id, revision=revision, subfolder=subfolder)
                yield CachedRevision(name=name, folder=place)


def _list_quantizations(
    repo_id: str, folder: Path, refs: Sequence[str]
) -> Iterator[CachedRevision]:
    """Yields the GGUF models of a snapshot."""
    labels = {required_files.get_quantization(path) for path in _list_gguf(folder)}
    for label in sorted(filter(None, labels)):
        for ref in refs:
            revision = None if ref == "main" else ref
            name = HubName(repo_id=repo_id, revision=revision, quantization=label)
            yield CachedRevision(name=name, folder=folder)


def _read_refs(folder: Path) -> Mapping[str, Sequence[str]]:
    """Returns the branches and tags of each commit."""
    refs: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*")):
        ref = path.relative_to(folder).as_posix()
        if is_revision(ref) and path.is_file():
            refs[path.read_text(errors="replace").strip()].append(ref)
    return refs


def _list_folder(folder: Path) -> list[Path]:
    """Lists a folder. Returns an empty list if the folder does not exist. Raises OSError if it
    cannot be read. `Path.glob` would treat a folder as empty if permission is denied and, since
    Python 3.13, after any error."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def cache_folder() -> Path:
    return Path(constants.HF_HUB_CACHE).expanduser()


def repo_folder(repo_id: str) -> Path:
    """Returns the cache folder of a repository."""
    return cache_folder() / repo_folder_name(repo_id=repo_id, repo_type="model")


def _expand_commit(storage: Path, revision: str | None) -> str | None:
    """Expands an abbreviated commit, as displayed by `list`."""
    if revision is None or not _COMMIT.fullmatch(revision):
        return revision
    names = [path.name for path in _list_folder(storage / "snapshots")]
    matches = [name for name in names if name.startswith(revision)]
    return matches[0] if len(matches) == 1 else revision


def _has_partial_download(repo_id: str, revision: str | None) -> bool:
    """Returns whether this revision was partly downloaded. The ref of the main revision is written
    when the download is complete. Before that, there are only partial files and revisions without a
    ref."""
    storage = repo_folder(repo_id)
    if revision is None:
        snapshots = _list_folder(storage / "snapshots")
        return _has_incomplete_blobs(storage) or any(
            _find_missing_files(repo_id, folder, None) for folder in snapshots
        )
    return (storage / "refs" / revision).is_file() or (storage / "snapshots" / revision).is_dir()


def _has_incomplete_blobs(storage: Path) -> bool:
    return any(path.suffix == ".incomplete" for path in _list_folder(storage / "blobs"))


def _find_missing_files(repo_id: str, folder: Path, subfolder: str | None) -> list[str]:
    """Returns the files that are missing, according to the repository listing, the index and links.
    folder: the model's folder."""
    links = [path.name for path in folder.iterdir() if path.is_symlink()]
    listing = _read_cached_listing(repo_id, folder, subfolder)
    # An index may list files that the repository never had.
    indexed: Sequence[str] = [] if listing else hf_folder.find_missing_shards(folder)
    required = [*required_files.select_files([*(listing or ()), *links]), *indexed]
    missing = sorted({name for name in required if not (folder / name).is_file()})
    if not missing and not any(folder.glob("*.safetensors")):
        return ["model.safetensors"]
    if not missing and listing is None and not hf_folder.has_tokenizer(folder):
        return ["tokenizer.json"]
    return missing


def _has_weights(repo_id: str, folder: Path, subfolder: str | None) -> bool:
    listing = _read_cached_listing(repo_id, folder, subfolder)
    names = [path.name for path in folder.iterdir()] if listing is None else listing
    return (
        any(map(required_files.is_weights_file, required_files.select_files(names)))
        or required_files.INDEX in names
    )


def _read_cached_listing(repo_id: str, folder: Path, subfolder: str | None) -> list[str] | None:
    """Returns the files of the model's folder at that commit, or None if the cache does not have
    the listing of the repository."""
    commit = folder.name if subfolder is None else folder.parent.name
    try:
        tree = get_cached_repo_tree(repo_id, revision=commit, cache_dir=cache_folder())
    except CachedRepoTreeNotFoundError:
        return None
    prefix = "" if subfolder is None else f"{subfolder}/"
    return [file.path.removeprefix(prefix) for file in tree if file.path.startswith(prefix)]


def _incomplete_error(name: HubName, *missing: str) -> ModelNotFoundError:
    more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
    lacks = f" ({', '.join(missing[:2])}{more} missing)" if missing else ""
    revision = "" if name.revision is None else f" --revision {name.revision}"
    return ModelNotFoundError(
        f"the download of {name} is incomplete{lacks}: "
        f"run `mlxrunner pull {replace(name, revision=None)}{revision}` to complete it",
        hub=name,
    )


def delete_repository(name: HubName) -> None:
    """Deletes all revisions of a repository, or of one of its quantizations. A repository
    disappears atomically, before its files are deleted. Raises AppError(INVALID) for one revision
    of several, and FileNotFoundError."""
    if name.revision is not None:
        message = f"{name} is one revision: delete {name.repo_id}, with all of its revisions"
        raise AppError(ErrorKind.INVALID, message)
    folder = repo_folder(name.repo_id)
    if folder.is_symlink() or not folder.is_dir():
        raise FileNotFoundError(str(folder))
    if name.quantization is not None and not _delete_quantization(folder, name.quantization):
        return
    doomed = cache_folder() / f".mlxrunner-deleted-{folder.name}"
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _delete_quantization(folder: Path, quantization: str) -> bool:
    """Deletes the GGUF files of one quantization. Returns whether the repository has no other
    model. Raises FileNotFoundError if it has no such files."""
    paths = [path for path in (folder / "snapshots").rglob("*") if path.suffix in _WEIGHTS]
    doomed = {path for path in paths if required_files.get_quantization(path.name) == quantization}
    if not doomed:
        raise FileNotFoundError(str(folder))
    kept = [path for path in paths if path not in doomed]
    used = {path.resolve() for path in kept}
    blobs = folder.resolve() / "blobs"
    unused = [blob for path in doomed if (blob := path.resolve()).parent == blobs]
    for path in (*doomed, *(blob for blob in unused if blob not in used)):
        path.unlink(missing_ok=True)
    return all(is_projector(path.name) for path in kept)
