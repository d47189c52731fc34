"""`mlxrunner pull`: downloads a model from the hub. `serve` uses it for models that are missing.

Knows: the messages before and after a download, the question at the terminal. Must not know: how
files are downloaded.
"""

import sys

import models
from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.core.units import format_bytes
from app.store.hub import cache
from app.store.hub.download import download
from app.store.hub.download_plan import DownloadPlan, plan_download
from app.store.model_names import HubName, ModelNotFoundError, is_revision, parse_hub_name
from models.base import ModelError


def resolve_or_download(settings: Settings) -> ModelFiles:
    """Finds a model, and downloads a missing one if --pull is set or the user confirms it.

    settings: the settings of one model, as `Settings.for_model` returns them. Raises AppError."""
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
    print(f"mlxrunner: {reason}\n{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def pull(name: str, revision: str | None) -> int:
    """Downloads the missing files of a model, verifies all files and returns the exit status.

    revision: a branch, tag or commit; None is the one in `name`, or the main branch. Raises
    AppError."""
    wanted = _parse_hub_name(name, revision)
    files = download_model(plan_model_download(wanted))
    print(f"{wanted} is complete: {format_bytes(files.weight_bytes)} of weights in {files.path}")
    return 0


def plan_model_download(name: HubName) -> DownloadPlan:
    """Plans the download of a model. Raises AppError for a model that could not be served, so that
    it is rejected before the download, not after it."""
    offer = plan_download(name)
    try:
        models.read_info(offer.config)
    except ModelError as error:
        raise AppError(ErrorKind.MODEL_FILES, f"{name}: {error}; nothing was downloaded") from error
    return offer


def download_model(offer: DownloadPlan) -> ModelFiles:
    """Downloads the files of a plan and reports the progress on stderr. Raises AppError."""
    name = offer.name
    left = (
        f"{format_bytes(offer.missing_bytes)} to download"
        if offer.missing_bytes
        else "already downloaded, verifying"
    )
    print(
        f"{name} at commit {offer.commit[:12]}: {len(offer.files)} files, "
        f"{format_bytes(offer.total_bytes)}, "
        f"{left}",
        file=sys.stderr,
    )
    try:
        download(offer)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the command again to resume the download") from None
    files = cache.find(name)
    assert files is not None, "it was downloaded just now"
    return files


def _parse_hub_name(text: str, revision: str | None) -> HubName:
    name = parse_hub_name(text)
    if name is None:
        raise AppError(
            ErrorKind.MODEL_NOT_FOUND,
            f"{text!r} is not a model name of the hub (org/name or org/name@revision); "
            "use `ollama pull` for Ollama models",
        )
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
    return HubName(repo_id=name.repo_id, revision=revision)
