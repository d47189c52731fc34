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

from huggingface_hub import constants, get_cached_repo_tree
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
    snapshot = _find_snapshot(name)
    if name.quantization is not None:
        return _find_gguf(name, snapshot)
    if snapshot is not None and name.subfolder is None and not _has_config(snapshot):
        name = replace(name, subfolder=_choose_cached_subfolder(name.repo_id, snapshot))
    folder = None if snapshot is None else snapshot / (name.subfolder or "")
    if folder is None or not _has_config(folder):
        if (files := _find_gguf(name, snapshot)) is not None:
            return files
        if folder is not None and folder.is_dir() and not _list_gguf(folder):
            missing = _find_missing_files(name.repo_id, folder, name.subfolder)
            raise _incomplete_error(name, *sorted({"config.json", *missing}))
        if snapshot is not None or _has_partial_download(name):
            raise _incomplete_error(name)
        return None
    missing = _find_missing_files(name.repo_id, folder, name.subfolder)
    if missing:
        raise _incomplete_error(name, *missing)
    return hf_folder.read(folder, name=str(name))


def _find_gguf(name: HubName, snapshot: Path | None) -> ModelFiles | None:
    """Finds the GGUF file of a quantization or, without one, the only or usual one."""
    paths = [] if snapshot is None else _list_gguf(snapshot)
    if snapshot is None or not paths:
        return None
    try:
        found = required_files.select_gguf(str(name), paths, name.quantization)
    except AppError:
        return None  # another quantization was downloaded
    projectors = [snapshot / path for path in choose_projectors(found[0], paths)]
    return gguf_model.read(snapshot / found[0], name=str(name), projectors=projectors)


def _find_snapshot(name: HubName) -> Path | None:
    """Returns the folder of a revision. A commit may be abbreviated, as displayed by `list`. Raises
    ModelNotFoundError if the ref of the main revision names no folder. Other tools write the ref
    before the files."""
    storage, revision = repo_folder(name.repo_id), name.revision
    snapshots = {path.name: path for path in _list_folder(storage / "snapshots") if path.is_dir()}
    ref = storage / "refs" / (revision or constants.DEFAULT_REVISION)
    commit = ref.read_text(errors="replace").strip() if ref.is_file() else revision
    if commit in snapshots:
        return snapshots[commit]
    if revision is None:
        if commit is not None and not _has_partial_download(name):
            others = [f"{name.repo_id}@{other[:_SHORT_COMMIT_LENGTH]}" for other in snapshots]
            raise ModelNotFoundError(
                f"{ref} names a revision that was not downloaded: run `mlxrunner pull "
                f"{name.repo_id}`{''.join(f', or serve {other}' for other in others[:1])}",
                hub=name,
            )
        return None
    matches = [path for start, path in snapshots.items() if start.startswith(revision)]
    return matches[0] if _COMMIT.fullmatch(revision) and len(matches) == 1 else None


def _list_gguf(folder: Path) -> list[str]:
    """Returns the complete GGUF files of a snapshot. Links to missing blobs are omitted."""
    paths = [*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _choose_cached_subfolder(repo_id: str, snapshot: Path) -> str | None:
    """Returns the preferred folder of a snapshot that contains a complete model; if there is none,
    the preferred incomplete one."""
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


def _has_partial_download(name: HubName) -> bool:
    """Returns whether a revision without a folder was partly downloaded. The ref of the main
    revision is written when the download is complete. Before that, there are only partial files and
    revisions without a ref."""
    storage = repo_folder(name.repo_id)
    if name.revision is not None:
        return (storage / "refs" / name.revision).is_file()
    snapshots = _list_folder(storage / "snapshots")
    return _has_incomplete_blobs(storage) or any(
        _find_missing_files(name.repo_id, folder, None) for folder in snapshots
    )


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
