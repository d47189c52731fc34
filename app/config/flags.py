"""The command-line flags, generated from the table of options.

Knows: argparse's arguments. Must not know: commands, help texts, the other sources of settings.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.config.command_line import CommandLineParser, make_argparse_type
from app.config.options import GROUPS, OPTIONS, Option
from app.config.sources import SourcedValue, SourcedValues
from app.core.settings import ModelSettings

_MODELS_HELP = (
    "a folder, org/name on the Hugging Face hub, or an Ollama model name; repeatable (default: the "
    "built-in model)"
)

# for commands that use a server and do not listen
_ADDRESS_HELP = {"host": "address of the server", "port": "port of the server"}


def add_setting_flags(command: CommandLineParser, models_help: str = _MODELS_HELP) -> None:
    """Adds the positional arguments and a flag for every setting. Flags that are not given do not
    set an attribute, so that another source can provide the value. models_help: the help text of
    the positional arguments."""
    command.add_argument("models", nargs="*", metavar="MODEL", help=models_help)
    command.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with settings; flags override environment variables, which override the "
        "file (default: MLXRUNNER_CONFIG, else none)",
    )
    for group in GROUPS:
        section = command.add_argument_group(group.title)
        for option in group.options:
            action = _add_flag(section.add_argument, option)
            if not option.is_common:
                command.hide_in_short_help(action)


def add_address_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags that select a running server."""
    command.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with the server's settings (default: MLXRUNNER_CONFIG, else none)",
    )
    section = command.add_argument_group("running server")
    for option in OPTIONS:
        if option.field in _ADDRESS_HELP:
            _add_flag(section.add_argument, replace(option, help=_ADDRESS_HELP[option.field]))


def collect_flags(arguments: argparse.Namespace) -> SourcedValues:
    values = {
        option.field: SourcedValue(value=_flag_value(option, arguments), source=option.flag)
        for option in OPTIONS
        if hasattr(arguments, option.field)
    }
    if getattr(arguments, "models", None):
        models = tuple(ModelSettings(name=name) for name in arguments.models)
        values["models"] = SourcedValue(value=models, source="command line")
    return values


def _add_flag(add_argument: Callable[..., argparse.Action], option: Option) -> argparse.Action:
    text = f"{option.help} (default: {option.format_value(option.default)})".replace("%", "%%")
    if option.is_boolean:
        return add_argument(
            option.flag,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
            dest=option.field,
        )
    return add_argument(
        option.flag,
        action="extend" if option.value_type.is_list else "store",
        type=make_argparse_type(option.parse_text),
        default=argparse.SUPPRESS,
        metavar=option.value_type.metavar,
        help=text,
        dest=option.field,
    )


def _flag_value(option: Option, arguments: argparse.Namespace) -> Any:
    value = getattr(arguments, option.field)
    return tuple(value) if option.value_type.is_list else value
