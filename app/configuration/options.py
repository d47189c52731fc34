"""Every setting, once: how it is written, and what is told of it.

Knows: the fields of Settings and ModelSettings. Must not know: argparse, TOML, the environment.

A setting has one name, spelled as each source spells names: `max_queue` in a file, `--max-queue` on
the command line, `MLXRUNNER_MAX_QUEUE` in the environment. What may be given several times is in
the singular on the command line.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from app.configuration import forms
from app.configuration.forms import Form
from app.core.settings import (
    MEBIBYTE,
    Bits,
    CachePolicy,
    LogFormat,
    LogLevel,
    ModelSettings,
    RunnerKind,
    Settings,
)

GIBIBYTE = 1 << 30

PREFIX = "MLXRUNNER_"

# what undoes a setting of a source that counts less, in every form
DEFAULT = "default"

# which file to read; not a setting, for a file cannot say it
CONFIG_VARIABLE = "MLXRUNNER_CONFIG"

# read by those who check keys, and never told
SECRET_VARIABLES = ("MLXRUNNER_API_KEY", "MLXRUNNER_API_KEYS")

MODELS_VARIABLE = "MLXRUNNER_MODELS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """field: of Settings, and the key in a file. default: its value there. metavar: what stands for
    a value in help. help: what it does. unset: what holds where the default is None. variable: in
    the environment."""

    field: str
    form: Form
    default: Any
    metavar: str
    help: str
    unset: str
    variable: str

    @property
    def flag(self) -> str:
        name = self.field.removesuffix("s") if self.form.many else self.field
        return "--" + name.replace("_", "-")

    def read(self, word: str) -> Any:
        """Raises Misread."""
        return self.default if word == DEFAULT else self.form.read(word)

    def take(self, value: object) -> Any:
        """From a file. Raises Misread."""
        return self.default if value == DEFAULT else self.form.take(value)

    def give(self, value: Any) -> Any:
        """For a file, where nothing stands for None."""
        return DEFAULT if value is None else self.form.give(value)

    def shown(self, value: Any) -> str:
        """For people."""
        if value is None:
            return self.unset
        given = self.form.give(value)
        if isinstance(given, bool):
            return "on" if given else "off"
        if self.form.many:
            return ", ".join(map(str, given)) or self.unset
        unit = self.form.unit if isinstance(given, (int, float)) else ""
        return f"{given} {unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    title: str
    options: tuple[Option, ...]


def _option(
    field: str,
    form: Form,
    metavar: str,
    help: str,
    *,
    unset: str = "none",
    variable: str | None = None,
    of: type[Settings] | type[ModelSettings] = Settings,
) -> Option:
    [default] = [known.default for known in dataclasses.fields(of) if known.name == field]
    return Option(
        field=field,
        form=form,
        default=None if default is dataclasses.MISSING else default,
        metavar=metavar,
        help=help,
        unset=unset,
        variable=variable or PREFIX + field.upper(),
    )


GROUPS = (
    Group(
        title="models",
        options=(
            _option(
                "installed",
                forms.switch(),
                "",
                "serve every model that is on this machine, loaded when a request names it",
            ),
            _option(
                "pull",
                forms.switch(),
                "",
                "download a model that is not here without asking",
            ),
            _option(
                "runner",
                forms.choice(*get_args(RunnerKind)),
                "HOW",
                "process: each model in a process of its own, which may die alone; thread: the "
                "only model on a thread of the server",
            ),
            _option(
                "keep_alive",
                forms.time(zero=True, forever=True),
                "TIME",
                "how long a model stays loaded without requests: seconds, 5m, 1h30m, forever",
                unset="forever for models named at start, 5m for others",
            ),
            _option(
                "max_loaded",
                forms.whole(1),
                "N",
                "models in memory at once",
                unset="as many as fit",
            ),
            _option(
                "load_timeout",
                forms.time(),
                "TIME",
                "how long a load may take without getting on",
            ),
            _option(
                "load_wait",
                forms.time(zero=True),
                "TIME",
                "how long a request that is not streamed waits for its model",
            ),
        ),
    ),
    Group(
        title="where it listens",
        options=(
            _option(
                "host", forms.text("an address or a name to listen on"), "HOST", "address to listen on"
            ),
            _option("port", forms.whole(0, 65535), "PORT", "port; 0 is any that is free"),
            _option(
                "tls_cert",
                forms.path("a file"),
                "FILE",
                "certificate and those above it, PEM; needs --tls-key",
            ),
            _option(
                "tls_key",
                forms.path("a file"),
                "FILE",
                "the certificate's private key, PEM",
            ),
        ),
    ),
    Group(
        title="who may come in",
        options=(
            _option(
                "api_keys",
                forms.path("a file"),
                "FILE",
                "file of hashed keys, which `mlxrunner key` writes",
                # the rule's own name holds keys themselves
                variable="MLXRUNNER_API_KEYS_FILE",
            ),
            _option(
                "allow_anyone",
                forms.switch(),
                "",
                "listen beyond this machine though there are no keys",
            ),
            _option(
                "allowed_hosts",
                forms.host_names(),
                "NAME",
                "further name under which the server may be addressed, such as llm.example.org or "
                ".example.org; may be given again",
            ),
            _option(
                "cors_origins",
                forms.origins(),
                "ORIGIN",
                "web page origin that may call the server, such as https://chat.example.org; may "
                "be given again (pages on loopback always may)",
            ),
        ),
    ),
    Group(
        title="how the engine uses the device",
        options=(
            _option(
                "quantize",
                forms.choice(*get_args(Bits)),
                "BITS",
                "bring unquantised weights to 4 or 8 bits while they are loaded",
                unset="off",
            ),
            _option(
                "parallel",
                forms.whole(1),
                "N",
                "requests that run at once",
                unset="what suits memory and device",
            ),
            _option(
                "context",
                forms.whole(2, unit="tokens"),
                "TOKENS",
                "longest prompt and answer together",
                unset="what the model was made for",
            ),
            _option(
                "context_shift",
                forms.switch(),
                "",
                "a full context goes on without its older half, and prompts that are too long lose "
                "their middle; needs --cache slots",
            ),
            _option(
                "memory",
                forms.size("GiB", GIBIBYTE),
                "GIB",
                "weights, caches and working space of all models together, in GiB, such as 6 or "
                "6.5",
                unset="what suits the device",
            ),
            _option(
                "cache",
                forms.choice(*get_args(CachePolicy)),
                "POLICY",
                "prefix cache: the last conversation, one for each place, or a tree of all (single, "
                "slots, radix)",
                unset="single with --parallel 1, else radix",
            ),
            _option(
                "multi_user",
                forms.switch(),
                "",
                "slots serve prompts that share a beginning with a busy one; needs --cache slots",
            ),
            _option(
                "exact",
                forms.switch(),
                "",
                "cached answers equal uncached ones to the bit, at the price of re-reading answers",
            ),
            _option(
                "prefill_chunk",
                forms.whole(1, unit="tokens"),
                "TOKENS",
                "prompt tokens per step; a cancellation waits for one step at most",
                unset="128 on a CPU, else 512",
            ),
            _option(
                "watchdog",
                forms.time(),
                "TIME",
                "silence of a busy engine after which /health reports it, and its process is "
                "replaced",
            ),
        ),
    ),
    Group(
        title="limits",
        options=(
            _option(
                "max_queue",
                forms.whole(0),
                "N",
                "requests that may wait for a place; one more is refused with 429",
            ),
            _option(
                "max_per_key",
                forms.whole(1),
                "N",
                "answers that one key may have in the making at once",
                unset="no limit",
            ),
            _option(
                "max_tokens",
                forms.whole(1, unit="tokens"),
                "TOKENS",
                "tokens after which an answer is cut",
                unset="no limit but the context",
            ),
            _option(
                "max_time",
                forms.time(),
                "TIME",
                "time of generation after which an answer is cut",
                unset="no limit",
            ),
            _option(
                "deadline",
                forms.time(),
                "TIME",
                "time from a request's arrival to the end of its answer; past it, an error",
                unset="no limit",
            ),
            _option("max_body", forms.size("MiB", MEBIBYTE), "MIB", "largest request body, in MiB"),
            _option("max_connections", forms.whole(1), "N", "connections open at once"),
            _option(
                "header_timeout", forms.time(), "TIME", "time in which a request's head must be here"
            ),
            _option(
                "body_timeout", forms.time(), "TIME", "time in which a request's body must be here"
            ),
            _option(
                "drain",
                forms.time(zero=True),
                "TIME",
                "time that running answers get to end when the server is told to stop",
            ),
            _option(
                "ping", forms.time(), "TIME", "silence on a stream after which a comment is sent"
            ),
        ),
    ),
    Group(
        title="what is told",
        options=(
            _option(
                "log_format",
                forms.choice(*get_args(LogFormat)),
                "FORMAT",
                "log lines for people or for programs (human, json)",
            ),
            _option(
                "log_level",
                forms.choice(*get_args(LogLevel)),
                "LEVEL",
                "the least that is logged (debug, info, warning, error)",
            ),
            _option("access_log", forms.switch(), "", "log a line for each request"),
            _option(
                "otlp",
                forms.address(),
                "URL",
                "OpenTelemetry collector that gets traces, such as http://localhost:4318",
                unset="off",
            ),
            _option(
                "debug",
                forms.switch(),
                "",
                "log what helps to find a fault; the log then holds pieces of prompts",
            ),
        ),
    ),
)

OPTIONS = tuple(option for group in GROUPS for option in group.options)


def _of_one_model(field: str) -> Option:
    """What may be set for all models too, and there means the same."""
    [option] = [option for option in OPTIONS if option.field == field]
    return dataclasses.replace(option, unset="as for all models")


# keys of a [[models]] table in a file, in the order of ModelSettings
MODEL_OPTIONS = (
    _option(
        "name",
        forms.text("a folder, org/name on the Hugging Face hub, or a name of Ollama's"),
        "MODEL",
        "a folder, org/name on the Hugging Face hub, or a name of Ollama's",
        of=ModelSettings,
    ),
    _option(
        "alias",
        forms.text("a name"),
        "NAME",
        "what clients call it",
        unset="its own name",
        of=ModelSettings,
    ),
    _option("preload", forms.switch(), "", "load it at start", of=ModelSettings),
    _option("pinned", forms.switch(), "", "never make it leave for another one", of=ModelSettings),
    _of_one_model("keep_alive"),
    _of_one_model("quantize"),
    _of_one_model("parallel"),
    _of_one_model("context"),
    _of_one_model("memory"),
    _of_one_model("cache"),
)


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean …?", or nothing where nothing known looks like `word`."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
