"""Ranks without a launcher: they compute alone, and talk over real sockets."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from app import store
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.engine.memory_profile import MemoryProfile
from app.engine.model_info import complete_config
from app.runners.ranks.launch import Launch
from app.runners.ranks.protocol import Hello, HelloReply, RankConnection
from app.runners.ranks.rendezvous import RendezvousInfo, collect_traits

PATIENCE = 20.0
SETTINGS = Settings(runner="thread", memory=1 << 30, parallel=2)


class FakeGroup:
    """One of two, whose sums lack the other's summand: the answers are wrong, and nobody asks."""

    def __init__(self, rank: int = 0, told: bytes = b"") -> None:
        self.rank, self.size = rank, 2
        self.words = told

    def all_sum(self, x: mx.array) -> mx.array:
        return x

    def broadcast_tokens(self, tokens: mx.array) -> mx.array:
        return tokens

    def broadcast_bytes(self, words: bytes, length: int) -> bytes:
        self.words = words or self.words
        return self.words

    def reconcile_settings(self, settings: Settings) -> Settings:
        return replace(settings, memory=settings.memory or 1 << 30)

    def reconcile_memory(self, memory: MemoryProfile) -> MemoryProfile:
        return memory


def launch(rank: int) -> Launch:
    return Launch(rank=rank, size=2, host="127.0.0.1")


def files(folder: Path) -> ModelFiles:
    return complete_config(store.resolve(str(folder)))


def connected(port: int) -> RankConnection:
    line = RankConnection(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
    line.set_timeout(PATIENCE)
    return line


def greeted(
    meeting: RendezvousInfo, model: ModelFiles, **changes: Any
) -> tuple[RankConnection, HelloReply]:
    """The line of a rank 1 that said hello, and what it heard. changes: of its settings, or its
    secret."""
    secret = changes.pop("secret", meeting.secret)
    traits = collect_traits(model, replace(SETTINGS, **changes))
    line = connected(meeting.port)
    line.send_to_leader(Hello(secret=secret, rank=1, host="studio", traits=traits))
    heard = next(line.read_from_leader(), None)
    if not isinstance(heard, HelloReply) or heard.refused is not None:
        line.close()
    assert isinstance(heard, HelloReply)
    return line, heard
