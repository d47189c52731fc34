"""`docs/commands.md`, from the parser of the command line.

Knows: the parser, the settings. Must not know: the other pages.
"""

from collections.abc import Iterator

from app import cli
from app.commands import declarations
from app.config.command_line import CommandArgument, CommandLineParser
from app.config.options import OPTIONS
from tests.manual.tables import format_table

HEAD = """\
# Commands

<!-- This page is generated. `make manual` writes it from the command line's parser. -->

`mlxrunner COMMAND --help` prints the same. The exit status is 0 after success, 1 after an error,
which is printed as one line, 2 for an invalid command line, and 130 after Ctrl-C.
`mlxrunner --version` prints the version.
"""

SETTING_FLAGS = frozenset(option.flag for option in OPTIONS) | {"--config", "--help-all"}
"""Flags of every command that reads the settings of `serve`."""


def render() -> str:
    parser = cli._build_parser()
    parts = [HEAD]
    for command in declarations.COMMANDS:
        parts += _render_command(
            parser.subcommands[command.name], command.summary, list(command.examples)
        )
    return "\n".join(parts).rstrip() + "\n"


def list_own_arguments(parser: CommandLineParser) -> list[CommandArgument]:
    """The arguments, without the settings of `serve` where a command has all of them."""
    arguments = [
        argument for argument in parser.list_arguments() if argument.flags != ("-h", "--help")
    ]
    if not accepts_settings(parser):
        return arguments
    return [argument for argument in arguments if not SETTING_FLAGS & set(argument.flags)]


def accepts_settings(parser: CommandLineParser) -> bool:
    return set(parser.list_flags()) >= SETTING_FLAGS


def _render_command(
    parser: CommandLineParser, summary: str, examples: list[tuple[str, str]]
) -> Iterator[str]:
    yield f"## {parser.prog}\n"
    yield f"{summary[:1].upper()}{summary[1:]}.\n"
    yield f"```text\n{_format_usage(parser)}\n```\n"
    rows = [
        (f"`{_format_argument(argument)}`", argument.help)
        for argument in list_own_arguments(parser)
    ]
    if rows:
        yield format_table(("argument", "effect"), rows)
    if accepts_settings(parser):
        link = "[settings](configuration.md#options-of-mlxrunner-serve)"
        yield f"`--config` and all {link} are options of this command.\n"
    width = max(len(line) for line, _ in examples)
    lines = [f"{line:<{width}}  # {effect}" for line, effect in examples]
    yield "\n".join(["```sh", *lines, "```", ""])


def _format_usage(parser: CommandLineParser) -> str:
    assert parser.usage is not None
    return parser.usage % {"prog": parser.prog}


def _format_argument(argument: CommandArgument) -> str:
    if not argument.flags:
        return argument.placeholder
    words = ", ".join(argument.flags)
    value = argument.placeholder or argument.flags[-1].lstrip("-").replace("-", "_").upper()
    return f"{words} {value}" if argument.takes_value else words
