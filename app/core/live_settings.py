"""The settings of a running server, of which a reload replaces some.

Knows: the settings, their listeners. Must not know: where settings come from, what listeners do.
"""

from collections.abc import Callable
from dataclasses import fields, replace

from app.core.settings import Settings

# The settings that a reload applies at once. All others take effect after a restart.
RELOADABLE = frozenset(
    {
        "models",
        "defaults",
        "keep_alive",
        "max_queue",
        "max_body",
        "max_connections",
        "header_timeout",
        "body_timeout",
        "max_per_key",
        "deadline",
        "max_time",
        "max_tokens",
        "log_level",
        "access_log",
    }
)


class LiveSettings:
    """`current` are the settings that are in effect. All code runs on the event loop."""

    def __init__(self, settings: Settings) -> None:
        self.current = settings
        self._listeners: list[Callable[[Settings], None]] = []

    def subscribe(self, listener: Callable[[Settings], None]) -> None:
        """Calls `listener` with the settings after each reload."""
        self._listeners.append(listener)

    def replace(self, settings: Settings) -> None:
        self.current = settings
        for listener in self._listeners:
            listener(settings)


def merge_reloaded(current: Settings, wanted: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Returns the settings after a reload, and the names of the settings that have changed but need
    a restart. Raises AppError(INVALID) if the result has a conflict."""
    kept = {
        field.name: getattr(current, field.name)
        for field in fields(Settings)
        if field.name not in RELOADABLE
        and getattr(current, field.name) != getattr(wanted, field.name)
    }
    return replace(wanted, **kept), tuple(kept)


def needs_new_process(before: Settings, after: Settings) -> bool:
    """Returns whether a model with the settings `after` must be loaded anew. Both are the settings
    of one model."""
    return any(
        getattr(before, field.name) != getattr(after, field.name)
        for field in fields(Settings)
        if field.name not in RELOADABLE
    )
