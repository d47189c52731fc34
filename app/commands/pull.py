"""`mlxrunner pull`: a model from the hub, because a person said so.

Knows: what is told before and after. Must not know: how files get here.
"""

import sys

import models
from app.core.amounts import in_bytes
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.store.hub import cached
from app.store.hub.download import fetch
from app.store.hub.offer import Offer, look
from app.store.names import HubName, hub_name, is_revision
from models.base import ModelError


def pull(name: str, revision: str | None) -> int:
    """Download a model, or what is missing of it, and check all of it. The exit status; raises
    AppError."""
    wanted = _wanted(name, revision)
    files = fetched(offered(wanted))
    print(f"{wanted} is complete: {in_bytes(files.stored)} of weights in {files.path}")
    return 0


def offered(name: HubName) -> Offer:
    """What the hub has. Raises AppError for what could not be served: better now than after the
    download."""
    offer = look(name)
    try:
        models.facts(offer.config)
    except ModelError as error:
        raise AppError(Kind.MODEL_FILES, f"{name}: {error}; nothing was downloaded") from error
    return offer


def fetched(offer: Offer) -> ModelFiles:
    """Download it, telling what and how far. Raises AppError."""
    name = offer.name
    left = (
        f"{in_bytes(offer.missing)} to download"
        if offer.missing
        else "already downloaded, verifying"
    )
    print(
        f"{name} at commit {offer.commit[:12]}: {len(offer.files)} files, {in_bytes(offer.size)}, "
        f"{left}",
        file=sys.stderr,
    )
    try:
        fetch(offer)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the command again to resume the download") from None
    files = cached.find(name)
    assert files is not None, "it was downloaded just now"
    return files


def _wanted(text: str, revision: str | None) -> HubName:
    name = hub_name(text)
    if name is None:
        raise AppError(
            Kind.MODEL_NOT_FOUND,
            f"{text!r} is not a model name of the hub (org/name or org/name@revision); "
            "use `ollama pull` for Ollama models",
        )
    if revision is None:
        return name
    if name.revision not in (None, revision):
        raise AppError(Kind.INVALID, f"{text} and --revision {revision} are different revisions")
    if not is_revision(revision):
        raise AppError(Kind.INVALID, f"{revision!r} is not the name of a branch, tag or commit")
    return HubName(repo=name.repo, revision=revision)
