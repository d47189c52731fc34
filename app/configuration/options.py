"""Every setting, once: how it is written, and what is told of it.

Knows: the fields of Settings and ModelSettings. Must not know: argparse, TOML, the environment.

A setting has one name, spelled as each source spells names: `max_queue` in a file, `--max-queue` on
the command line, `MLXRUNNER_MAX_QUEUE` in the environment. What may be given several times is in
the singular on the command line.
"""

import dataclasses
from typing import get_args

from app.configuration import forms
from app.configuration.option import ENV_PREFIX, Option, OptionGroup, make_option
from app.core.settings import (
    MEBIBYTE,
    CachePolicy,
    LogFormat,
    LogLevel,
    ModelSettings,
    QuantizationBits,
    RunnerKind,
)

GIBIBYTE = 1 << 30

# which file to read; not a setting, for a file cannot say it
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"

# read by those who check keys, and never told
SECRET_VARIABLES = (f"{ENV_PREFIX}API_KEY", f"{ENV_PREFIX}API_KEYS")

# read where arrays are computed, before there are settings: models/backend.py, models/threads.py,
# models/kernels
BACKEND_VARIABLES = (
    f"{ENV_PREFIX}BLAS",
    f"{ENV_PREFIX}ISA",
    f"{ENV_PREFIX}KERNELS",
    f"{ENV_PREFIX}THREADS",
)

# read by the install (models/kernels/CMakeLists.txt); a shell in which it is set may start a server
BUILD_VARIABLE = f"{ENV_PREFIX}BUILD_KERNELS"

MODELS_VARIABLE = f"{ENV_PREFIX}MODELS"


