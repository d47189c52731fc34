"""`mlxrunner pull`: downloads a model from Hugging Face. `serve` also uses it for missing models.

Knows: the messages before and after a download, the prompt on the terminal. Must not know: the
download itself.
"""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.core.terminal import print_message
from app.core.units import format_bytes, pluralize
from app.engine.model_info import check_config
from app.store.library_names import resolve_hub_name
from app.store.model_names import (
    HubName,
    ModelNotFoundError,
    is_revision,
    parse_hub_name,
)

if TYPE_CHECKING:
    # The hub's library takes 10 MiB and a third of the server's start time, so app.store.hub is
    # imported only for a download.
    from app.store.hub.download_plan import DownloadPlan


def resolve_or_download(settings: Settings) -> ModelFiles:
    """Finds a model. If it is missing, downloads it if --pull is set or the user agrees.

    settings: the settings of one model, as returned by `Settings.for_model`. Raises AppError if the
    model cannot be found or downloaded.
    """
    try:
        return store.resolve(settings.models[0].name if settings.models else None)
    except ModelNotFoundError as missing:
        # without a terminal, neither prompt the user nor query the hub
        if missing.hub is None or not (settings.pull or _is_interactive()):
            raise
        offer = plan_model_download(missing.hub)
        question = f"download {offer.name} ({format_bytes(offer.missing_bytes)})?"
        if not settings.pull and not _confirm(missing.message, question):
            raise
        return download_model(offer)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _confirm(reason: str, question: str) -> bool:
    print_message(reason)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def pull(name: str, revision: str | None) -> int:
    """Downloads the missing files of a model, verifies all files and returns the exit status.

    name: on the hub, or in Ollama's library. revision: a branch, tag or commit; None is the
    revision in `name`, or the main branch. Raises AppError if the download fails.
    """
    wanted = _parse_hub_name(name, revision)
    files = download_model(plan_model_download(wanted))
    print(f"{wanted} is complete: {format_bytes(files.weight_bytes)} of weights in {files.path}")
    return 0


def plan_model_download(name: HubName) -> "DownloadPlan":
    """Plans the download of a model. Raises AppError for a model that could not be served, so that
    it is rejected before the download rather than after it."""
    from app.store.hub.download_plan import plan_download
    from app.store.hub.weight_headers import read_gguf_config

    offer = plan_download(name)
    check_config(str(name), read_gguf_config(offer) if offer.is_gguf else offer.config)
    return offer


def download_model(offer: "DownloadPlan") -> ModelFiles:
    """Downloads the files of a plan and reports the progress on stderr. Raises AppError if this
    fails."""
    from app.store.hub import cache
    from app.store.hub.download import download

    name = offer.name
    left = (
        f"{format_bytes(offer.missing_bytes)} to download"
        if offer.missing_bytes
        else "already downloaded, verifying"
    )
    print(
        f"{name} at commit {offer.commit[:12]}: {pluralize(len(offer.files), 'file')}, "
        f"{format_bytes(offer.total_bytes)}, "
        f"{left}",
        file=sys.stderr,
    )
    try:
        download(offer)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the command again to resume the download") from None
    files = cache.find(name)
    assert files is not None, "the model has just been downloaded"
    return files


def _parse_hub_name(text: str, revision: str | None) -> HubName:
    name = resolve_hub_name(text)
    if parse_hub_name(text) is None:
        print_message(f"{text} in MLX's format is {name}")
    if revision is None:
        return name
    if name.revision not in (None, revision):
        raise AppError(
            ErrorKind.INVALID, f"{text} and --revision {revision} are different revisions"
        )
    if not is_revision(revision):
        raise AppError(
            ErrorKind.INVALID, f"{revision!r} is not the name of a branch, tag or commit"
        )
    return replace(name, revision=revision)
