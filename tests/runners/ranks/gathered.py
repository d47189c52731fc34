"""Ranks without a launcher, which compute alone and communicate over real sockets."""

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

PATIENCE = 30.0
SETTINGS = Settings(runner="thread", memory=1 << 30, parallel=2)


class FakeGroup:
    """A group of two whose sums lack the other rank's part: answers are wrong, and not checked."""

    def __init__(self, rank: int = 0, data: bytes = b"") -> None:
        self.rank, self.size = rank, 2
        self.data = data

    def all_sum(self, x: mx.array) -> mx.array:
        return x

    def broadcast_tokens(self, tokens: mx.array) -> mx.array:
        return tokens

    def broadcast_bytes(self, data: bytes, length: int) -> bytes:
        self.data = data or self.data
        return self.data

    def reconcile_settings(self, settings: Settings, choose_chunk: object) -> Settings:
        return replace(settings, memory=settings.memory or 1 << 30)

    def reconcile_memory(self, memory: MemoryProfile) -> MemoryProfile:
        return memory


def launch(rank: int) -> Launch:
    return Launch(rank=rank, size=2, host="127.0.0.1")


def files(folder: Path) -> ModelFiles:
    return complete_config(store.resolve(str(folder)))


def connect(port: int) -> RankConnection:
    connection = RankConnection(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
    connection.set_timeout(PATIENCE)
    return connection


def send_hello(
    rendezvous: RendezvousInfo, model: ModelFiles, **changes: Any
) -> tuple[RankConnection, HelloReply]:
    """Connect as rank 1 and say hello. Returns the connection and the reply. changes: of settings,
    or the secret."""
    secret = changes.pop("secret", rendezvous.secret)
    traits = collect_traits(model, replace(SETTINGS, **changes))
    connection = connect(rendezvous.port)
    connection.send(Hello(secret=secret, rank=1, host="studio", traits=traits))
    reply = next(connection.read_from_leader(), None)
    if not isinstance(reply, HelloReply) or reply.refused is not None:
        connection.close()
    assert isinstance(reply, HelloReply)
    return connection, reply
