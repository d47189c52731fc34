"""Every command: its name, help and arguments, and the call that runs it.

Knows: the commands, their arguments, groups and examples. Must not know: the implementation of the
commands, the sources of the settings. Heavy imports are deferred until the arguments have been
validated.

A command is one block here and a name in `COMMANDS`, which determines its position in `--help`.
"""

import argparse
import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.config import command_line, value_types
from app.config.command_line import CommandLineParser, Examples, make_argparse_type
from app.config.precedence import ResolvedConfig, resolve_config

_START, _MODELS, _MACHINE = "get started", "models", "settings and tools"

_SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """group: its heading in `--help`. uses_mlx: whether it imports MLX or starts a process that
    does. other_names: its names in other programs, for suggestions."""

    name: str
    group: str
    summary: str
    add_arguments: Callable[[CommandLineParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: Examples
    uses_mlx: bool = False
    other_names: str = ""


def _resolve_config(arguments: argparse.Namespace) -> ResolvedConfig:
    return resolve_config(command_line.collect_flags(arguments), arguments.config, os.environ)


def _add_serve_arguments(parser: CommandLineParser) -> None:
    command_line.add_setting_flags(parser)


def _run_serve(arguments: argparse.Namespace) -> int:
    from app.commands.serve import serve

    return serve(lambda: _resolve_config(arguments))


SERVE = Command(
    name="serve",
    group=_START,
    summary="serve models over HTTP",
    add_arguments=_add_serve_arguments,
    run=_run_serve,
    examples=(
        ("mlxrunner serve", "the built-in model, on http://127.0.0.1:8080"),
        ("mlxrunner serve mlx-community/Qwen3-4B-4bit --pull", "download it if missing"),
        ("mlxrunner serve --installed --memory 12GB", "every model on this machine"),
        ("mlxrunner serve ~/models/llama --context 8K --port 9000", "a local folder"),
    ),
    uses_mlx=True,
    other_names="start server up daemon api",
)


def _add_run_arguments(parser: CommandLineParser) -> None:
    parser.usage = "%(prog)s [options] [MODEL] [PROMPT]"
    group = parser.add_argument_group("answer")
    group.add_argument("--system", metavar="TEXT", help="the system message")
    group.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        help="let the model reason before it answers (default: the model's own)",
    )
    group.add_argument(
        "--format", metavar="json|FILE", help="answer in JSON, or follow the JSON schema in a file"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature")
    group.add_argument("--seed", type=int, metavar="N", help="seed of the random numbers")
    group.add_argument(
        "--verbose", action="store_true", help="show the speed and the token counts of each answer"
    )
    group.add_argument(
        "--no-history", action="store_true", help="do not save the typed lines for later chats"
    )
    command_line.add_setting_flags(
        parser,
        "a model name, and then the prompt (default: the first model of the running server, or the "
        "built-in model; without a prompt, a chat)",
    )


def _run_run(arguments: argparse.Namespace) -> int:
    from app.commands.run import RunOptions, run

    sampling = {name: getattr(arguments, name) for name in ("temperature", "seed")}
    options = RunOptions(
        words=tuple(arguments.models),
        system=arguments.system,
        think=arguments.think,
        output_format=arguments.format,
        parameters={name: value for name, value in sampling.items() if value is not None},
        verbose=arguments.verbose,
        history=not arguments.no_history,
    )
    # the words are a model and a prompt, and no settings
    arguments.models = []
    return run(options, _resolve_config(arguments))


RUN = Command(
    name="run",
    group=_START,
    summary="chat with a model, or ask it one question",
    add_arguments=_add_run_arguments,
    run=_run_run,
    examples=(
        ("mlxrunner run qwen3:4b", "a chat in the terminal"),
        ('mlxrunner run qwen3:4b "Why is the sky blue?"', "one answer"),
        ('git diff | mlxrunner run qwen3:4b "Write a commit message"', "text from a pipe"),
    ),
    uses_mlx=True,
    other_names="chat ask generate prompt",
)


def _add_launch_arguments(parser: CommandLineParser) -> None:
    from app.commands.client_programs import PROGRAMS

    parser.usage = "%(prog)s PROGRAM [MODEL] [options] [-- ARGUMENT ...]"
    parser.add_argument(
        "program",
        metavar="PROGRAM",
        choices=list(PROGRAMS),
        type=make_argparse_type(value_types.choice(*PROGRAMS).parse_text),
        help=f"{', '.join(PROGRAMS)}; words after -- are its arguments",
    )
    parser.add_argument(
        "--print", action="store_true", help="print the settings of the program and do not run it"
    )
    command_line.add_setting_flags(
        parser,
        "a folder, org/name on the Hugging Face hub, or an Ollama model name (default: the first "
        "model of the running server, or the built-in model)",
    )


def _run_launch(arguments: argparse.Namespace) -> int:
    from app.commands.launch import LaunchOptions, launch

    options = LaunchOptions(
        program=arguments.program, arguments=arguments.forwarded, print_only=arguments.print
    )
    return launch(options, _resolve_config(arguments))


LAUNCH = Command(
    name="launch",
    group=_START,
    summary="run a coding agent that uses this server",
    add_arguments=_add_launch_arguments,
    run=_run_launch,
    examples=(
        ("mlxrunner launch claude mlx-community/Qwen3-4B-4bit", "Claude Code"),
        ("mlxrunner launch codex --print", "show the settings only"),
    ),
    uses_mlx=True,
    other_names="agent code",
)


def _add_pull_arguments(parser: CommandLineParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="model name on the hub, or in Ollama's library"
    )
    parser.add_argument("--revision", help="a branch, tag or commit (default: the main branch)")


def _run_pull(arguments: argparse.Namespace) -> int:
    from app.commands.pull import pull

    return pull(arguments.model, arguments.revision)


PULL = Command(
    name="pull",
    group=_MODELS,
    summary="download a model from the Hugging Face hub",
    add_arguments=_add_pull_arguments,
    run=_run_pull,
    examples=(("mlxrunner pull mlx-community/Qwen3-4B-4bit", "resumes if interrupted"),),
    uses_mlx=True,
    other_names="download get install fetch add",
)


def _add_list_arguments(parser: CommandLineParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--names", action="store_true", help="print only the names")


def _run_list(arguments: argparse.Namespace) -> int:
    from app.commands.list import list_models

    return list_models(as_json=arguments.json, names_only=arguments.names)


LIST = Command(
    name="list",
    group=_MODELS,
    summary="list the models on this machine",
    add_arguments=_add_list_arguments,
    run=_run_list,
    examples=(("mlxrunner list", "names, sizes, architectures, and which models read images"),),
    other_names="ls models images",
)


def _add_show_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    command_line.add_setting_flags(parser)


def _run_show(arguments: argparse.Namespace) -> int:
    from app.commands.show import show

    return show(_resolve_config(arguments).settings, as_json=arguments.json)


SHOW = Command(
    name="show",
    group=_MODELS,
    summary="show a model's details and whether it fits in memory",
    add_arguments=_add_show_arguments,
    run=_run_show,
    examples=(("mlxrunner show qwen3:4b --context 32K", "does it fit with this context?"),),
    uses_mlx=True,
    other_names="info inspect describe",
)


def _add_rm_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("names", nargs="+", metavar="MODEL", help="model names as in `list`")
    parser.add_argument(
        "--force", action="store_true", help="delete a model even if a server has loaded it"
    )
    command_line.add_address_flags(parser)


def _run_rm(arguments: argparse.Namespace) -> int:
    from app.commands.library import remove

    return remove(arguments.names, _resolve_config(arguments).settings, arguments.force)


RM = Command(
    name="rm",
    group=_MODELS,
    summary="delete installed models",
    add_arguments=_add_rm_arguments,
    run=_run_rm,
    examples=(("mlxrunner rm qwen3:4b", "from the Hugging Face cache or Ollama's store"),),
    other_names="remove delete uninstall",
)


def _add_cp_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("source", metavar="MODEL", help="an installed model")
    parser.add_argument("destination", metavar="NAME", help="its new name, such as name:tag")


def _run_cp(arguments: argparse.Namespace) -> int:
    from app.commands.library import copy

    return copy(arguments.source, arguments.destination)


CP = Command(
    name="cp",
    group=_MODELS,
    summary="copy a model to a new name in Ollama's store",
    add_arguments=_add_cp_arguments,
    run=_run_cp,
    examples=(("mlxrunner cp mlx-community/Qwen3-4B-4bit mine:v1", "shares the files"),),
    other_names="copy rename mv",
)


def _add_ps_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    command_line.add_address_flags(parser)


def _run_ps(arguments: argparse.Namespace) -> int:
    from app.commands.loaded_models import list_running

    return list_running(_resolve_config(arguments).settings, as_json=arguments.json)


PS = Command(
    name="ps",
    group=_MODELS,
    summary="list the models that the running server has loaded",
    add_arguments=_add_ps_arguments,
    run=_run_ps,
    examples=(("mlxrunner ps", "memory, context and expiry"),),
    other_names="running loaded",
)


def _add_stop_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model name as in `ps`")
    command_line.add_address_flags(parser)


def _run_stop(arguments: argparse.Namespace) -> int:
    from app.commands.loaded_models import stop

    return stop(arguments.model, _resolve_config(arguments).settings)


STOP = Command(
    name="stop",
    group=_MODELS,
    summary="unload a model of the running server",
    add_arguments=_add_stop_arguments,
    run=_run_stop,
    examples=(("mlxrunner stop qwen3:4b", "frees its memory"),),
    other_names="unload eject kill",
)


def _add_bench_arguments(parser: CommandLineParser) -> None:
    from app.commands.bench_arguments import add_bench_arguments

    add_bench_arguments(parser)


def _run_bench(arguments: argparse.Namespace) -> int:
    from app.commands.bench import bench

    return bench(arguments)


BENCH = Command(
    name="bench",
    group=_MACHINE,
    summary="measure the latency and throughput of a server under load",
    add_arguments=_add_bench_arguments,
    run=_run_bench,
    examples=(
        ("mlxrunner bench --max-concurrency 1,4,16", "the running server"),
        (
            "mlxrunner bench --compare http://a:8080 http://b:8080",
            "two servers",
        ),
    ),
    other_names="benchmark perf load-test loadtest",
)


def _add_doctor_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_doctor(arguments: argparse.Namespace) -> int:
    from app.commands.doctor import diagnose

    return diagnose(as_json=arguments.json)


DOCTOR = Command(
    name="doctor",
    group=_MACHINE,
    summary="check this machine's compute backend and show possible speedups",
    add_arguments=_add_doctor_arguments,
    run=_run_doctor,
    examples=(("mlxrunner doctor", "MLX, kernels, memory, problems"),),
    uses_mlx=True,
    other_names="check status diagnose",
)


def _add_prove_arguments(parser: CommandLineParser) -> None:
    group = parser.add_argument_group("proof")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the conversations (default: 0)"
    )
    group.add_argument(
        "--conversations",
        type=make_argparse_type(value_types.integer(1, 1000).parse_text),
        metavar="N",
        help="number of conversations (default: as many as fit in --seconds, up to 12)",
    )
    group.add_argument(
        "--seconds",
        type=make_argparse_type(value_types.duration().parse_text),
        default=90.0,
        metavar="TIME",
        help="approximate duration of the proof (default: 90)",
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    command_line.add_setting_flags(
        parser,
        "a folder, org/name on the Hugging Face hub, or an Ollama model name (default: the "
        "built-in model)",
    )


def _run_prove(arguments: argparse.Namespace) -> int:
    from app.commands.prove import ProofCommand
    from app.prove.proof import ProofOptions

    options = ProofOptions(
        seed=arguments.seed,
        conversations=arguments.conversations,
        seconds=arguments.seconds,
    )
    command = ProofCommand(_resolve_config(arguments), options)
    return command.run(as_json=arguments.json)


PROVE = Command(
    name="prove",
    group=_MACHINE,
    summary="show that batching, caching and streaming do not change a model's answers",
    add_arguments=_add_prove_arguments,
    run=_run_prove,
    examples=(("mlxrunner prove qwen3:4b", "compares token IDs and log probabilities"),),
    other_names="verify test exactness selftest",
    uses_mlx=True,
)


def _add_config_arguments(parser: CommandLineParser) -> None:
    form = parser.add_mutually_exclusive_group()
    for name, use in (("json", "print JSON"), ("toml", "print a file for --config")):
        form.add_argument(f"--{name}", action="store_const", dest="form", const=name, help=use)
    command_line.add_setting_flags(parser)


def _run_config(arguments: argparse.Namespace) -> int:
    from app.commands.config import show_config

    return show_config(_resolve_config(arguments), arguments.form)


CONFIG = Command(
    name="config",
    group=_MACHINE,
    summary="show the effective settings and where each one comes from",
    add_arguments=_add_config_arguments,
    run=_run_config,
    examples=(("mlxrunner config --toml > mlxrunner.toml", "a file for --config"),),
    other_names="settings env options",
)


def _add_key_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("name", metavar="NAME", help="owner of the key, as shown in the log")
    parser.add_argument(
        "--admin",
        action="store_true",
        help="also allow loading and unloading models, and reading metrics",
    )
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="append the key's digest to this file"
    )
    parser.add_argument(
        "--expires",
        type=_parse_date,
        metavar="DATE",
        help="reject the key from this day on (UTC), such as 2027-01-31",
    )
    parser.add_argument(
        "--daily-tokens",
        type=make_argparse_type(value_types.count(1).parse_text),
        metavar="N",
        help="prompt and generated tokens per day (UTC)",
    )
    parser.add_argument(
        "--requests-per-minute",
        type=make_argparse_type(value_types.count(1).parse_text),
        metavar="N",
        help="requests per minute, on average",
    )


def _parse_date(word: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(word)
    except ValueError:
        message = f"{word!r} is not a date such as 2027-01-31"
        raise argparse.ArgumentTypeError(message) from None


def _run_key(arguments: argparse.Namespace) -> int:
    from app.commands.key import make_key
    from app.core.usage import UsageLimits

    limits = UsageLimits(
        daily_tokens=arguments.daily_tokens, requests_per_minute=arguments.requests_per_minute
    )
    return make_key(
        arguments.name,
        admin=arguments.admin,
        file=arguments.file,
        expires=arguments.expires,
        limits=limits,
    )


KEY = Command(
    name="key",
    group=_MACHINE,
    summary="create an API key and print it once",
    add_arguments=_add_key_arguments,
    run=_run_key,
    examples=(("mlxrunner key anna --file keys.toml", "for serve --api-keys keys.toml"),),
    other_names="token login keys",
)


def _add_completion_arguments(parser: CommandLineParser) -> None:
    parser.add_argument(
        "shell",
        metavar="SHELL",
        choices=_SHELLS,
        type=make_argparse_type(value_types.choice(*_SHELLS).parse_text),
        help="bash, zsh or fish",
    )


def _run_completion(arguments: argparse.Namespace) -> int:
    from app.commands.completion import render_completion

    print(render_completion(arguments.shell, arguments.parser), end="")
    return 0


COMPLETION = Command(
    name="completion",
    group=_MACHINE,
    summary="print a script that completes commands, options and models in your shell",
    add_arguments=_add_completion_arguments,
    run=_run_completion,
    examples=(
        ('eval "$(mlxrunner completion bash)"', "in ~/.bashrc"),
        ('eval "$(mlxrunner completion zsh)"', "in ~/.zshrc"),
        ("mlxrunner completion fish | source", "in ~/.config/fish/config.fish"),
    ),
    other_names="completions autocomplete",
)


COMMANDS = (
    SERVE,
    RUN,
    LAUNCH,
    PULL,
    LIST,
    SHOW,
    RM,
    CP,
    PS,
    STOP,
    BENCH,
    PROVE,
    DOCTOR,
    CONFIG,
    KEY,
    COMPLETION,
)
