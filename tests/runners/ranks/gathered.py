"""Ranks without a launcher: they compute alone, and talk over real sockets."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from app import store
from app.core.files import ModelFiles
from app.core.settings import Settings
from app.engine.describe import complete
from app.engine.memory import Memory
from app.runners.ranks.launch import Launch
from app.runners.ranks.line import Hello, Line, Welcome
from app.runners.ranks.meeting import Meeting, traits_of

PATIENCE = 20.0
SETTINGS = Settings(runner="thread", memory=1 << 30, parallel=2)


class Ranks:
    """One of two, whose sums lack the other's summand: the answers are wrong, and nobody asks."""

    def __init__(self, rank: int = 0, told: bytes = b"") -> None:
        self.rank, self.size = rank, 2
        self.words = told

    def total(self, x: mx.array) -> mx.array:
        return x

    def agreed(self, tokens: mx.array) -> mx.array:
        return tokens

    def told(self, words: bytes, length: int) -> bytes:
        self.words = words or self.words
        return self.words

    def settled(self, settings: Settings) -> Settings:
        return replace(settings, memory=settings.memory or 1 << 30)

    def measured(self, memory: Memory) -> Memory:
        return memory


def launch(rank: int) -> Launch:
    return Launch(rank=rank, size=2, host="127.0.0.1")


def files(folder: Path) -> ModelFiles:
    return complete(store.resolve(str(folder)))


def connected(port: int) -> Line:
    line = Line(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
    line.patient(PATIENCE)
    return line


def greeted(meeting: Meeting, model: ModelFiles, **changes: Any) -> tuple[Line, Welcome]:
    """The line of a rank 1 that said hello, and what it heard. changes: of its settings, or its
    secret."""
    secret = changes.pop("secret", meeting.secret)
    traits = traits_of(model, replace(SETTINGS, **changes))
    line = connected(meeting.port)
    line.answer(Hello(secret=secret, rank=1, host="studio", traits=traits))
    heard = next(line.told(), None)
    if not isinstance(heard, Welcome) or heard.refused is not None:
        line.close()
    assert isinstance(heard, Welcome)
    return line, heard
