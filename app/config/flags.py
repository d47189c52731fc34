"""The command-line flags, generated from the table of options.

Knows: argparse. Must not know: commands, the other sources of settings.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from app.config.options import GROUPS, OPTIONS, Option
from app.config.sources import SourcedValue, SourcedValues
from app.config.value_types import InvalidOptionValue, suggest
from app.core.settings import ModelSettings


def add_setting_flags(command: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting. A flag that is not given sets no attribute, so that another
    source can provide the value."""
    command.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a folder, org/name on the Hugging Face hub, or an Ollama model name; repeatable "
        "(default: the built-in model)",
    )
    command.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with settings; flags override environment variables, which override the "
        "file (default: MLXRUNNER_CONFIG, else none)",
    )
    for group in GROUPS:
        section = command.add_argument_group(group.title)
        for option in group.options:
            _add_flag(section.add_argument, option)


def add_address_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags that select a running server."""
    command.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with the server's settings (default: MLXRUNNER_CONFIG, else none)",
    )
    section = command.add_argument_group("running server")
    for option in OPTIONS:
        if option.field in ("host", "port"):
            _add_flag(section.add_argument, option)


def collect_flags(arguments: argparse.Namespace) -> SourcedValues:
    found = {
        option.field: SourcedValue(value=_flag_value(option, arguments), source=option.flag)
        for option in OPTIONS
        if hasattr(arguments, option.field)
    }
    if getattr(arguments, "models", None):
        models = tuple(ModelSettings(name=name) for name in arguments.models)
        found["models"] = SourcedValue(value=models, source="command line")
    return found


class CommandLineParser(argparse.ArgumentParser):
    """A parser that exits with status 2 and prints one line for an invalid command line. argparse
    itself would print all options.

    forwarding_commands: the commands that run another program. The words after `--` are that
    program's arguments.
    """

    forwarding_commands: frozenset[str] = frozenset()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mlxrunner: {message.removeprefix('argument ')}\n")


def parse_arguments(
    parser: CommandLineParser, argv: Sequence[str] | None, commands: Sequence[str] = ()
) -> argparse.Namespace:
    """Parses the command line. Models may be given between flags, which argparse does not support.

    An unknown flag or command is rejected, and the error suggests the most similar one. The process
    exits with status 2 for an invalid command line. commands: the known commands. The first
    argument must be one of them or a flag. The result's `forwarded` holds the arguments of the
    program that the command runs.
    """
    argv = sys.argv[1:] if argv is None else argv
    first = next(iter(argv), "")
    if commands and not first.startswith("-") and first not in commands:
        listed = f"the commands are {', '.join(commands)}{suggest(first, commands)}"
        parser.error(f"unknown command {first!r}: {listed}" if first else f"no command: {listed}")
    words, forwarded = _split_forwarded(argv) if first in parser.forwarding_commands else (argv, ())
    arguments, rest = parser.parse_known_args(words)
    arguments.forwarded = tuple(forwarded)
    models: list[str] | None = getattr(arguments, "models", None)
    unknown = [word for word in rest if word.startswith("-") or models is None]
    if unknown:
        name = unknown[0].partition("=")[0]
        name = name if name.isprintable() else repr(name)
        command = getattr(arguments, "command", None) or ""
        help_ = " ".join(part for part in ("mlxrunner", command, "--help") if part)
        if name.startswith("-"):
            flags = (option.flag for option in OPTIONS) if models is not None else ()
            why = f"unknown option {name}{suggest(name, flags)}"
        else:
            why = f"unexpected argument {name!r}"
        parser.error(f"{why} (`{help_}` lists what is accepted)")
    if models is not None:
        models += rest
    return arguments


def _split_forwarded(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits a command line at the first `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]


def _add_flag(add_argument: Callable[..., argparse.Action], option: Option) -> None:
    words = f"{option.help} (default: {option.format_value(option.default)})".replace("%", "%%")
    if option.is_boolean:
        add_argument(
            option.flag,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=words,
            dest=option.field,
        )
        return
    add_argument(
        option.flag,
        action="extend" if option.value_type.is_list else "store",
        type=_make_argparse_type(option),
        default=argparse.SUPPRESS,
        metavar=option.value_type.metavar,
        help=words,
        dest=option.field,
    )


def _make_argparse_type(option: Option) -> Callable[[str], Any]:
    def read(word: str) -> Any:
        try:
            return option.parse_text(word)
        except InvalidOptionValue as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    return read


def _flag_value(option: Option, arguments: argparse.Namespace) -> Any:
    value = getattr(arguments, option.field)
    return tuple(value) if option.value_type.is_list else value
