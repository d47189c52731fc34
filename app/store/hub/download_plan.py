"""Plans a download, by listing the files of a model on the hub.

Knows: huggingface_hub's listing of a repository. Must not know: how files are downloaded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# its type stub leaves unused types unknown
from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
)
from huggingface_hub.utils import disable_progress_bars

from app.store.config_files import read_json_object
from app.store.hub import required_files
from app.store.hub.cache import cache_folder, repo_folder
from app.store.hub.errors import model_error, translate_hub_errors, translate_response_errors
from app.store.model_names import HubName

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file of a repository. sha256: the digest of a file in Git LFS, which stores all large
    files; None for other files. git_sha1: git's blob ID of the file, or of the LFS pointer."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadPlan:
    """The files to download. name: with the folder of the model, in a repository that has several.
    commit: the current commit of the revision. config: the contents of config.json; empty for GGUF
    files, which contain theirs. missing_bytes: the number of bytes that are not downloaded yet."""

    name: HubName
    commit: str
    files: tuple[RemoteFile, ...]
    config: Mapping[str, Any]
    missing_bytes: int

    @property
    def is_gguf(self) -> bool:
        return any(file.path.endswith(".gguf") for file in self.files)

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


def plan_download(name: HubName) -> DownloadPlan:
    """Lists the repository and downloads config.json. Raises AppError, with a message of one line,
    if the repository does not exist, is not accessible or contains no loadable model, or if the hub
    cannot be reached."""
    with translate_hub_errors(name):
        with translate_response_errors(name):
            info = HfApi().model_info(
                name.repo_id,
                revision=name.revision,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
            listing = {sibling.rfilename: sibling for sibling in info.siblings or ()}
            if name.subfolder is None and name.quantization is None:
                name = replace(name, subfolder=required_files.choose_subfolder(listing))
            paths = _select_files(name, listing)
            files = tuple(_parse_file(name, listing[path]) for path in paths)
            commit = info.sha or ""
        if not _COMMIT.fullmatch(commit):
            raise model_error(name, f"has an invalid commit hash from the hub: {commit!r}")
        config: Mapping[str, Any] = {}
        prefix = "" if name.subfolder is None else f"{name.subfolder}/"
        if f"{prefix}config.json" in paths:
            with disable_progress_bars():
                path = hf_hub_download(
                    name.repo_id,
                    "config.json",
                    subfolder=name.subfolder,
                    revision=commit,
                    cache_dir=cache_folder(),
                )
            config = read_json_object(Path(path)) or {}
        storage = repo_folder(name.repo_id)
        missing = sum(file.size - count_downloaded_bytes(storage, commit, file) for file in files)
    return DownloadPlan(
        name=name,
        commit=commit,
        files=files,
        config=config,
        missing_bytes=missing,
    )


def _select_files(name: HubName, listing: Mapping[str, Any]) -> list[str]:
    """Returns the files of the model, or of one quantization of a repository in GGUF and its
    projector."""
    selected = required_files.select_files(listing, name.subfolder)
    has_weights = any(map(required_files.is_weights_file, selected))
    if name.quantization is not None or (not has_weights and required_files.has_gguf(listing)):
        found = required_files.select_gguf(str(name), listing, name.quantization)
        return found + required_files.select_projector(found[0], listing)
    required_files.check_loadable(str(name), listing, name.subfolder)
    return selected


def count_downloaded_bytes(storage: Path, commit: str, file: RemoteFile) -> int:
    """Returns the number of bytes of a file that do not need to be downloaded."""
    paths = [storage / "snapshots" / commit / file.path]
    if file.sha256 is not None:
        paths = [storage / "blobs" / file.sha256, storage / "blobs" / f"{file.sha256}.incomplete"]
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    return min(sizes[0], file.size) if sizes else 0


def _parse_file(name: HubName, sibling: Any) -> RemoteFile:
    """Parses a listed file. Values from the hub become parts of local paths, so their format is
    checked."""
    sha256 = None if sibling.lfs is None else sibling.lfs.sha256
    size = sibling.size if sibling.lfs is None else sibling.lfs.size
    if not isinstance(size, int) or not (sha256 is None or _SHA256.fullmatch(sha256)):
        raise model_error(
            name, f"has no size or digest for {sibling.rfilename} in the hub's listing"
        )
    return RemoteFile(
        path=sibling.rfilename, size=size, sha256=sha256, git_sha1=sibling.blob_id or ""
    )
