"""The command line: parses argv, resolves the settings and runs a command.

Knows: the commands and their arguments. Must not know: the implementation of the commands, the
sources of the settings. Heavy imports are deferred until the arguments have been validated.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from app.config import flags
from app.config.precedence import ResolvedConfig, resolve_config
from app.core.distributions import check_mlx_library, get_own_version
from app.core.errors import AppError
from app.core.settings import Settings

COMMANDS = ("serve", "launch", "pull", "list", "show", "doctor", "config", "key")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status. The status is 0 on success, 1 with one line on
    stderr on failure, and 130 after Ctrl-C.

    If the command line is invalid, the process exits immediately with status 2 and one line on
    stderr.
    """
    arguments = flags.parse_arguments(_build_parser(), argv, COMMANDS)
    try:
        status = _run_command(arguments)
        print(end="", flush=True)
        return status
    except AppError as error:
        print(f"mlxrunner: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe, as in `list | head`
        _discard_stdout()
        return 0
    except OSError as error:
        # the disk may be full, as in `config > /full/disk`, which is not a bug in mlxrunner
        _discard_stdout()
        print(f"mlxrunner: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:  # a server that is listening handles SIGINT itself
        # the interrupted command may have attached a hint on how to continue
        print("; ".join(["mlxrunner: interrupted", *interrupt.args]), file=sys.stderr)
        return 130


def _discard_stdout() -> None:
    """Redirects stdout to /dev/null. Otherwise Python would fail to flush the remaining output at
    exit and report the failure."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(arguments: argparse.Namespace) -> int:
    if arguments.command not in ("config", "key"):  # the others import MLX
        check_mlx_library()
    match arguments.command:
        case "serve":
            return _serve(_resolve_config(arguments).settings)
        case "launch":
            from app.commands.launch import LaunchOptions, launch

            options = LaunchOptions(
                program=arguments.program,
                arguments=arguments.forwarded,
                print_only=arguments.print,
            )
            return launch(options, _resolve_config(arguments))
        case "pull":
            from app.commands.pull import pull

            return pull(arguments.model, arguments.revision)
        case "list":
            from app.commands.list import list_models

            return list_models(as_json=arguments.json)
        case "doctor":
            from app.commands.doctor import diagnose

            return diagnose(as_json=arguments.json)
        case "key":
            from app.commands.key import make_key

            return make_key(arguments.name, admin=arguments.admin, file=arguments.file)
        case "config":
            from app.commands.config import show_config

            return show_config(_resolve_config(arguments), arguments.form)
        case _:
            from app.commands.show import show

            return show(_resolve_config(arguments).settings, as_json=arguments.json)


def _resolve_config(arguments: argparse.Namespace) -> ResolvedConfig:
    return resolve_config(flags.collect_flags(arguments), arguments.config, os.environ)


def _serve(settings: Settings) -> int:
    from app.serving.logs import configure_logging, flush_logs

    configure_logging(settings)
    from app.server import serve

    try:
        return serve(settings)
    finally:
        flush_logs()


def _build_parser() -> flags.CommandLineParser:
    parser = flags.CommandLineParser(
        prog="mlxrunner", description="Serve language models from your own machine on Apple's MLX."
    )
    parser.add_argument("--version", action="version", version=get_own_version())
    parser.forwarding_commands = frozenset({"launch"})
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, words: str) -> argparse.ArgumentParser:
        # an abbreviated flag could match a different flag in the next version
        return commands.add_parser(name, help=words, allow_abbrev=False)

    serve = add("serve", "serve models over HTTP")
    _add_launch_arguments(add("launch", "run a coding agent that uses this server"))
    pull = add("pull", "download a model from the Hugging Face hub")
    pull.add_argument("model", metavar="ORG/NAME", help="model name on the hub")
    pull.add_argument("--revision", help="a branch, tag or commit (default: the main branch)")
    listed = add("list", "list the models on this machine")
    show = add("show", "describe a model and whether it fits in memory")
    doctor = add("doctor", "check the compute backend of this machine and show possible speedups")
    config = add("config", "show the effective settings and where each one comes from")
    form = config.add_mutually_exclusive_group()
    for name, use in (("json", "print JSON"), ("toml", "print a file for --config")):
        form.add_argument(f"--{name}", action="store_const", dest="form", const=name, help=use)
    key = add("key", "create an API key and print it once")
    key.add_argument(
        "name", metavar="NAME", help="name of the key's owner, as it appears in the log"
    )
    key.add_argument(
        "--admin", action="store_true", help="allow the key to load and unload models, too"
    )
    key.add_argument(
        "--file", type=Path, metavar="FILE", help="append the key's digest to this file"
    )
    for command in (listed, show, doctor):
        command.add_argument("--json", action="store_true", help="print JSON")
    for command in (serve, show, config):
        flags.add_setting_flags(command)
    return parser


def _add_launch_arguments(launch: argparse.ArgumentParser) -> None:
    from app.commands.client_programs import PROGRAMS

    launch.usage = "%(prog)s [options] PROGRAM [MODEL] [-- ARGUMENT ...]"
    names = ", ".join(PROGRAMS)
    launch.add_argument(
        "program",
        metavar="PROGRAM",
        choices=list(PROGRAMS),
        help=f"{names}; words after -- are its arguments",
    )
    launch.add_argument(
        "--print", action="store_true", help="print the settings of the program and do not run it"
    )
    flags.add_setting_flags(launch)
