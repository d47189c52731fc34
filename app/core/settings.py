"""Everything that was decided at start.

Knows: names, defaults, units. Frozen: nobody changes a setting while the server runs.
"""

from dataclasses import dataclass
from typing import Literal

from app.core.errors import AppError, Kind

LOOPBACK_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"

MEBIBYTE = 1 << 20


CachePolicy = Literal["single", "slots", "radix"]
Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """model: a folder, a hub id or an Ollama name; None serves the built-in model. pull: download
    a model that is not here without asking. quantize: bits that unquantised weights are brought
    to while they are loaded. host, port: where to listen. cors_origins: further origins of
    browser pages that may call us (loopback always may).

    parallel: sequences that run at once; None suits memory and device. max_queue: requests that may
    wait for one of these places; one more is refused. context: positions of one sequence; None is
    what the model was made for. context_shift: a sequence that fills its context goes on without
    the older half of it (slots only). memory: bytes for weights, KV caches, cached prefixes and
    working space together; None suits the device.

    cache: the prefix cache policy; None is single for one sequence, else radix. multi_user: slots
    are chosen for many users, not for one. exact: prefill on a fixed grid of positions, so that a
    cached answer equals an uncached one to the bit. prefill_chunk: prompt tokens per engine step,
    and so the longest stretch that cannot be cancelled; None suits the device.

    watchdog: seconds without a turn of the engine after which it is reported as stalled. max_body:
    bytes of a request body. keep_alive: seconds of silence on a stream before a comment is sent.
    debug: log what helps to find a fault, pieces of prompts included."""

    model: str | None = None
    pull: bool = False
    quantize: Bits | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    cors_origins: tuple[str, ...] = ()
    parallel: int | None = None
    max_queue: int = 64
    context: int | None = None
    context_shift: bool = False
    memory: int | None = None
    cache: CachePolicy | None = None
    multi_user: bool = False
    exact: bool = False
    prefill_chunk: int | None = None
    watchdog: float = 60.0
    max_body: int = 10 * MEBIBYTE
    keep_alive: float = 10.0
    debug: bool = False

    def __post_init__(self) -> None:
        """Raises AppError(INVALID) where two settings exclude each other: whoever holds Settings
        holds some that can be obeyed."""
        for refused, why in (
            (
                self.context_shift and self.cache != "slots",
                "--context-shift needs --cache slots: only slots are cut in their middle",
            ),
            (
                self.context_shift and self.exact,
                "--context-shift and --exact exclude each other: what stays behind a cut was "
                "computed with what is gone",
            ),
            (
                self.multi_user and self.cache != "slots",
                "--multi-user needs --cache slots: it says how slots are chosen",
            ),
            (
                self.cache == "single" and self.parallel not in (None, 1),
                f"--cache single is for one sequence, and --parallel asks for {self.parallel}: "
                "use --cache slots or --cache radix",
            ),
        ):
            if refused:
                raise AppError(Kind.INVALID, why)
