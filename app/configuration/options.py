"""Every setting, once: how it is written, and what is told of it.

Knows: the fields of Settings and ModelSettings. Must not know: argparse, TOML, the environment.

A setting has one name, spelled as each source spells names: `max_queue` in a file, `--max-queue` on
the command line, `MLXRUNNER_MAX_QUEUE` in the environment. What may be given several times is in
the singular on the command line.
"""

import dataclasses
from typing import get_args

from app.configuration import forms
from app.configuration.option import PREFIX, Group, Option, option
from app.core.settings import (
    MEBIBYTE,
    Bits,
    CachePolicy,
    LogFormat,
    LogLevel,
    ModelSettings,
    RunnerKind,
)

GIBIBYTE = 1 << 30

# which file to read; not a setting, for a file cannot say it
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

# read by those who check keys, and never told
SECRET_VARIABLES = (f"{PREFIX}API_KEY", f"{PREFIX}API_KEYS")

# read where arrays are computed, before there are settings: models/backend.py, models/threads.py,
# models/kernels
COMPUTING_VARIABLES = (f"{PREFIX}BLAS", f"{PREFIX}ISA", f"{PREFIX}KERNELS", f"{PREFIX}THREADS")

# read by the install (models/kernels/CMakeLists.txt); a shell in which it is set may start a server
BUILD_VARIABLE = f"{PREFIX}BUILD_KERNELS"

MODELS_VARIABLE = f"{PREFIX}MODELS"


