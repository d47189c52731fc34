"""The arguments of each command, and the call that runs it.

Knows: the commands and their arguments. Must not know: the implementation of the commands, their
order in `--help`, the sources of the settings. Heavy imports are deferred until the arguments have
been validated.

A command is one block here (`add_…_arguments`, `run_…`) and one row in `app/cli.py`.
"""

import argparse
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

    settings = _resolve_config(arguments).settings
    configure_logging(settings)
    from app.server import serve

    try:
        return serve(settings)
    finally:
        flush_logs()


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
    flags.add_setting_flags(parser)


def run_launch(arguments: argparse.Namespace) -> int:
    from app.commands.launch import LaunchOptions, launch

    options = LaunchOptions(
        program=arguments.program, arguments=arguments.forwarded, print_only=arguments.print
    )
    return launch(options, _resolve_config(arguments))


def add_pull_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("model", metavar="ORG/NAME", help="model name on the hub")
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


def add_doctor_arguments(parser: CommandLineParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    from app.commands.doctor import diagnose

    return diagnose(as_json=arguments.json)


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


def run_key(arguments: argparse.Namespace) -> int:
    from app.commands.key import make_key

    return make_key(arguments.name, admin=arguments.admin, file=arguments.file)


_SHELLS = ("bash", "zsh", "fish")


def add_completion_arguments(parser: CommandLineParser) -> None:
    parser.add_argument(
        "shell",
        metavar="SHELL",
        choices=_SHELLS,
        type=make_argparse_type(value_types.choice(*_SHELLS).parse_text),
        help="bash, zsh or fish",
    )
