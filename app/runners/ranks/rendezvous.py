"""Rendezvous: joins the ranks of a launch, and collects the values that must be equal on all ranks.

Knows: the address that rank 0 broadcasts, the values that must be equal on all ranks. Must
not know: connections, engines.
"""

import contextlib
import hashlib
import json
import logging
import signal
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Self

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.engine.distributed import DistributedGroup, join_group
from app.runners.ranks.launch import Launch

log = logging.getLogger(__name__)

# The size of an encoded `RendezvousInfo` in bytes.
RENDEZVOUS_BYTES = 512

# The settings that affect the computation. `memory` may differ between ranks.
_SHARED_SETTINGS = (
    "quantize",
    "kv",
    "activations",
    "kv_layout",
    "experimental_metal",
    "parallel",
    "context",
    "context_shift",
    "cache",
    "multi_user",
    "exact",
    "prefill_chunk",
)
_PACKAGES = ("mlxrunner", "mlx", "llguidance")


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousInfo:
    """The address at which rank 0 accepts connections.

    secret: proves that a peer belongs to the group.
    host: the host name of rank 0.
    """

    secret: str
    port: int
    host: str

    def encode(self) -> bytes:
        return f"{self.secret} {self.port} {self.host}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        secret, port, host = data.decode().split(" ", 2)
        return cls(secret=secret, port=int(port), host=host)


def join_rank_group(launch: Launch) -> DistributedGroup:
    """Joins the distributed group, and returns when all ranks have joined. Raises AppError(ENGINE)
    if ranks cannot be reached."""
    log.info("rank %d of %d: waiting for the other ranks", launch.rank, launch.size)
    try:
        with _interruptible():
            ranks = join_group()
    except (RuntimeError, ValueError) as error:
        raise AppError(
            ErrorKind.ENGINE, f"the ranks cannot connect to each other: {error}"
        ) from error
    if (ranks.rank, ranks.size) != (launch.rank, launch.size):
        raise AppError(
            ErrorKind.ENGINE,
            f"this process was started as rank {launch.rank} of {launch.size}, but MLX reports "
            f"rank {ranks.rank} of {ranks.size}: was MLX built with the requested backend?",
        )
    return ranks


def collect_traits(files: ModelFiles, settings: Settings) -> Mapping[str, str]:
    """Returns the values that must be equal on all ranks, by the names used in error messages."""
    model_digest = hashlib.sha256(json.dumps(files.config, sort_keys=True, default=str).encode())
    with contextlib.suppress(OSError):  # the load reports unreadable files
        model_digest.update(files.tokenizer_path.read_bytes())
    model_digest.update(str(files.weight_bytes).encode())
    return {
        **{f"{name}, version": version(name) for name in _PACKAGES},
        "the model": f"{files.name} ({model_digest.hexdigest()[:12]})",
        **{
            f"--{name.replace('_', '-')}": str(getattr(settings, name)) for name in _SHARED_SETTINGS
        },
    }


@contextlib.contextmanager
def _interruptible() -> Generator[None]:
    """Makes Ctrl-C end the process while MLX blocks the main thread, because Python signal handlers
    cannot run during that time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