GROUPS = (
    Group(
        title="models",
        options=(
            option(
                "installed",
                forms.switch(),
                "serve every model installed on this machine; each is loaded on its first request",
            ),
            option("pull", forms.switch(), "download missing models without asking"),
            option(
                "runner",
                forms.choice(*get_args(RunnerKind)),
                "process: run each model in its own process, so that a crash affects only "
                "that model; thread: run the only model on a thread of the server",
            ),
            option(
                "keep_alive",
                forms.time(zero=True, forever=True),
                "how long an idle model stays loaded: seconds, 5m, 1h30m, forever",
                unset="forever for models named at start, 5m for others",
            ),
            option(
                "max_loaded",
                forms.whole(1),
                "maximum number of models in memory",
                unset="as many as fit",
            ),
            option("load_timeout", forms.time(), "abort a load after this long without progress"),
            option(
                "load_wait",
                forms.time(zero=True),
                "how long a non-streaming request waits for its model to load",
            ),
        ),
    ),
    Group(
        title="network",
        options=(
            option(
                "host",
                forms.text("an address or a name to listen on", "HOST"),
                "address to listen on",
            ),
            option("port", forms.whole(0, 65535), "port to listen on; 0 picks a free one"),
            option("tls_cert", forms.path(), "TLS certificate chain, PEM; needs --tls-key"),
            option("tls_key", forms.path(), "private key of the TLS certificate, PEM"),
        ),
    ),
    Group(
        title="access control",
        options=(
            option(
                "api_keys",
                forms.path(),
                "file of hashed API keys, written by `mlxrunner key`",
                # the rule's own name holds keys themselves
                variable=f"{PREFIX}API_KEYS_FILE",
            ),
            option(
                "allow_anyone",
                forms.switch(),
                "allow listening beyond loopback without API keys",
            ),
            option(
                "allowed_hosts",
                forms.host_names(),
                "additional host name to accept in requests, such as llm.example.org or "
                ".example.org; repeatable",
            ),
            option(
                "cors_origins",
                forms.origins(),
                "allowed CORS origin, such as https://chat.example.org; repeatable (loopback "
                "origins are always allowed)",
            ),
        ),
    ),
    Group(
        title="engine",
        options=(
            option(
                "quantize",
                forms.choice(*get_args(Bits)),
                "quantise unquantised weights to 4 or 8 bits while loading",
                unset="off",
            ),
            option(
                "parallel",
                forms.whole(1),
                "maximum number of sequences that run at the same time",
                unset="chosen from memory and device",
            ),
            option(
                "context",
                forms.whole(2, unit="tokens"),
                "context length: prompt plus output",
                unset="the model's own",
            ),
            option(
                "context_shift",
                forms.switch(),
                "when the context is full, discard its older half and continue; truncate prompts "
                "that are too long in the middle; needs --cache slots",
            ),
            option(
                "memory",
                forms.size("GiB", GIBIBYTE),
                "memory budget for the weights, KV caches and working space of all models, in GiB, "
                "such as 6 or 6.5",
                unset="chosen from the device",
            ),
            option(
                "cache",
                forms.choice(*get_args(CachePolicy)),
                "prefix cache policy: the last sequence, one per slot, or a radix tree",
                unset="single with --parallel 1, else radix",
            ),
            option(
                "multi_user",
                forms.switch(),
                "let prompts reuse a prefix of a busy slot; needs --cache slots",
            ),
            option(
                "exact",
                forms.switch(),
                "make cached output bit-identical to uncached output; recomputes earlier answers",
            ),
            option(
                "prefill_chunk",
                forms.whole(1, unit="tokens"),
                "prompt tokens per engine step; a cancellation takes effect after one step at most",
                unset="128 on a CPU, else 512",
            ),
            option(
                "watchdog",
                forms.time(),
                "how long a busy engine may make no progress before /health reports it and its "
                "process is restarted",
            ),
        ),
    ),
    Group(
        title="limits",
        options=(
            option(
                "max_queue",
                forms.whole(0),
                "maximum number of queued requests; further requests get 429",
            ),
            option(
                "max_per_key",
                forms.whole(1),
                "concurrent requests per key (each choice counts)",
                unset="no limit",
            ),
            option(
                "max_tokens",
                forms.whole(1, unit="tokens"),
                "maximum output tokens per choice",
                unset="no limit but the context",
            ),
            option(
                "max_time",
                forms.time(),
                "maximum generation time per choice",
                unset="no limit",
            ),
            option(
                "deadline",
                forms.time(),
                "maximum time from a request's arrival to the end of its response; then it fails",
                unset="no limit",
            ),
            option("max_body", forms.size("MiB", MEBIBYTE), "largest request body, in MiB"),
            option("max_connections", forms.whole(1), "maximum number of open connections"),
            option("header_timeout", forms.time(), "timeout for reading request headers"),
            option("body_timeout", forms.time(), "timeout for reading request bodies"),
            option(
                "drain",
                forms.time(zero=True),
                "how long in-flight requests may run after a shutdown signal",
            ),
            option("ping", forms.time(), "send an SSE comment after this long without an event"),
        ),
    ),
    Group(
        title="logging and tracing",
        options=(
            option(
                "log_format",
                forms.choice(*get_args(LogFormat)),
                "human: plain text; json: one JSON object per line",
            ),
            option("log_level", forms.choice(*get_args(LogLevel)), "minimum log level"),
            option("access_log", forms.switch(), "log a line for each request"),
            option(
                "otlp",
                forms.address(),
                "OpenTelemetry collector to export traces to, such as http://localhost:4318",
                unset="off",
            ),
            option(
                "debug",
                forms.switch(),
                "log debugging details; the log then contains parts of prompts",
            ),
        ),
    ),
)

OPTIONS = tuple(one for group in GROUPS for one in group.options)


def _of_one_model(field: str) -> Option:
    """What may be set for all models too, and there means the same."""
    [of_all] = [one for one in OPTIONS if one.field == field]
    return dataclasses.replace(of_all, default=None, unset="as for all models")


# keys of a [[models]] table in a file, in the order of ModelSettings
MODEL_OPTIONS = (
    option(
        "name",
        forms.text("the name of a model", "MODEL"),
        "a folder, org/name on the Hugging Face hub, or an Ollama model name",
        of=ModelSettings,
    ),
    option(
        "alias",
        forms.text("a name", "NAME"),
        "model name that clients use",
        unset="its own name",
        of=ModelSettings,
    ),
    option("preload", forms.switch(), "load it at start", of=ModelSettings),
    option(
        "pinned",
        forms.switch(),
        "load it at start and never evict it",
        of=ModelSettings,
    ),
    _of_one_model("keep_alive"),
    _of_one_model("quantize"),
    _of_one_model("parallel"),
    _of_one_model("context"),
    _of_one_model("memory"),
    _of_one_model("cache"),
)
