"""The model that `serve` is to serve, downloaded first where a person wants that.

Knows: when a download may begin. Must not know: how it is done.
"""

import sys

from app import store
from app.core.amounts import format_bytes
from app.core.files import ModelFiles
from app.core.settings import Settings
from app.store.names import ModelNotFoundError


def resolve_or_download(settings: Settings) -> ModelFiles:
    """settings: of one model, as `Settings.for_model` gives them. What is not here is downloaded
    where --pull says so, or a person at the terminal. Raises AppError."""
    try:
        return store.resolve(settings.models[0].name if settings.models else None)
    except ModelNotFoundError as missing:
        # nothing is asked, of a person or of the hub, where nobody sits
        if missing.hub is None or not (settings.pull or _is_interactive()):
            raise
        # huggingface_hub takes a sixth of a second to import, which most starts need not spend
        from app.commands.pull import download_model, plan_model_download

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
