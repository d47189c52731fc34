"""Everything that was decided at start.

Knows: names, defaults, units. Frozen: nobody changes a setting while the server runs.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from app.core.errors import AppError, ErrorKind

LOOPBACK_ORIGIN_REGEX = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"

# of a page: lower case, without the default port · of a program with an embedded browser, such as
# app://obsidian.md
_ORIGIN = re.compile(
    r"http://(?!.*:80$)[^\s/?#@\\,*A-Z]+|https://(?!.*:443$)[^\s/?#@\\,*A-Z]+"
    r"|(?!https?:)[a-z][a-z0-9+.-]*://[^\s/?#@\\,*]*",
    re.ASCII,
)

_HOST_NAME = re.compile(r"\.?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*", re.ASCII)
_MAX_HOST_NAME_LENGTH = 255

MEBIBYTE = 1 << 20


CachePolicy = Literal["single", "slots", "radix"]
QuantizationBits = Literal[4, 8]
RunnerKind = Literal["process", "thread"]
LogFormat = Literal["human", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

KEEP_ALIVE_FOREVER = math.inf


def is_origin(text: str) -> bool:
    """Whether `text` is an origin as browsers serialise it (RFC 6454, 6.2); "*" is not."""
    return _ORIGIN.fullmatch(text) is not None


def is_host_name(text: str) -> bool:
    """Whether `text` is a host name in any case, or, with a leading dot, a domain."""
    return len(text) <= _MAX_HOST_NAME_LENGTH and _HOST_NAME.fullmatch(text.lower()) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One model that was named at start, and what holds for it alone; None is what holds for all.

    name: a folder, a hub id or an Ollama name. alias: what clients call it; None is its own name.
    preload: load it at start, without waiting for a request. pinned: do that, and never evict
    it."""

    name: str
    alias: str | None = None
    preload: bool = False
    pinned: bool = False
    keep_alive: float | None = None
    quantize: QuantizationBits | None = None
    parallel: int | None = None
    context: int | None = None
    memory: int | None = None
    cache: CachePolicy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """models: those that are served; none is the built-in model, and the first one is loaded at
    start. installed: serve every model that is on this machine, on demand. pull: download a model
    that is not here without asking. runner: whether a model runs in a process of its own or on a
    thread of ours. keep_alive: seconds that a model stays loaded without requests; None is forever
    for those named at start and five minutes for others. max_loaded: models in memory at once.
    load_timeout: seconds that a load may take without getting on. load_wait: seconds that a
    request which is not streamed waits for its model.

    host, port: where to listen. tls_cert, tls_key: PEM files. cors_origins: further origins of
    browser pages that may call us (loopback always may). allowed_hosts: further names under which
    we may be addressed. api_keys: file of hashed keys. allow_anyone: listen beyond loopback though
    there are no keys.

    quantize: bits that unquantised weights are brought to while they are loaded.

    parallel: sequences that run at once; None suits memory and device. max_queue: requests that may
    wait for one of these places; one more is refused. context: positions of one sequence; None is
    what the model was made for. context_shift: a sequence that fills its context goes on without
    the older half of it (slots only). memory: bytes for weights, KV caches, cached prefixes and
    working space together, of all models; None suits the device.

    cache: the prefix cache policy; None is single for one sequence, else radix. multi_user: slots
    are chosen for many users, not for one. exact: prefill on a fixed grid of positions, so that a
    cached answer equals an uncached one to the bit. prefill_chunk: prompt tokens per engine step,
    and so the longest stretch that cannot be cancelled; None suits the device.

    watchdog: seconds without a turn of the engine after which it is reported as stalled, and in a
    process of its own replaced. max_body: bytes of a request body. max_connections: open at once.
    header_timeout, body_timeout: seconds in which a request's head, and its body, must be here.
    A client that has read nothing of its answer for body_timeout is cut off.
    max_per_key: answers that one key may have in the making at once. deadline: seconds from a
    request's arrival to the end of its answer; past it, an error. max_time: seconds of generation,
    and max_tokens: tokens, after which an answer is cut like one that reached its own limit.
    drain: seconds that running answers get to end when the server is told to stop. ping: seconds
    of silence on a stream before a comment is sent.

    log_format, log_level, access_log: how and what is logged. otlp: address of an OpenTelemetry
    collector for traces. debug: log what helps to find a fault, pieces of prompts included."""

    models: tuple[ModelSettings, ...] = ()
    installed: bool = False
    pull: bool = False
    runner: RunnerKind = "process"
    keep_alive: float | None = None
    max_loaded: int | None = None
    load_timeout: float = 300.0
    load_wait: float = 60.0
    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: str | None = None
    tls_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    api_keys: str | None = None
    allow_anyone: bool = False
    quantize: QuantizationBits | None = None
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
    max_connections: int = 1024
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    max_per_key: int | None = None
    deadline: float | None = None
    max_time: float | None = None
    max_tokens: int | None = None
    drain: float = 30.0
    ping: float = 10.0
    log_format: LogFormat = "human"
    log_level: LogLevel = "info"
    access_log: bool = True
    otlp: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        """Raises AppError(INVALID), whose param is the field to begin with, where settings exclude
        each other: whoever holds Settings holds some that can be obeyed."""
        for field, why in (*_find_conflicts(self), *_find_model_conflicts(self)):
            raise AppError(ErrorKind.INVALID, why, param=field)

    @property
    def multi_model(self) -> bool:
        """Whether more than one model may be in memory, so that they share the device."""
        return self.installed or len(self.models) > 1

    def for_model(self, model: ModelSettings) -> "Settings":
        """What holds for one model: its own where it has some, else everybody's. The memory of all
        is not that of one, where there are several."""
        own = _model_overrides(model)
        if self.multi_model:
            own.setdefault("memory", None)
        return replace(self, models=(model,), installed=False, **own)


