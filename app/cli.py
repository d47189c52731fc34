"""The command line: parses argv and runs a command.

Knows: exit statuses, the layout of `--help`. Must not know: the commands
(`app/commands/declarations.py`).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from types import MappingProxyType

from app.commands.declarations import COMMANDS
from app.config.command_line import (
    CommandGroup,
    CommandLineParser,
    format_commands,
    parse_arguments,
)
from app.core.distributions import check_mlx_library, get_own_version
from app.core.errors import AppError
from app.core.terminal import print_message


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status. The status is 0 on success, 1 with one line on
    stderr on failure, and 130 after Ctrl-C.

    If the command line is invalid, the process exits immediately with status 2 and one line on
    stderr.
    """
    arguments = parse_arguments(_build_parser(), argv, COMMAND_NAMES, OTHER_COMMAND_NAMES)
    try:
        status = _run_command(arguments)
        print(end="", flush=True)
        return status
    except AppError as error:
        print_message(error.message)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe, as in `list | head`
        _discard_stdout()
        return 0
    except OSError as error:
        # the disk may be full, as in `config > /full/disk`, which is not a bug in mlxrunner
        _discard_stdout()
        print_message(str(error))
        return 1
    except KeyboardInterrupt as interrupt:  # a server that is listening handles SIGINT itself
        # the interrupted command may have attached a hint on how to continue
        print_message("; ".join(["interrupted", *interrupt.args]))
        return 130


def _discard_stdout() -> None:
    """Redirects stdout to /dev/null. Otherwise Python would fail to flush the remaining output at
    exit and report the failure."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(arguments: argparse.Namespace) -> int:
    [command] = [command for command in COMMANDS if command.name == arguments.command]
    if command.uses_mlx:
        check_mlx_library()
    return command.run(arguments)


COMMAND_NAMES = tuple(command.name for command in COMMANDS)

OTHER_COMMAND_NAMES = MappingProxyType(
    {name: command.name for command in COMMANDS for name in command.other_names.split()}
    | {"help": "--help", "version": "--version"}
)

_FIRST_EXAMPLES = ("serve", "run", "launch", "pull")


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="mlxrunner",
        usage="%(prog)s COMMAND [options]",
        description="Serve language models from your own machine on Apple's MLX.",
    )
    groups = dict.fromkeys(command.group for command in COMMANDS)
    parser.epilog = format_commands(
        [
            CommandGroup(
                title=group,
                commands={c.name: c.summary for c in COMMANDS if c.group == group},
            )
            for group in groups
        ],
        [c.examples[0] for c in COMMANDS if c.name in _FIRST_EXAMPLES],
    )
    parser.add_argument(
        "--version", action=_PrintVersion, nargs=0, help="show program's version number and exit"
    )
    parser.forwarding_commands = frozenset({"launch"})
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(
        prog=parser.prog,
        dest="command",
        metavar="COMMAND",
        required=True,
        help=argparse.SUPPRESS,
    )
    for command in COMMANDS:
        # an abbreviated flag could match a different flag in the next version
        subparser = commands.add_parser(
            command.name, description=f"{_capitalize(command.summary)}.", allow_abbrev=False
        )
        command.add_arguments(subparser)
        subparser.set_usage()
        subparser.add_examples(command.examples)
        parser.subcommands[command.name] = subparser
    return parser


class _PrintVersion(argparse.Action):
    """Prints the version, which is read only for this option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(get_own_version())
        parser.exit()


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
