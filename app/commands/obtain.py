"""The model that `serve` is to serve, downloaded first where a person wants that.

Knows: when a download may begin. Must not know: how it is done.
"""

import sys

from app import store
from app.core.amounts import in_bytes
from app.core.files import ModelFiles
from app.core.settings import Settings
from app.store.names import NotHere


def obtain(settings: Settings) -> ModelFiles:
    """settings: of one model, as `Settings.of` gives them. What is not here is downloaded where
    --pull says so, or a person at the terminal. Raises AppError."""
    try:
        return store.resolve(settings.models[0].name if settings.models else None)
    except NotHere as missing:
        # nothing is asked, of a person or of the hub, where nobody sits
        if missing.hub is None or not (settings.pull or _somebody_sits_here()):
            raise
        # huggingface_hub takes a sixth of a second to import, which most starts need not spend
        from app.commands.pull import fetched, offered

        offer = offered(missing.hub)
        question = f"download {offer.name} ({in_bytes(offer.missing)})?"
        if not settings.pull and not _agreed(missing.message, question):
            raise
        return fetched(offer)


def _somebody_sits_here() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _agreed(why: str, question: str) -> bool:
    print(f"mlxrunner: {why}\n{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
