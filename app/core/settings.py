"""The settings of a server and of its models. A reload replaces some of them.

Knows: names, defaults, units, conflicts between settings, listeners of a reload. Must not know:
flags, files, environment variables.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelDefaults
from app.core.sampling_params import DEFAULT_MAX_LOGPROBS

# the origin of a web page, in lower case and without the default port · or the origin of a program
# with an embedded browser, for example app://obsidian.md
_ORIGIN = re.compile(
    r"http://(?!.*:80$)[^\s/?#@\\,*A-Z]+|https://(?!.*:443$)[^\s/?#@\\,*A-Z]+"
    r"|(?!https?:)[a-z][a-z0-9+.-]*://[^\s/?#@\\,*]*",
    re.ASCII,
)

_HOST_NAME = re.compile(r"\.?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*", re.ASCII)
_MAX_HOST_NAME_LENGTH = 255

_ADAPTER_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)

MEBIBYTE = 1 << 20

CachePolicy = Literal["single", "slots", "radix"]
QuantizationBits = Literal[4, 8]
KVPrecision = Literal["auto", "float32", "bfloat16", "float16"]
ActivationBits = Literal[24, 16, 8]
ActivationPrecision = Literal["auto", ActivationBits]
KVLayout = Literal["auto", "rows", "slab"]
RunnerKind = Literal["process", "thread"]
ReasoningField = Literal["reasoning_content", "reasoning", "both"]
LogFormat = Literal["human", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

# The maximum of the default of `parallel`. More sequences barely increase the throughput, and
# lengthen the pauses of each one.
MAX_DEFAULT_PARALLEL = 64

# The settings that a reload applies at once. All others take effect after a restart.
RELOADABLE = frozenset(
    {
        "models",
        "defaults",
        "keep_alive",
        "max_queue",
        "max_body",
        "max_connections",
        "header_timeout",
        "body_timeout",
        "max_per_key",
        "deadline",
        "max_time",
        "max_tokens",
        "log_level",
        "access_log",
    }
)


def is_origin(text: str) -> bool:
    """Returns whether `text` is an origin as browsers serialize it (RFC 6454, 6.2); "*" is not an
    origin."""
    return _ORIGIN.fullmatch(text) is not None


def is_host_name(text: str) -> bool:
    """Returns whether `text` is a host name or, with a leading dot, a domain. Case is ignored."""
    return len(text) <= _MAX_HOST_NAME_LENGTH and _HOST_NAME.fullmatch(text.lower()) is not None


def is_adapter_name(text: str) -> bool:
    """Returns whether `text` can be the name of an adapter: letters, digits, '.', '_' and '-'."""
    return _ADAPTER_NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """An adapter of a model. name: requests use MODEL:NAME. path: its folder, or a GGUF file.
    version: distinguishes those that were loaded under one name while the server runs; 0 for one
    that was specified at startup. retired: whether only requests that had selected it before it was
    unloaded may use it."""

    name: str
    path: str
    version: int = 0
    retired: bool = False

    @property
    def key(self) -> str:
        """Identifies the adapter among those of its model, during the lifetime of the server."""
        return f"{self.name}@{self.version}" if self.version else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A model specified at startup, with its own settings. If a setting is None, the setting for
    all models applies.

    name: a folder, a Hugging Face ID or an Ollama name. alias: the name used by clients; None uses
    the model's own name. aliases: additional names that requests may use. preload: whether to load
    the model at startup, before the first request. pinned: whether to load the model at startup and
    never evict it.
    """

    name: str
    alias: str | None = None
    aliases: tuple[str, ...] = ()
    preload: bool = False
    pinned: bool = False
    keep_alive: float | None = None
    quantize: QuantizationBits | None = None
    kv: KVPrecision | None = None
    activations: ActivationPrecision | None = None
    parallel: int | None = None
    context: int | None = None
    memory: int | None = None
    cache: CachePolicy | None = None
    adapters: tuple[AdapterSettings, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a server; immutable.

    models: the models to serve; if empty, the built-in model is served. The first model is loaded
    at startup, unless other models are marked for preloading. defaults: the defaults of served
    models, which override the settings. installed: whether to serve every
    model installed on this machine, on demand. pull: whether to download missing models without
    confirmation. runner: whether each model runs in its own process, or a single model runs on a
    thread of the server. keep_alive: the number of seconds that a model stays loaded without
    requests. None means forever for models specified at startup, and five minutes for other models.
    max_loaded: the maximum number of loaded models. load_timeout: the number of seconds without
    progress after which a load fails. load_wait: the maximum number of seconds that a non-streaming
    request waits for its model to load.

    host, port: the address to listen on. tls_cert, tls_key: PEM files. cors_origins: additional
    allowed CORS origins (loopback is always allowed). allowed_hosts: additional accepted host
    names. api_keys: a file of hashed keys. allow_anyone: whether to listen beyond loopback without
    keys.

    quantize: the number of bits to which unquantized weights are quantized while they are loaded.
    kv: the type of the keys and values in layer caches. "auto" uses the type of the checkpoint.
    activations: the number of bits to which the CPU kernels round the inputs of 4- and 8-bit
    layers; 24 bits are as precise as float32. "auto" means 16 for checkpoints in bfloat16 or
    float16, and 24 for those in float32. kv_layout: whether the layer caches of sequences that
    decode together remain separate rows, or share a slab if their lengths are similar. "auto" means
    rows, because a slab rounds differently and has not run on a GPU. experimental_metal: whether
    a Mac uses code that has not run on a Mac: the kernel of the gated delta rule, wired memory,
    and the eviction of cached prefixes under memory pressure.

    parallel: the maximum number of concurrent sequences; None chooses a value for the memory and
    device. max_queue: the maximum number of queued requests; further requests are rejected.
    context: the maximum number of positions in one sequence; None uses the model's own context
    length. context_shift: whether a sequence that fills its context discards the older half and
    continues (slots only). memory: the memory budget in bytes for the weights, KV caches, cached
    prefixes and working space of all models; None chooses a value for the device.

    vision: whether the vision towers of models are loaded. image_tokens: the maximum number of
    tokens per image; a larger image is scaled down. image_hosts: the exact names of the hosts from
    which images may be fetched over https.

    cache: the prefix cache policy; None uses single for one sequence, else radix. multi_user:
    whether slots are selected for many users rather than for a single user. exact: whether prefill
    chunks are aligned to fixed positions, so that the output is bit-identical with and without
    cached prefixes. prefill_chunk: the number of prompt tokens per engine step. A chunk cannot be
    cancelled once it has started. None chooses a value for the device. keep_awake: whether a Mac
    does not go to idle sleep while the server runs; this has not run on a Mac.

    watchdog: the number of seconds without an engine step after which the engine is reported as
    stalled and, if it has its own process, restarted. max_body: the maximum size of a request body
    in bytes. max_connections: the maximum number of open connections. header_timeout, body_timeout:
    the number of seconds within which the headers and the body of a request must arrive. A client
    that does not read its response for body_timeout seconds is disconnected. max_per_key: the
    maximum number of concurrent choices per API key. deadline: the maximum number of seconds from
    the arrival of a request to the end of its response; after this time, the request fails.
    max_time, max_tokens: the maximum number of seconds and tokens of generation per choice.
    Exceeding them has the same effect as reaching the request's max_tokens. max_logprobs: the
    maximum number of alternatives per token; -1 means the whole vocabulary. drain: the number of
    seconds that running requests have to finish during a graceful shutdown. ping: the number of
    seconds without an event after which a stream sends a comment. strict_fields: whether an unknown
    field at the top level of a request body is an error. reasoning_field: the name of the field for
    reasoning in chat completions; "both" sends the reasoning twice.

    log_format, log_level, access_log: the format and the content of the log. otlp: the URL of an
    OpenTelemetry collector for traces. debug: whether to log debugging details, including parts of
    prompts.
    """

    models: tuple[ModelSettings, ...] = ()
    defaults: tuple[ModelDefaults, ...] = ()
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
    kv: KVPrecision = "auto"
    activations: ActivationPrecision = "auto"
    kv_layout: KVLayout = "auto"
    experimental_metal: bool = False
    parallel: int | None = None
    max_queue: int = 64
    context: int | None = None
    context_shift: bool = False
    memory: int | None = None
    cache: CachePolicy | None = None
    adapters: tuple[AdapterSettings, ...] = ()
    vision: bool = True
    image_tokens: int = 4096
    image_hosts: tuple[str, ...] = ()
    multi_user: bool = False
    exact: bool = False
    prefill_chunk: int | None = None
    keep_awake: bool = False
    watchdog: float = 60.0
    max_body: int = 32 * MEBIBYTE
    max_connections: int = 1024
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    max_per_key: int | None = None
    deadline: float | None = None
    max_time: float | None = None
    max_tokens: int | None = None
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    drain: float = 30.0
    ping: float = 10.0
    strict_fields: bool = False
    reasoning_field: ReasoningField = "reasoning_content"
    log_format: LogFormat = "human"
    log_level: LogLevel = "info"
    access_log: bool = True
    otlp: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        """Raises AppError(INVALID) for conflicting settings, so that every Settings object is
        consistent. The error's param is the first conflicting field."""
        for field, why in (*_find_conflicts(self), *_find_model_conflicts(self)):
            raise AppError(ErrorKind.INVALID, why, param=field)

    @property
    def multi_model(self) -> bool:
        """Whether more than one model may be loaded, so that the models share the device."""
        return self.installed or len(self.models) > 1

    def for_model(self, model: ModelSettings) -> "Settings":
        """Returns the settings of one model. The model's own settings override the settings for all
        models. If there are several models, `memory` is not inherited, because it is the shared
        budget of all models. The defaults of models are not included."""
        own = _model_overrides(model)
        if self.multi_model:
            own.setdefault("memory", None)
        return replace(self, models=(model,), defaults=(), installed=False, **own)


# settings that exist for all models and for one model, in the order of ModelSettings
MODEL_OVERRIDES = tuple(
    field.name
    for field in fields(ModelSettings)
    if field.name in {one.name for one in fields(Settings)}
)


def _model_overrides(model: ModelSettings) -> dict[str, Any]:
    """Returns the model's own values of settings that also exist for all models."""
    return {name: value for name in MODEL_OVERRIDES if (value := getattr(model, name)) is not None}


def _find_conflicts(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yields a (field, reason) pair for each conflict."""
    if settings.context_shift and settings.cache != "slots":
        why = "--context-shift needs --cache slots"
        yield "context_shift", why
    if settings.context_shift and settings.exact:
        yield (
            "context_shift",
            "--context-shift and --exact cannot be combined: the tokens that a shift keeps were "
            "computed from the discarded ones",
        )
    if settings.multi_user and settings.cache != "slots":
        yield "multi_user", "--multi-user needs --cache slots"
    names = [adapter.name for adapter in settings.adapters if not adapter.retired]
    if len(names) > len(set(names)):
        yield "adapters", "two adapters have the same name: give each its own"
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
        for spelled in (name, *model.aliases):
            if spelled in seen:
                why = f"two models are named {spelled!r}: give one of them another alias"
                yield "models", why
            seen.add(spelled)
        if model.memory is not None and model.memory > (settings.memory or math.inf):
            yield "models", f"{name}: its memory exceeds --memory, the budget of all models"
        try:
            replace(settings, models=(), defaults=(), **_model_overrides(model))
        except AppError as error:
            yield "models", f"{name}: {error.message}"
    yield from _find_duplicate_defaults(settings)
    always = sum(model.preload or model.pinned for model in settings.models)
    if settings.max_loaded is not None and always > settings.max_loaded:
        yield (
            "max_loaded",
            f"{always} models are pinned or preloaded, but --max-loaded allows only "
            f"{settings.max_loaded} in memory",
        )


def _find_duplicate_defaults(settings: Settings) -> Iterator[tuple[str, str]]:
    names = [one.name for one in settings.defaults]
    aliases = [alias for one in settings.defaults for alias in one.aliases]
    for kind, given in (("are for", names), ("have the alias", aliases)):
        for name in given:
            if given.count(name) > 1:
                yield "defaults", f"two of the [[defaults]] {kind} {name!r}: remove one of them"


class LiveSettings:
    """`current` are the settings that are in effect. All code runs on the event loop."""

    def __init__(self, settings: Settings) -> None:
        self.current = settings
        self._listeners: list[Callable[[Settings], None]] = []

    def subscribe(self, listener: Callable[[Settings], None]) -> None:
        """Calls `listener` with the settings after each reload."""
        self._listeners.append(listener)

    def replace(self, settings: Settings) -> None:
        self.current = settings
        for listener in self._listeners:
            listener(settings)


def merge_reloaded(current: Settings, wanted: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Returns the settings after a reload, and the names of the settings that have changed but need
    a restart. Raises AppError(INVALID) if the result has a conflict."""
    kept = {
        field.name: getattr(current, field.name)
        for field in fields(Settings)
        if field.name not in RELOADABLE
        and getattr(current, field.name) != getattr(wanted, field.name)
    }
    return replace(wanted, **kept), tuple(kept)


def needs_new_process(before: Settings, after: Settings) -> bool:
    """Returns whether a model with the settings `after` must be reloaded. Both are the settings of
    one model."""
    return any(
        getattr(before, field.name) != getattr(after, field.name)
        for field in fields(Settings)
        if field.name not in RELOADABLE
    )
