"""The table of all settings: the notation, the default and the help text of each setting.

Knows: the fields of Settings and ModelSettings. Must not know: argparse, TOML, the environment.

A setting has one name, in the spelling of each source: `max_queue` in a file, `--max-queue` on the
command line, `MLXRUNNER_MAX_QUEUE` in the environment. The flag of a repeatable setting is in the
singular.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from app.config import value_types
from app.config.value_types import ValueType
from app.core.model_files import ModelDefaults
from app.core.sampling_params import SAMPLING_KNOBS, SamplingKnob
from app.core.settings import (
    MEBIBYTE,
    MODEL_OVERRIDES,
    ActivationPrecision,
    CachePolicy,
    KVLayout,
    KVPrecision,
    LogFormat,
    LogLevel,
    ModelSettings,
    QuantizationBits,
    ReasoningField,
    RunnerKind,
    Settings,
)

ENV_PREFIX = "MLXRUNNER_"

# resets a setting that a source of lower precedence has set; every type of value accepts it
DEFAULT_WORD = "default"

GIBIBYTE = 1 << 30

# the path of the configuration file; not a setting, since a file cannot name itself
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"

# the variable from which commands take the API key of a server
KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"

# set for a server whose configuration file disappears with it, so that no defaults are saved there
TEMPORARY_CONFIG_VARIABLE = f"_{ENV_PREFIX}TEMPORARY_CONFIG"

# app/http/api_keys.py reads these variables; their values are never displayed
SECRET_VARIABLES = (f"{ENV_PREFIX}API_KEY", f"{ENV_PREFIX}API_KEYS")

# models/cpu_backend.py and models/kernels read these variables before the settings exist
BACKEND_VARIABLES = (
    f"{ENV_PREFIX}BLAS",
    f"{ENV_PREFIX}ISA",
    f"{ENV_PREFIX}KERNELS",
    f"{ENV_PREFIX}THREADS",
)

# the build (models/kernels/CMakeLists.txt) reads these variables; they may still be set at runtime
BUILD_VARIABLE = f"{ENV_PREFIX}BUILD_KERNELS"

MODELS_VARIABLE = f"{ENV_PREFIX}MODELS"

_DEFAULT_FIELDS = [one.name for one in dataclasses.fields(ModelDefaults) if one.name != "sampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedValue:
    """A value with its source. value: the value of a field of Settings. source: describes where it
    was set."""

    value: Any
    source: str


SourcedValues = Mapping[str, SourcedValue]
"""Maps field names to values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting, independent of the source from which it is read.

    field: the name of the field in Settings, which is also the key in a file. default: the default
    of that field. help: the help text. unset_label: the text displayed for None. env_var: the name
    of the environment variable. is_common: whether `--help` lists it; `--help-all` lists all.
    other_names: its names in other servers, for suggestions.
    """

    field: str
    value_type: ValueType
    default: Any
    help: str
    unset_label: str
    env_var: str
    is_common: bool = False
    other_names: tuple[str, ...] = ()

    @property
    def is_boolean(self) -> bool:
        return bool in self.value_type.types

    @property
    def flag(self) -> str:
        name = self.field.removesuffix("s") if self.value_type.is_list else self.field
        return "--" + name.replace("_", "-")

    def parse_text(self, word: str) -> Any:
        """Parses text from the command line or the environment. Raises InvalidOptionValue."""
        return self.default if word == DEFAULT_WORD else self.value_type.parse_text(word)

    def from_toml(self, value: object) -> Any:
        """Converts a value from a file. Raises InvalidOptionValue."""
        return self.default if value == DEFAULT_WORD else self.value_type.from_toml(value)

    def to_toml(self, value: Any) -> Any:
        """Converts a value for a file. TOML has no null, so None becomes "default"."""
        return DEFAULT_WORD if value is None else self.value_type.to_toml(value)

    def format_value(self, value: Any) -> str:
        """Formats a value for display."""
        if value is None:
            return self.unset_label
        given = self.value_type.to_toml(value)
        if isinstance(given, bool):
            return "on" if given else "off"
        if self.value_type.is_list:
            return ", ".join(map(str, given)) or self.unset_label
        unit = self.value_type.unit if isinstance(given, (int, float)) else ""
        return f"{given} {unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionGroup:
    title: str
    options: tuple[Option, ...]


def make_option(
    field: str,
    form: ValueType,
    help: str,
    *,
    unset: str = "none",
    variable: str | None = None,
    is_common: bool = False,
    other_names: str = "",
    settings_class: type[Settings] | type[ModelSettings] | type[ModelDefaults] = Settings,
) -> Option:
    [default] = [
        setting.default for setting in dataclasses.fields(settings_class) if setting.name == field
    ]
    return Option(
        field=field,
        value_type=form,
        default=None if default is dataclasses.MISSING else default,
        help=help,
        unset_label=unset,
        env_var=variable or ENV_PREFIX + field.upper(),
        is_common=is_common,
        other_names=tuple(other_names.split()),
    )


GROUPS = (
    OptionGroup(
        title="models",
        options=(
            make_option(
                "installed",
                value_types.boolean(),
                "serve every model installed on this machine; each is loaded on its first request",
                is_common=True,
            ),
            make_option(
                "pull",
                value_types.boolean(),
                "download missing models without asking",
                is_common=True,
            ),
            make_option(
                "runner",
                value_types.choice(*get_args(RunnerKind)),
                "process: run each model in its own process, so that a crash affects only "
                "that model; thread: run the only model on a thread of the server",
            ),
            make_option(
                "keep_alive",
                value_types.duration(allow_zero=True, allow_forever=True),
                "how long an idle model stays loaded: seconds, 5m, 1h30m, forever",
                unset="forever for models named at start, 5m for others",
                is_common=True,
                other_names="ttl sleep-idle-seconds idle-timeout",
            ),
            make_option(
                "max_loaded",
                value_types.count(1),
                "maximum number of loaded models",
                unset="as many as fit",
                other_names="max-loaded-models models-max",
            ),
            make_option(
                "load_timeout",
                value_types.duration(),
                "abort a load after this long without progress",
            ),
            make_option(
                "load_wait",
                value_types.duration(allow_zero=True),
                "how long a non-streaming request waits for its model to load",
            ),
        ),
    ),
    OptionGroup(
        title="network",
        options=(
            make_option(
                "host",
                value_types.text("an address or a name to listen on", "HOST"),
                "address to listen on",
                is_common=True,
                other_names="bind listen address ip",
            ),
            make_option(
                "port",
                value_types.integer(0, 65535),
                "port to listen on; 0 picks a free one",
                is_common=True,
                other_names="p",
            ),
            make_option(
                "tls_cert",
                value_types.path(),
                "TLS certificate chain, PEM; needs --tls-key",
                other_names="ssl-certfile ssl-cert-file cert",
            ),
            make_option(
                "tls_key",
                value_types.path(),
                "private key of the TLS certificate, PEM",
                other_names="ssl-keyfile ssl-key-file",
            ),
        ),
    ),
    OptionGroup(
        title="access control",
        options=(
            make_option(
                "api_keys",
                value_types.path(),
                "file of hashed API keys, written by `mlxrunner key`",
                # MLXRUNNER_API_KEYS holds the keys themselves
                variable=f"{ENV_PREFIX}API_KEYS_FILE",
                is_common=True,
                other_names="api-key api-key-file",
            ),
            make_option(
                "allow_anyone",
                value_types.boolean(),
                "allow listening beyond loopback without API keys",
            ),
            make_option(
                "allowed_hosts",
                value_types.host_names(),
                "additional host name to accept in requests, such as llm.example.org or "
                ".example.org; repeatable",
            ),
            make_option(
                "cors_origins",
                value_types.origins(),
                "allowed CORS origin, such as https://chat.example.org; repeatable (loopback "
                "origins are always allowed)",
                other_names="allowed-origins cors origins",
            ),
        ),
    ),
    OptionGroup(
        title="engine",
        options=(
            make_option(
                "quantize",
                value_types.choice(*get_args(QuantizationBits)),
                "quantize unquantized weights to 4 or 8 bits while loading",
                unset="off",
                is_common=True,
                other_names="quantization q-bits bits",
            ),
            make_option(
                "adapters",
                value_types.adapters(),
                "LoRA adapter of the model, which requests select as MODEL:NAME; repeatable",
                other_names="lora lora-modules lora-adapters",
            ),
            make_option(
                "vision",
                value_types.boolean(),
                "load the vision towers of models that have one, so that requests may have images",
                other_names="mmproj no-mmproj mm-projector limit-mm-per-prompt",
            ),
            make_option(
                "image_tokens",
                value_types.count(1, unit="tokens"),
                "maximum number of tokens per image; a larger image is scaled down",
                other_names="image-max-tokens mm-processor-kwargs max-image-tokens",
            ),
            make_option(
                "image_hosts",
                value_types.public_hosts(),
                "host from which images may be fetched, by its exact name and over https; "
                "repeatable",
                other_names="allowed-media-domains allow-image-hosts media-domains",
            ),
            make_option(
                "kv",
                value_types.choice(*get_args(KVPrecision)),
                "precision of the KV cache; auto: the checkpoint's, so that bfloat16 models "
                "need half the memory and decode long contexts faster",
                other_names="kv-bits kv-cache-dtype cache-type-k ctk cache-type-v ctv "
                "kv-cache-type",
            ),
            make_option(
                "activations",
                value_types.choice(*get_args(ActivationPrecision)),
                "precision in bits of activations in 4- and 8-bit layers on a CPU; auto: 16 for "
                "bfloat16 and float16 models, 24 for float32; fewer bits are faster and less exact",
            ),
            make_option(
                "kv_layout",
                value_types.choice(*get_args(KVLayout)),
                "layout of KV caches in batches; auto: rows; slab: faster on some GPUs, rounds "
                "differently",
            ),
            make_option(
                "experimental_metal",
                value_types.boolean(),
                "on a Mac, use code that has not been tested on one: a kernel for gated delta "
                "nets, wired memory, a smaller prefix cache under memory pressure",
            ),
            make_option(
                "parallel",
                value_types.count(1),
                "maximum number of concurrent sequences",
                unset="chosen from memory and device",
                is_common=True,
                other_names="max-num-seqs np n-parallel num-parallel decode-concurrency",
            ),
            make_option(
                "context",
                value_types.count(2, unit="tokens"),
                "context length: prompt plus output",
                unset="the model's own",
                is_common=True,
                other_names="c ctx-size max-model-len num-ctx n-ctx context-length context-size "
                "max-kv-size",
            ),
            make_option(
                "context_shift",
                value_types.boolean(),
                "when the context is full, discard its older half and continue; if a prompt is too "
                "long, truncate it in the middle; needs --cache slots",
            ),
            make_option(
                "memory",
                value_types.size("GiB", GIBIBYTE),
                "memory budget for the weights, KV caches and working space of all models, in GiB "
                "or with a unit, such as 6, 6.5 or 6GB",
                unset="chosen from the device",
                is_common=True,
                other_names="gpu-memory-utilization max-memory",
            ),
            make_option(
                "cache",
                value_types.choice(*get_args(CachePolicy)),
                "prefix cache policy: the last sequence, one per slot, or a radix tree",
                unset="single with --parallel 1, else radix",
            ),
            make_option(
                "multi_user",
                value_types.boolean(),
                "let prompts reuse a prefix of a busy slot; needs --cache slots",
            ),
            make_option(
                "exact",
                value_types.boolean(),
                "make cached output bit-identical to uncached output; recomputes earlier responses",
            ),
            make_option(
                "prefill_chunk",
                value_types.count(1, unit="tokens"),
                "prompt tokens per engine step; a cancellation takes effect after one step at most",
                unset="128 on a CPU, 1024 or 2048 on a GPU",
                other_names="max-num-batched-tokens b batch-size ub ubatch-size "
                "chunked-prefill-size prefill-step-size",
            ),
            make_option(
                "keep_awake",
                value_types.boolean(),
                "keep a Mac from going to idle sleep while the server runs",
            ),
            make_option(
                "watchdog",
                value_types.duration(),
                "if a busy engine makes no progress for this long, /health returns 503 and its "
                "process is restarted",
            ),
        ),
    ),
    OptionGroup(
        title="limits",
        options=(
            make_option(
                "max_queue",
                value_types.count(0),
                "maximum number of queued requests; further requests get 429",
                other_names="max-waiting-requests",
            ),
            make_option(
                "max_per_key",
                value_types.count(1),
                "maximum number of concurrent requests per key (each choice counts)",
                unset="no limit",
            ),
            make_option(
                "max_tokens",
                value_types.count(1, unit="tokens"),
                "maximum number of output tokens per choice",
                unset="limited only by the context",
                other_names="n n-predict num-predict max-new-tokens",
            ),
            make_option(
                "max_logprobs",
                value_types.count(-1),
                "maximum number of alternatives per token in logprobs (-1: the whole vocabulary); "
                "at most 4,194,304 divided by --parallel",
            ),
            make_option(
                "max_time",
                value_types.duration(),
                "maximum generation time per choice",
                unset="no limit",
                other_names="timeout",
            ),
            make_option(
                "deadline",
                value_types.duration(),
                "maximum time from a request's arrival to the end of its response",
                unset="no limit",
            ),
            make_option(
                "max_body",
                value_types.size("MiB", MEBIBYTE),
                "maximum size of a request body, in MiB or with a unit, such as 512KB",
            ),
            make_option(
                "max_connections", value_types.count(1), "maximum number of open connections"
            ),
            make_option(
                "header_timeout", value_types.duration(), "timeout for reading request headers"
            ),
            make_option(
                "body_timeout", value_types.duration(), "timeout for reading request bodies"
            ),
            make_option(
                "drain",
                value_types.duration(allow_zero=True),
                "how long in-flight requests may continue after a shutdown signal",
            ),
            make_option(
                "ping",
                value_types.duration(),
                "send an SSE comment after this long without an event",
            ),
            make_option(
                "strict_fields",
                value_types.boolean(),
                "reject unknown fields at the top level of a request body instead of ignoring them",
            ),
            make_option(
                "reasoning_field",
                value_types.choice(*get_args(ReasoningField)),
                "field for reasoning in chat completions; both sends it twice",
            ),
        ),
    ),
    OptionGroup(
        title="logging and tracing",
        options=(
            make_option(
                "log_format",
                value_types.choice(*get_args(LogFormat)),
                "human: plain text; json: one JSON object per line",
            ),
            make_option(
                "log_level",
                value_types.choice(*get_args(LogLevel)),
                "minimum log level",
                other_names="v verbosity",
            ),
            make_option("access_log", value_types.boolean(), "log a line for each request"),
            make_option(
                "otlp",
                value_types.url(),
                "OpenTelemetry collector to export traces to, such as http://localhost:4318",
                unset="off",
                other_names="otlp-traces-endpoint",
            ),
            make_option(
                "debug",
                value_types.boolean(),
                "log debugging details; the log then contains parts of prompts",
                other_names="verbose",
            ),
        ),
    ),
)

OPTIONS = tuple(one for group in GROUPS for one in group.options)


def find_option_by_other_name(name: str) -> Option | None:
    """Returns the option that another server gives this name. name: with or without dashes."""
    key = name.lower().strip("-").replace("_", "-")
    return next((option for option in OPTIONS if key in option.other_names), None)


def _make_model_option(field: str) -> Option:
    """Returns the per-model version of an option that also exists for all models. Its meaning is
    the same."""
    [of_all] = [option for option in OPTIONS if option.field == field]
    return dataclasses.replace(of_all, default=None, unset_label="as for all models")


# keys of a [[models]] table in a file, in the order of ModelSettings
MODEL_OPTIONS = (
    make_option(
        "name",
        value_types.text("the name of a model", "MODEL"),
        "a folder, org/name on the Hugging Face hub, or an Ollama model name",
        settings_class=ModelSettings,
    ),
    make_option(
        "alias",
        value_types.text("a name", "NAME"),
        "model name that clients use",
        unset="its own name",
        settings_class=ModelSettings,
    ),
    make_option(
        "aliases",
        value_types.names(),
        "additional model names that clients may use",
        settings_class=ModelSettings,
    ),
    make_option("preload", value_types.boolean(), "load at start", settings_class=ModelSettings),
    make_option(
        "pinned",
        value_types.boolean(),
        "load at start and never evict",
        settings_class=ModelSettings,
    ),
    *map(_make_model_option, MODEL_OVERRIDES),
)


def _make_default_option(field: str, value_type: ValueType, help: str) -> Option:
    unset = "the model's own"
    return make_option(field, value_type, help, unset=unset, settings_class=ModelDefaults)


def _make_sampling_option(knob: SamplingKnob) -> Option:
    if knob.kind is int:
        value_type = value_types.integer(int(knob.low), int(knob.high))
    else:
        value_type = value_types.number(knob.low, knob.high)
    return Option(
        field=knob.name,
        value_type=value_type,
        default=None,
        help=knob.doc,
        unset_label="the model's own",
        env_var="",
    )


# keys of a [[defaults]] table in a file, in the order of ModelDefaults
DEFAULT_OPTIONS = (
    _make_default_option(
        "name", value_types.text("the name of a model", "MODEL"), "name of the served model"
    ),
    _make_default_option(
        "aliases", value_types.names(), "additional model names that clients may use"
    ),
    _make_default_option(
        "system", value_types.prose(), "system prompt of conversations that have none"
    ),
    *map(_make_model_option, ("context", "keep_alive")),
    _make_default_option(
        "max_tokens", value_types.count(1, unit="tokens"), "maximum number of output tokens"
    ),
    *map(_make_sampling_option, SAMPLING_KNOBS),
)


def list_default_values(defaults: ModelDefaults) -> Sequence[tuple[Option, Any]]:
    """Returns the options that are set in the defaults of a model, with their values."""
    values = {**{field: getattr(defaults, field) for field in _DEFAULT_FIELDS}, **defaults.sampling}
    return [
        (option, values[option.field])
        for option in DEFAULT_OPTIONS
        if values.get(option.field) not in (None, ())
    ]


def build_defaults(values: Mapping[str, Any]) -> ModelDefaults:
    """Returns the defaults with these values of `DEFAULT_OPTIONS`; the inverse of
    `list_default_values`."""
    own = {field: values[field] for field in _DEFAULT_FIELDS if field in values}
    sampling = {field: value for field, value in values.items() if field not in own}
    return ModelDefaults(**own, sampling=sampling)
