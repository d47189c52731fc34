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
                "serve every model that is on this machine, loaded when a request names it",
            ),
            option("pull", forms.switch(), "download a model that is not here without asking"),
            option(
                "runner",
                forms.choice(*get_args(RunnerKind)),
                "process: each model in a process of its own, which may die alone; thread: the "
                "only model on a thread of the server",
            ),
            option(
                "keep_alive",
                forms.time(zero=True, forever=True),
                "how long a model stays loaded without requests: seconds, 5m, 1h30m, forever",
                unset="forever for models named at start, 5m for others",
            ),
            option(
                "max_loaded", forms.whole(1), "models in memory at once", unset="as many as fit"
            ),
            option("load_timeout", forms.time(), "how long a load may take without getting on"),
            option(
                "load_wait",
                forms.time(zero=True),
                "how long a request that is not streamed waits for its model",
            ),
        ),
    ),
    Group(
        title="where it listens",
        options=(
            option(
                "host",
                forms.text("an address or a name to listen on", "HOST"),
                "address to listen on",
            ),
            option("port", forms.whole(0, 65535), "port; 0 is any that is free"),
            option(
                "tls_cert", forms.path(), "certificate and those above it, PEM; needs --tls-key"
            ),
            option("tls_key", forms.path(), "the certificate's private key, PEM"),
        ),
    ),
    Group(
        title="who may come in",
        options=(
            option(
                "api_keys",
                forms.path(),
                "file of hashed keys, which `mlxrunner key` writes",
                # the rule's own name holds keys themselves
                variable=f"{PREFIX}API_KEYS_FILE",
            ),
            option(
                "allow_anyone",
                forms.switch(),
                "listen beyond this machine though there are no keys",
            ),
            option(
                "allowed_hosts",
                forms.host_names(),
                "further name under which the server may be addressed, such as llm.example.org or "
                ".example.org; may be given again",
            ),
            option(
                "cors_origins",
                forms.origins(),
                "web page origin that may call the server, such as https://chat.example.org; may "
                "be given again (pages on loopback always may)",
            ),
        ),
    ),
    Group(
        title="how the engine uses the device",
        options=(
            option(
                "quantize",
                forms.choice(*get_args(Bits)),
                "bring unquantised weights to 4 or 8 bits while they are loaded",
                unset="off",
            ),
            option(
                "parallel",
                forms.whole(1),
                "requests that run at once",
                unset="what suits memory and device",
            ),
            option(
                "context",
                forms.whole(2, unit="tokens"),
                "longest prompt and answer together",
                unset="what the model was made for",
            ),
            option(
                "context_shift",
                forms.switch(),
                "a full context goes on without its older half, and prompts that are too long lose "
                "their middle; needs --cache slots",
            ),
            option(
                "memory",
                forms.size("GiB", GIBIBYTE),
                "weights, caches and working space of all models together, in GiB, such as 6 or "
                "6.5",
                unset="what suits the device",
            ),
            option(
                "cache",
                forms.choice(*get_args(CachePolicy)),
                "prefix cache: the last conversation, one for each place, or a tree of all",
                unset="single with --parallel 1, else radix",
            ),
            option(
                "multi_user",
                forms.switch(),
                "slots serve prompts that share a beginning with a busy one; needs --cache slots",
            ),
            option(
                "exact",
                forms.switch(),
                "cached answers equal uncached ones to the bit, at the price of re-reading answers",
            ),
            option(
                "prefill_chunk",
                forms.whole(1, unit="tokens"),
                "prompt tokens per step; a cancellation waits for one step at most",
                unset="128 on a CPU, else 512",
            ),
            option(
                "watchdog",
                forms.time(),
                "silence of a busy engine after which /health reports it, and its process is "
                "replaced",
            ),
        ),
    ),
    Group(
        title="limits",
        options=(
            option(
                "max_queue",
                forms.whole(0),
                "requests that may wait for a place; one more is refused with 429",
            ),
            option(
                "max_per_key",
                forms.whole(1),
                "answers that one key may have in the making at once",
                unset="no limit",
            ),
            option(
                "max_tokens",
                forms.whole(1, unit="tokens"),
                "tokens after which an answer is cut",
                unset="no limit but the context",
            ),
            option(
                "max_time",
                forms.time(),
                "time of generation after which an answer is cut",
                unset="no limit",
            ),
            option(
                "deadline",
                forms.time(),
                "time from a request's arrival to the end of its answer; past it, an error",
                unset="no limit",
            ),
            option("max_body", forms.size("MiB", MEBIBYTE), "largest request body, in MiB"),
            option("max_connections", forms.whole(1), "connections open at once"),
            option("header_timeout", forms.time(), "time in which a request's head must be here"),
            option("body_timeout", forms.time(), "time in which a request's body must be here"),
            option(
                "drain",
                forms.time(zero=True),
                "time that running answers get to end when the server is told to stop",
            ),
            option("ping", forms.time(), "silence on a stream after which a comment is sent"),
        ),
    ),
    Group(
        title="what is told",
        options=(
            option(
                "log_format",
                forms.choice(*get_args(LogFormat)),
                "log lines for people or for programs",
            ),
            option("log_level", forms.choice(*get_args(LogLevel)), "the least that is logged"),
            option("access_log", forms.switch(), "log a line for each request"),
            option(
                "otlp",
                forms.address(),
                "OpenTelemetry collector that gets traces, such as http://localhost:4318",
                unset="off",
            ),
            option(
                "debug",
                forms.switch(),
                "log what helps to find a fault; the log then holds pieces of prompts",
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
        "a folder, org/name on the Hugging Face hub, or a name of Ollama's",
        of=ModelSettings,
    ),
    option(
        "alias",
        forms.text("a name", "NAME"),
        "what clients call it",
        unset="its own name",
        of=ModelSettings,
    ),
    option("preload", forms.switch(), "load it at start", of=ModelSettings),
    option(
        "pinned",
        forms.switch(),
        "load it at start, and never make it leave for another one",
        of=ModelSettings,
    ),
    _of_one_model("keep_alive"),
    _of_one_model("quantize"),
    _of_one_model("parallel"),
    _of_one_model("context"),
    _of_one_model("memory"),
    _of_one_model("cache"),
)
