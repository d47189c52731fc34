"""The arguments of each command, and the call that runs it.

Knows: the commands and their arguments. Must not know: the implementation of the commands, their
order in `--help`, the sources of the settings. Heavy imports are deferred until the arguments have
been validated.

A command is one block here (`add_…_arguments`, `run_…`) and one row in `app/cli.py`.
"""

import argparse
import datetime
import os
from pathlib import Path

from app.config import flags, value_types
from app.config.command_line import CommandLineParser, make_argparse_type
from app.config.precedence import ResolvedConfig, resolve_config


def _resolve_config(arguments: argparse.Namespace) -> ResolvedConfig:
    return resolve_config(flags.collect_flags(arguments), arguments.config, os.environ)


def add_serve_arguments(parser: CommandLineParser) -> None:
    flags.add_setting_flags(parser)


def run_serve(arguments: argparse.Namespace) -> int:
    from app.serving.logs import configure_logging, flush_logs
    from app.serving.reload_signal import ReloadSignal

    reload_signal = ReloadSignal()
    with reload_signal.handled():
        configuration = _resolve_config(arguments)
        configure_logging(configuration.settings)
        from app.server import serve

        try:
            return serve(
                configuration.settings,
                configuration.path,
                lambda: _resolve_config(arguments).settings,
                reload_signal,
            )
        finally:
            flush_logs()


def add_run_arguments(parser: CommandLineParser) -> None:
    parser.usage = "%(prog)s [options] [MODEL] [PROMPT]"
    group = parser.add_argument_group("answer")
    group.add_argument("--system", metavar="TEXT", help="the system message")
    group.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        help="let the model reason before it answers (default: the model's own)",
    )
    group.add_argument(
        "--format", metavar="json|FILE", help="answer in JSON, or by the JSON schema in a file"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature")
    group.add_argument("--seed", type=int, metavar="N", help="seed of the random numbers")
    group.add_argument(
        "--verbose", action="store_true", help="show the speed and the token counts of each answer"
    )
    group.add_argument(
        "--no-history", action="store_true", help="keep no typed lines for the next chat"
    )
    flags.add_setting_flags(
        parser,
        "a model name, and then the prompt (default: the first model of the running server, or the "
        "built-in model; without a prompt, a chat)",
    )


def run_run(arguments: argparse.Namespace) -> int:
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


def add_launch_arguments(parser: CommandLineParser) -> None:
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
    flags.add_setting_flags(
        parser,
        "a folder, org/name on the Hugging Face hub, or an Ollama model name (default: the first "
        "model of the running server, or the built-in model)",
    )


def run_launch(arguments: argparse.Namespace) -> int:
    from app.commands.launch import LaunchOptions, launch

    options = LaunchOptions(
        program=arguments.program, arguments=arguments.forwarded, print_only=arguments.print
    )
    return launch(options, _resolve_config(arguments))


def add_pull_arguments(parser: CommandLineParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="model name on the hub, or in Ollama's library"
    )
    parser.add_argument("--revision", help="a branch, tag or commit (default: the main branch)")


def run_pull(arguments: argparse.Namespace) -> int:
    from app.commands.pull import pull

    return pull(arguments.model, arguments.revision)


def add_list_arguments(parser: CommandLineParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--names", action="store_true", help="print only the names")


def run_list(arguments: argparse.Namespace) -> int:
    from app.commands.list import list_models

    return list_models(as_json=arguments.json, names_only=arguments.names)


def add_show_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags.add_setting_flags(parser)


def run_show(arguments: argparse.Namespace) -> int:
    from app.commands.show import show

    return show(_resolve_config(arguments).settings, as_json=arguments.json)


def add_rm_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("names", nargs="+", metavar="MODEL", help="model names as in `list`")
    parser.add_argument(
        "--force", action="store_true", help="delete a model even if a server has loaded it"
    )
    flags.add_address_flags(parser)


def run_rm(arguments: argparse.Namespace) -> int:
    from app.commands.library import remove

    return remove(arguments.names, _resolve_config(arguments).settings, arguments.force)


def add_cp_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("source", metavar="MODEL", help="an installed model")
    parser.add_argument("destination", metavar="NAME", help="its new name, such as name:tag")


def run_cp(arguments: argparse.Namespace) -> int:
    from app.commands.library import copy

    return copy(arguments.source, arguments.destination)


def add_ps_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags.add_address_flags(parser)


def run_ps(arguments: argparse.Namespace) -> int:
    from app.commands.ps import list_running

    return list_running(_resolve_config(arguments).settings, as_json=arguments.json)


def add_stop_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model name as in `ps`")
    flags.add_address_flags(parser)


def run_stop(arguments: argparse.Namespace) -> int:
    from app.commands.stop import stop

    return stop(arguments.model, _resolve_config(arguments).settings)


def add_bench_arguments(parser: CommandLineParser) -> None:
    from app.commands.bench_arguments import add_bench_arguments

    add_bench_arguments(parser)


def run_bench(arguments: argparse.Namespace) -> int:
    from app.commands.bench import bench

    return bench(arguments)


def add_doctor_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    from app.commands.doctor import diagnose

    return diagnose(as_json=arguments.json)


def add_prove_arguments(parser: CommandLineParser) -> None:
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
        help="approximate length of the proof (default: 90)",
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    flags.add_setting_flags(
        parser,
        "a folder, org/name on the Hugging Face hub, or an Ollama model name (default: the "
        "built-in model)",
    )


def run_prove(arguments: argparse.Namespace) -> int:
    from app.commands.prove import ProofCommand
    from app.prove.proof import ProofOptions

    options = ProofOptions(
        seed=arguments.seed,
        conversations=arguments.conversations,
        seconds=arguments.seconds,
    )
    command = ProofCommand(_resolve_config(arguments), options)
    return command.run(as_json=arguments.json)


def add_config_arguments(parser: CommandLineParser) -> None:
    form = parser.add_mutually_exclusive_group()
    for name, use in (("json", "print JSON"), ("toml", "print a file for --config")):
        form.add_argument(f"--{name}", action="store_const", dest="form", const=name, help=use)
    flags.add_setting_flags(parser)


def run_config(arguments: argparse.Namespace) -> int:
    from app.commands.config import show_config

    return show_config(_resolve_config(arguments), arguments.form)


def add_key_arguments(parser: CommandLineParser) -> None:
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


def run_key(arguments: argparse.Namespace) -> int:
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


_SHELLS = ("bash", "zsh", "fish")


def add_completion_arguments(parser: CommandLineParser) -> None:
    parser.add_argument(
        "shell",
        metavar="SHELL",
        choices=_SHELLS,
        type=make_argparse_type(value_types.choice(*_SHELLS).parse_text),
        help="bash, zsh or fish",
    )
