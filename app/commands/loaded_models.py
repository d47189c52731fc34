"""`mlxrunner ps` and `mlxrunner stop`: lists the models that the running server has loaded, and
unloads one.

Knows: the layout of the table, the name under which a model is served. Must not know: why a model
is loaded or unloaded, what unloading it does.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from app.commands.servers import (
    RunningServer,
    find_configured,
    find_served_name,
    is_loaded,
    require_server,
)
from app.core.errors import AppError, ErrorKind, escape_control_characters, suggest
from app.core.settings import Settings
from app.core.units import format_bytes, format_duration

_HEADER = ("NAME", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """A row of the list. size: in bytes. processor: "CPU" or "GPU"; "" until the model is loaded.
    expires_at: the Unix time at which the model will be unloaded; None for never. state: one of
    `ModelPhase`. progress: the progress of the load, in percent."""

    name: str
    state: str
    size: int
    processor: str
    context_length: int
    expires_at: float | None
    progress: int | None = None


def list_running(settings: Settings, *, as_json: bool) -> int:
    """Prints the list and returns the exit status. Raises AppError if no server is running, or it
    requires a key."""
    rows = query_running_models(require_server(settings, "ps"))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    for line in render_running_models(rows, time.time()):
        print(line)
    return 0


def query_running_models(server: RunningServer) -> list[RunningModel]:
    """Returns the models that are loaded, or are being loaded or unloaded."""
    cards = {name: card for name, card in server.list_models().items() if is_loaded(card)}
    loaded: Mapping[str, Mapping[str, Any]] = {
        str(entry.get("name")).removesuffix(":latest"): entry
        for entry in server.get("/api/ps").get("models", ())
    }
    return [_build_row(name, card, loaded.get(name)) for name, card in cards.items()]


def render_running_models(rows: Sequence[RunningModel], now: float) -> Iterator[str]:
    """Yields the lines of the table. now: the Unix time."""
    cells = [_HEADER, *(_render_row(row, now) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADER))]
    for row in cells:
        padded = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield escape_control_characters("  ".join(padded).rstrip())


def _build_row(name: str, card: Mapping[str, Any], entry: Mapping[str, Any] | None) -> RunningModel:
    processor = ""
    if entry is not None:
        processor = "GPU" if entry.get("size_vram") else "CPU"
    known = entry or {}
    return RunningModel(
        name=name,
        state=str(card.get("state")),
        size=int(card.get("memory") or known.get("size") or 0),
        processor=processor,
        context_length=int(known.get("context_length") or card.get("context_length") or 0),
        expires_at=card.get("expires_at"),
        progress=card.get("progress"),
    )


def _render_row(row: RunningModel, now: float) -> tuple[str, ...]:
    size = format_bytes(row.size) if row.size else "-"
    return (row.name, size, row.processor or "-", str(row.context_length), _render_until(row, now))


def _render_until(row: RunningModel, now: float) -> str:
    if row.state in ("queued", "loading"):
        return row.state if not row.progress else f"{row.state} {row.progress} %"
    if row.state != "ready":
        return row.state
    if row.expires_at is None:
        return "forever"
    clock = datetime.fromtimestamp(row.expires_at).strftime("%H:%M:%S")
    return f"{clock} (in {format_duration(max(row.expires_at - now, 0))})"


def stop(name: str, settings: Settings) -> int:
    """Unloads a model and returns the exit status. Its running requests fail. Raises AppError if no
    server is running, it does not serve the model, or the key in the environment is not an
    admin key."""
    server = require_server(settings, "stop")
    cards = server.list_models()
    served = find_served_name(cards, find_configured(settings, name))
    if served is None:
        listed = ", ".join(cards) or "no model"
        raise AppError(
            ErrorKind.MODEL_NOT_FOUND,
            f"the server at {server.url} does not serve {name}, but {listed}{suggest(name, cards)}",
        )
    if not is_loaded(cards[served]):
        print(f"{served} is not loaded")
        return 0
    server.send("POST", "/v1/models/unload", {"model": served})
    print(f"{served} is unloaded")
    return 0
