"""The command line: parses argv and runs a command.

Knows: the commands, their groups and examples, exit statuses. Must not know: the arguments and the
implementation of the commands.

A command is one block in `app/commands/command_blocks.py` and one row in `_COMMANDS`, which gives
its place in `--help`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from app.commands import command_blocks
from app.config.command_line import (
    CommandGroup,
    CommandLineParser,
    Examples,
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
    arguments = parse_arguments(_build_parser(), argv, COMMANDS, OTHER_COMMAND_NAMES)
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
    [command] = [command for command in _COMMANDS if command.name == arguments.command]
    if command.uses_mlx:
        check_mlx_library()
    return command.run(arguments)


def _run_completion(arguments: argparse.Namespace) -> int:
    from app.commands.completion import render_completion

    print(render_completion(arguments.shell, _build_parser()), end="")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """group: its heading in `--help`. uses_mlx: whether it imports MLX or starts a process that
    does. other_names: what other programs call it, for suggestions."""

    name: str
    group: str
    summary: str
    add_arguments: Callable[[CommandLineParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: Examples
    uses_mlx: bool = False
    other_names: str = ""


_START, _MODELS, _MACHINE = "get started", "models", "settings and tools"

_COMMANDS = (
    _Command(
        name="serve",
        group=_START,
        summary="serve models over HTTP",
        add_arguments=command_blocks.add_serve_arguments,
        run=command_blocks.run_serve,
        examples=(
            ("mlxrunner serve", "the built-in model, on http://127.0.0.1:8080"),
            ("mlxrunner serve mlx-community/Qwen3-4B-4bit --pull", "download it if missing"),
            ("mlxrunner serve --installed --memory 12GB", "every model on this machine"),
            ("mlxrunner serve ~/models/llama --context 8K --port 9000", "a local folder"),
        ),
        uses_mlx=True,
        other_names="start server up daemon api",
    ),
    _Command(
        name="run",
        group=_START,
        summary="chat with a model, or ask it one question",
        add_arguments=command_blocks.add_run_arguments,
        run=command_blocks.run_run,
        examples=(
            ("mlxrunner run qwen3:4b", "a chat in the terminal"),
            ('mlxrunner run qwen3:4b "Why is the sky blue?"', "one answer"),
            ('git diff | mlxrunner run qwen3:4b "Write a commit message"', "text from a pipe"),
        ),
        uses_mlx=True,
        other_names="chat ask generate prompt",
    ),
    _Command(
        name="launch",
        group=_START,
        summary="run a coding agent that uses this server",
        add_arguments=command_blocks.add_launch_arguments,
        run=command_blocks.run_launch,
        examples=(
            ("mlxrunner launch claude mlx-community/Qwen3-4B-4bit", "Claude Code"),
            ("mlxrunner launch codex --print", "show the settings only"),
        ),
        uses_mlx=True,
        other_names="agent code",
    ),
    _Command(
        name="pull",
        group=_MODELS,
        summary="download a model from the Hugging Face hub",
        add_arguments=command_blocks.add_pull_arguments,
        run=command_blocks.run_pull,
        examples=(("mlxrunner pull mlx-community/Qwen3-4B-4bit", "resumes if interrupted"),),
        uses_mlx=True,
        other_names="download get install fetch add",
    ),
    _Command(
        name="list",
        group=_MODELS,
        summary="list the models on this machine",
        add_arguments=command_blocks.add_list_arguments,
        run=command_blocks.run_list,
        examples=(("mlxrunner list", "names, sizes and architectures"),),
        other_names="ls models images",
    ),
    _Command(
        name="show",
        group=_MODELS,
        summary="show a model's details and whether it fits in memory",
        add_arguments=command_blocks.add_show_arguments,
        run=command_blocks.run_show,
        examples=(("mlxrunner show qwen3:4b --context 32K", "does it fit with this context?"),),
        uses_mlx=True,
        other_names="info inspect describe",
    ),
    _Command(
        name="rm",
        group=_MODELS,
        summary="delete installed models",
        add_arguments=command_blocks.add_rm_arguments,
        run=command_blocks.run_rm,
        examples=(("mlxrunner rm qwen3:4b", "from the Hugging Face cache or Ollama's store"),),
        other_names="remove delete uninstall",
    ),
    _Command(
        name="cp",
        group=_MODELS,
        summary="copy a model to a new name in Ollama's store",
        add_arguments=command_blocks.add_cp_arguments,
        run=command_blocks.run_cp,
        examples=(("mlxrunner cp mlx-community/Qwen3-4B-4bit mine:v1", "shares the files"),),
        other_names="copy rename mv",
    ),
    _Command(
        name="ps",
        group=_MODELS,
        summary="list the models that the running server has loaded",
        add_arguments=command_blocks.add_ps_arguments,
        run=command_blocks.run_ps,
        examples=(("mlxrunner ps", "memory, context and expiry"),),
        other_names="running loaded",
    ),
    _Command(
        name="stop",
        group=_MODELS,
        summary="unload a model of the running server",
        add_arguments=command_blocks.add_stop_arguments,
        run=command_blocks.run_stop,
        examples=(("mlxrunner stop qwen3:4b", "frees its memory"),),
        other_names="unload eject kill",
    ),
    _Command(
        name="bench",
        group=_MACHINE,
        summary="measure the latency and throughput of a server under load",
        add_arguments=command_blocks.add_bench_arguments,
        run=command_blocks.run_bench,
        examples=(
            ("mlxrunner bench --max-concurrency 1,4,16", "the running server"),
            (
                "mlxrunner bench --compare http://a:8080 http://b:8080",
                "two servers",
            ),
        ),
        other_names="benchmark perf load-test loadtest",
    ),
    _Command(
        name="prove",
        group=_MACHINE,
        summary="show that batching, caching and streaming do not change a model's answers",
        add_arguments=command_blocks.add_prove_arguments,
        run=command_blocks.run_prove,
        examples=(("mlxrunner prove qwen3:4b", "compares token IDs and log probabilities"),),
        other_names="verify test exactness selftest",
        uses_mlx=True,
    ),
    _Command(
        name="doctor",
        group=_MACHINE,
        summary="check this machine's compute backend and show possible speedups",
        add_arguments=command_blocks.add_doctor_arguments,
        run=command_blocks.run_doctor,
        examples=(("mlxrunner doctor", "MLX, kernels, memory, problems"),),
        uses_mlx=True,
        other_names="check status diagnose",
    ),
    _Command(
        name="config",
        group=_MACHINE,
        summary="show the effective settings and where each one comes from",
        add_arguments=command_blocks.add_config_arguments,
        run=command_blocks.run_config,
        examples=(("mlxrunner config --toml > mlxrunner.toml", "a file for --config"),),
        other_names="settings env options",
    ),
    _Command(
        name="key",
        group=_MACHINE,
        summary="create an API key and print it once",
        add_arguments=command_blocks.add_key_arguments,
        run=command_blocks.run_key,
        examples=(("mlxrunner key anna --file keys.toml", "for serve --api-keys keys.toml"),),
        other_names="token login keys",
    ),
    _Command(
        name="completion",
        group=_MACHINE,
        summary="print a script that completes commands, options and models in your shell",
        add_arguments=command_blocks.add_completion_arguments,
        run=_run_completion,
        examples=(
            ('eval "$(mlxrunner completion bash)"', "in ~/.bashrc"),
            ('eval "$(mlxrunner completion zsh)"', "in ~/.zshrc"),
            ("mlxrunner completion fish | source", "in ~/.config/fish/config.fish"),
        ),
        other_names="completions autocomplete",
    ),
)

COMMANDS = tuple(command.name for command in _COMMANDS)

OTHER_COMMAND_NAMES = MappingProxyType(
    {name: command.name for command in _COMMANDS for name in command.other_names.split()}
    | {"help": "--help", "version": "--version"}
)

_FIRST_EXAMPLES = ("serve", "run", "launch", "pull")


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="mlxrunner",
        usage="%(prog)s COMMAND [options]",
        description="Serve language models from your own machine on Apple's MLX.",
    )
    groups = dict.fromkeys(command.group for command in _COMMANDS)
    parser.epilog = format_commands(
        [
            CommandGroup(
                title=group,
                commands={c.name: c.summary for c in _COMMANDS if c.group == group},
            )
            for group in groups
        ],
        [c.examples[0] for c in _COMMANDS if c.name in _FIRST_EXAMPLES],
    )
    parser.add_argument(
        "--version", action=_PrintVersion, nargs=0, help="show program's version number and exit"
    )
    parser.forwarding_commands = frozenset({"launch"})
    commands = parser.add_subparsers(
        prog=parser.prog,
        dest="command",
        metavar="COMMAND",
        required=True,
        help=argparse.SUPPRESS,
    )
    for command in _COMMANDS:
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
