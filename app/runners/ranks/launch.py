"""Detects whether this process is one of several ranks that run one model together.

Knows: the variables that `mlx.launch` and MPI set for each process (MLX 0.32:
mlx/_distributed_utils/launch.py; Open MPI's OMPI_COMM_WORLD_*). Must not know: MLX, sockets.
"""

import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The launch of a rank.

    rank: the rank of this process, counted from 0.
    size: the number of ranks, at least 2.
    host: the address of rank 0 for the other ranks; None if unknown (MPI).
    """

    rank: int
    size: int
    host: str | None


def detect_launch(environ: Mapping[str, str]) -> Launch | None:
    """Reads the launch from the environment. Returns None for a single process. Raises
    AppError(INVALID) for inconsistent variables."""
    if "MLX_RANK" in environ:
        rank = _read_int(environ, "MLX_RANK")
        size, host = _read_peers(environ)
    elif "OMPI_COMM_WORLD_RANK" in environ:
        rank = _read_int(environ, "OMPI_COMM_WORLD_RANK")
        size, host = _read_int(environ, "OMPI_COMM_WORLD_SIZE"), None
    else:
        return None
    if size < 2:
        return None
    if rank >= size:
        raise AppError(
            ErrorKind.INVALID, f"rank {rank} is out of range: the {size} ranks are counted from 0"
        )
    return Launch(rank=rank, size=size, host=host)


def watch_launcher(environ: Mapping[str, str], on_exit: Callable[[], None]) -> None:
    """Watches for the exit of `mlx.launch`, which holds the other end of the stdin pipe.
    On a remote machine, ssh sends SIGHUP instead. `on_exit` is called on another thread."""

    def wait() -> None:
        # os.read is used instead of sys.stdin, because a thread that reads sys.stdin blocks the
        # exit of the interpreter.
        while os.read(0, 1 << 16):
            pass
        log.error("mlx.launch exited: stopping this rank")
        on_exit()

    if "MLX_RANK" in environ and stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=wait, name="launcher", daemon=True).start()


def restrict_to_one_model(settings: Settings) -> Settings:
    """Returns the settings of a rank. A rank serves one model, whose engine runs on a thread,
    because each rank is already a process. Raises AppError(INVALID) for several models."""
    if settings.multi_model:
        raise AppError(
            ErrorKind.INVALID,
            "the ranks of one launch serve a single model: name exactly one model, without "
            "--installed",
        )
    return replace(settings, runner="thread")


def _read_peers(environ: Mapping[str, str]) -> tuple[int, str | None]:
    """Returns the number of ranks and the address of rank 0, from the environment variables of the
    MLX backends."""
    if file := environ.get("MLX_IBV_DEVICES"):
        address = environ.get("MLX_JACCL_COORDINATOR", "")
        return len(_read_rank_list("MLX_IBV_DEVICES", file)), address.rpartition(":")[0] or None
    if file := environ.get("MLX_HOSTFILE"):
        hosts = _read_rank_list("MLX_HOSTFILE", file)
        return len(hosts), _first_address(hosts)
    if "MLX_WORLD_SIZE" in environ:
        return _read_int(environ, "MLX_WORLD_SIZE"), environ.get("NCCL_HOST_IP")
    return 1, None


def _read_rank_list(name: str, file: str) -> list[Any]:
    """Returns the entries of the file, one per rank. With a single rank, the file is empty."""
    try:
        text = Path(file).read_text("utf-8").strip()
        found: Any = json.loads(text) if text else []
    except (OSError, ValueError) as error:
        raise AppError(ErrorKind.INVALID, f"{name}: cannot read {file}: {error}") from None
    if not isinstance(found, list):
        raise AppError(ErrorKind.INVALID, f"{name}: {file} does not contain a list of ranks")
    return found  # pyright: ignore[reportUnknownVariableType]  # parsed JSON


def _first_address(hosts: list[Any]) -> str | None:
    """Returns the address of rank 0 from the host file of a ring, which lists the addresses and
    ports of each rank."""
    match hosts:
        case [[str(address), *_], *_]:
            return address.rpartition(":")[0] or None
        case _:
            return None


def _read_int(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise AppError(ErrorKind.INVALID, f"{name} must be a number, not {text!r}")
    return int(text)