GROUPS = (
    OptionGroup(
        title="models",
        options=(
            make_option(
                "installed",
                forms.boolean(),
                "serve every model installed on this machine; each is loaded on its first request",
            ),
            make_option("pull", forms.boolean(), "download missing models without asking"),
            make_option(
                "runner",
                forms.choice(*get_args(RunnerKind)),
                "process: run each model in its own process, so that a crash affects only "
                "that model; thread: run the only model on a thread of the server",
            ),
            make_option(
                "keep_alive",
                forms.duration(allow_zero=True, allow_forever=True),
                "how long an idle model stays loaded: seconds, 5m, 1h30m, forever",
                unset="forever for models named at start, 5m for others",
            ),
            make_option(
                "max_loaded",
                forms.integer(1),
                "maximum number of models in memory",
                unset="as many as fit",
            ),
            make_option(
                "load_timeout", forms.duration(), "abort a load after this long without progress"
            ),
            make_option(
                "load_wait",
                forms.duration(allow_zero=True),
                "how long a non-streaming request waits for its model to load",
            ),
        ),
    ),
    OptionGroup(
        title="network",
        options=(
            make_option(
                "host",
                forms.text("an address or a name to listen on", "HOST"),
                "address to listen on",
            ),
            make_option("port", forms.integer(0, 65535), "port to listen on; 0 picks a free one"),
            make_option("tls_cert", forms.path(), "TLS certificate chain, PEM; needs --tls-key"),
            make_option("tls_key", forms.path(), "private key of the TLS certificate, PEM"),
        ),
    ),
    OptionGroup(
        title="access control",
        options=(
            make_option(
                "api_keys",
                forms.path(),
                "file of hashed API keys, written by `mlxrunner key`",
                # the rule's own name holds keys themselves
                variable=f"{ENV_PREFIX}API_KEYS_FILE",
            ),
            make_option(
                "allow_anyone",
                forms.boolean(),
                "allow listening beyond loopback without API keys",
            ),
            make_option(
                "allowed_hosts",
                forms.host_names(),
                "additional host name to accept in requests, such as llm.example.org or "
                ".example.org; repeatable",
            ),
            make_option(
                "cors_origins",
                forms.origins(),
                "allowed CORS origin, such as https://chat.example.org; repeatable (loopback "
                "origins are always allowed)",
            ),
        ),
    ),
    OptionGroup(
        title="engine",
        options=(
            make_option(
                "quantize",
                forms.choice(*get_args(QuantizationBits)),
                "quantise unquantised weights to 4 or 8 bits while loading",
                unset="off",
            ),
            make_option(
                "parallel",
                forms.integer(1),
                "maximum number of sequences that run at the same time",
                unset="chosen from memory and device",
            ),
            make_option(
                "context",
                forms.integer(2, unit="tokens"),
                "context length: prompt plus output",
                unset="the model's own",
            ),
            make_option(
                "context_shift",
                forms.boolean(),
                "when the context is full, discard its older half and continue; truncate prompts "
                "that are too long in the middle; needs --cache slots",
            ),
            make_option(
                "memory",
                forms.size("GiB", GIBIBYTE),
                "memory budget for the weights, KV caches and working space of all models, in GiB, "
                "such as 6 or 6.5",
                unset="chosen from the device",
            ),
            make_option(
                "cache",
                forms.choice(*get_args(CachePolicy)),
                "prefix cache policy: the last sequence, one per slot, or a radix tree",
                unset="single with --parallel 1, else radix",
            ),
            make_option(
                "multi_user",
                forms.boolean(),
                "let prompts reuse a prefix of a busy slot; needs --cache slots",
            ),
            make_option(
                "exact",
                forms.boolean(),
                "make cached output bit-identical to uncached output; recomputes earlier answers",
            ),
            make_option(
                "prefill_chunk",
                forms.integer(1, unit="tokens"),
                "prompt tokens per engine step; a cancellation takes effect after one step at most",
                unset="128 on a CPU, else 512",
            ),
            make_option(
                "watchdog",
                forms.duration(),
                "how long a busy engine may make no progress before /health reports it and its "
                "process is restarted",
            ),
        ),
    ),
    OptionGroup(
        title="limits",
        options=(
            make_option(
                "max_queue",
                forms.integer(0),
                "maximum number of queued requests; further requests get 429",
            ),
            make_option(
                "max_per_key",
                forms.integer(1),
                "concurrent requests per key (each choice counts)",
                unset="no limit",
            ),
            make_option(
                "max_tokens",
                forms.integer(1, unit="tokens"),
                "maximum output tokens per choice",
                unset="no limit but the context",
            ),
            make_option(
                "max_time",
                forms.duration(),
                "maximum generation time per choice",
                unset="no limit",
            ),
            make_option(
                "deadline",
                forms.duration(),
                "maximum time from a request's arrival to the end of its response; then it fails",
                unset="no limit",
            ),
            make_option("max_body", forms.size("MiB", MEBIBYTE), "largest request body, in MiB"),
            make_option("max_connections", forms.integer(1), "maximum number of open connections"),
            make_option("header_timeout", forms.duration(), "timeout for reading request headers"),
            make_option("body_timeout", forms.duration(), "timeout for reading request bodies"),
            make_option(
                "drain",
                forms.duration(allow_zero=True),
                "how long in-flight requests may run after a shutdown signal",
            ),
            make_option(
                "ping", forms.duration(), "send an SSE comment after this long without an event"
            ),
        ),
    ),
    OptionGroup(
        title="logging and tracing",
        options=(
            make_option(
                "log_format",
                forms.choice(*get_args(LogFormat)),
                "human: plain text; json: one JSON object per line",
            ),
            make_option("log_level", forms.choice(*get_args(LogLevel)), "minimum log level"),
            make_option("access_log", forms.boolean(), "log a line for each request"),
            make_option(
                "otlp",
                forms.url(),
                "OpenTelemetry collector to export traces to, such as http://localhost:4318",
                unset="off",
            ),
            make_option(
                "debug",
                forms.boolean(),
                "log debugging details; the log then contains parts of prompts",
            ),
        ),
    ),
)

OPTIONS = tuple(one for group in GROUPS for one in group.options)


def _make_model_option(field: str) -> Option:
    """What may be set for all models too, and there means the same."""
    [of_all] = [one for one in OPTIONS if one.field == field]
    return dataclasses.replace(of_all, default=None, unset_label="as for all models")


# keys of a [[models]] table in a file, in the order of ModelSettings
MODEL_OPTIONS = (
    make_option(
        "name",
        forms.text("the name of a model", "MODEL"),
        "a folder, org/name on the Hugging Face hub, or an Ollama model name",
        settings_class=ModelSettings,
    ),
    make_option(
        "alias",
        forms.text("a name", "NAME"),
        "model name that clients use",
        unset="its own name",
        settings_class=ModelSettings,
    ),
    make_option("preload", forms.boolean(), "load it at start", settings_class=ModelSettings),
    make_option(
        "pinned",
        forms.boolean(),
        "load it at start and never evict it",
        settings_class=ModelSettings,
    ),
    _make_model_option("keep_alive"),
    _make_model_option("quantize"),
    _make_model_option("parallel"),
    _make_model_option("context"),
    _make_model_option("memory"),
    _make_model_option("cache"),
)