def _model_overrides(model: ModelSettings) -> dict[str, Any]:
    """What is said of it alone, of that which may be said of all."""
    return {
        name: value
        for name in ("keep_alive", "quantize", "parallel", "context", "memory", "cache")
        if (value := getattr(model, name)) is not None
    }


def _find_conflicts(settings: Settings) -> Iterator[tuple[str, str]]:
    """A field, and why it cannot be obeyed beside the others."""
    if settings.context_shift and settings.cache != "slots":
        why = "--context-shift needs --cache slots"
        yield "context_shift", why
    if settings.context_shift and settings.exact:
        yield (
            "context_shift",
            "--context-shift and --exact cannot be combined: the tokens that a shift keeps were "
            "computed with the discarded ones",
        )
    if settings.multi_user and settings.cache != "slots":
        yield "multi_user", "--multi-user needs --cache slots"
    if settings.cache == "single" and settings.parallel not in (None, 1):
        yield (
            "cache",
            f"--cache single supports one sequence, but --parallel is {settings.parallel}: "
            "use --cache slots or --cache radix",
        )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        given = "tls_cert" if settings.tls_key is None else "tls_key"
        yield given, "--tls-cert and --tls-key must be given together"
    if settings.runner == "thread" and (settings.installed or len(settings.models) > 1):
        yield "runner", "--runner thread supports one model: use --runner process for several"


def _find_model_conflicts(settings: Settings) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for model in settings.models:
        name = model.alias or model.name
        if name in seen:
            why = f"two models are named {name!r}: give one of them another alias"
            yield "models", why
        seen.add(name)
        if model.memory is not None and model.memory > (settings.memory or math.inf):
            yield "models", f"{name}: its memory exceeds --memory, the budget of all models"
        try:
            replace(settings, models=(), **_model_overrides(model))
        except AppError as error:
            yield "models", f"{name}: {error.message}"
    always = sum(model.preload or model.pinned for model in settings.models)
    if settings.max_loaded is not None and always > settings.max_loaded:
        yield (
            "max_loaded",
            f"{always} models are pinned or preloaded, but --max-loaded allows only "
            f"{settings.max_loaded} in memory",
        )
