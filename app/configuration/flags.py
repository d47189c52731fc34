"""The command line's flags, made from the table of options.

Knows: argparse. Must not know: commands, the other sources.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from app.configuration.forms import Misread, nearest
from app.configuration.option import Option
from app.configuration.options import GROUPS, OPTIONS
from app.configuration.sources import Found, Given
from app.core.settings import ModelSettings


def add_settings(command: argparse.ArgumentParser) -> None:
    """Every setting. What is not given leaves no trace, so that another source may give it."""
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
            _add(section.add_argument, option)


def given(arguments: argparse.Namespace) -> Given:
    found = {
        option.field: Found(value=_value(option, arguments), place=option.flag)
        for option in OPTIONS
        if hasattr(arguments, option.field)
    }
    if arguments.models:
        models = tuple(ModelSettings(name=name) for name in arguments.models)
        found["models"] = Found(value=models, place="command line")
    return found


class Parser(argparse.ArgumentParser):
    """Exits with status 2 and one line for a bad command line; argparse would print all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mlxrunner: {message.removeprefix('argument ')}\n")


def parsed(
    parser: Parser, words: Sequence[str] | None, commands: Sequence[str] = ()
) -> argparse.Namespace:
    """Models may stand between flags, which argparse does not allow for; a flag that there is not
    is refused with the one that was perhaps meant, and so is a command. Exits with 2 for what
    cannot be read. commands: the known ones; the first word must be one of them or a flag."""
    words = sys.argv[1:] if words is None else words
    first = next(iter(words), "")
    if commands and not first.startswith("-") and first not in commands:
        listed = f"the commands are {', '.join(commands)}{nearest(first, commands)}"
        parser.error(f"unknown command {first!r}: {listed}" if first else f"no command: {listed}")
    arguments, rest = parser.parse_known_args(words)
    models: list[str] | None = getattr(arguments, "models", None)
    strange = [word for word in rest if word.startswith("-") or models is None]
    if strange:
        name = strange[0].partition("=")[0]
        name = name if name.isprintable() else repr(name)
        command = getattr(arguments, "command", None) or ""
        help_ = " ".join(part for part in ("mlxrunner", command, "--help") if part)
        if name.startswith("-"):
            flags = (option.flag for option in OPTIONS) if models is not None else ()
            why = f"unknown option {name}{nearest(name, flags)}"
        else:
            why = f"unexpected argument {name!r}"
        parser.error(f"{why} (`{help_}` lists what is accepted)")
    if models is not None:
        models += rest
    return arguments


def _add(add_argument: Callable[..., argparse.Action], option: Option) -> None:
    words = f"{option.help} (default: {option.shown(option.default)})".replace("%", "%%")
    if option.is_switch:
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
        action="extend" if option.form.many else "store",
        type=_reader(option),
        default=argparse.SUPPRESS,
        metavar=option.form.metavar,
        help=words,
        dest=option.field,
    )


def _reader(option: Option) -> Callable[[str], Any]:
    def read(word: str) -> Any:
        try:
            return option.read(word)
        except Misread as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    return read


def _value(option: Option, arguments: argparse.Namespace) -> Any:
    value = getattr(arguments, option.field)
    return tuple(value) if option.form.many else value
