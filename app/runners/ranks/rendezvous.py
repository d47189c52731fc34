"""How ranks that were started together find out that they belong together.

Knows: what rank 0 tells the group, and what must be the same on all ranks. Must not know: lines,
engines.
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

# bytes in which a meeting is written down
RENDEZVOUS_BYTES = 512

# settings that decide what is computed; memory may differ
_SHARED_SETTINGS = (
    "quantize",
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
    """Where rank 0 waits for lines. secret: by which it knows those of the group. host: its
    name."""

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
    """All ranks, once all are there. Raises AppError(ENGINE) where they cannot be reached."""
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
    """What must be the same on all ranks, by the name by which a difference is told."""
    told = hashlib.sha256(json.dumps(files.config, sort_keys=True, default=str).encode())
    with contextlib.suppress(OSError):  # found out, and told, when it is read
        told.update(files.tokenizer_path.read_bytes())
    told.update(str(files.weight_bytes).encode())
    return {
        **{f"{name}, version": version(name) for name in _PACKAGES},
        "the model": f"{files.name} ({told.hexdigest()[:12]})",
        **{
            f"--{name.replace('_', '-')}": str(getattr(settings, name)) for name in _SHARED_SETTINGS
        },
    }


@contextlib.contextmanager
def _interruptible() -> Generator[None]:
    """Ctrl-C ends the process while MLX holds the interpreter: no handler of Python's would run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
