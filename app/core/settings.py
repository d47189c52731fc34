"""Everything that was decided at start.

Knows: names, defaults, units. Frozen: nobody changes a setting while the server runs.
"""

from dataclasses import dataclass
from typing import Literal

LOOPBACK_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """model: a folder; None serves the built-in model. host, port: where to listen.
    cors_origins: further origins of browser pages that may call us (loopback always may).
    cache: the prefix cache policy. exact: prefill on a fixed grid of positions, so that a cached
    answer equals an uncached one to the bit. prefill_chunk: prompt tokens per engine step, and so
    the longest stretch that cannot be cancelled; None suits the device. max_body: bytes of a
    request body. keep_alive: seconds of silence on a stream before a comment is sent."""

    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    cors_origins: tuple[str, ...] = ()
    cache: Literal["single"] = "single"
    exact: bool = False
    prefill_chunk: int | None = None
    max_body: int = 10 * MEBIBYTE
    keep_alive: float = 10.0
