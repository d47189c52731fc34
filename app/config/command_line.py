"""The command line: the flags of the settings, help in groups, and a one-line error with advice for
each mistake.

Knows: argparse, the table of options. Must not know: what a command does, the other sources of
settings.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from app.config.options import (
    GROUPS,
    OPTIONS,
    Option,
    SourcedValue,
    SourcedValues,
    find_option_by_other_name,
)
from app.config.value_types import InvalidOptionValue
from app.core.errors import suggest
from app.core.settings import ModelSettings
from app.core.terminal import print_message

# flags of other servers that name a model, which is an argument here
_MODEL_FLAGS = ("-m", "--model", "--models", "--model-path")

# the options of llama.cpp and vLLM that name a model
_ALIAS_FLAGS = ("--alias", "-a", "--served-model-name")

Examples = Sequence[tuple[str, str]]
"""Command lines, each with its effect."""

_MODELS_HELP = (
    "a folder, org/name on the Hugging Face hub, or an Ollama model name; repeatable (default: the "
    "built-in model)"
)

# for commands that use a server and do not listen
_ADDRESS_HELP = {"host": "address of the server", "port": "port of the server"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandGroup:
    """A heading of `mlxrunner --help`. commands: names with their summaries."""

    title: str
    commands: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandArgument:
    """One argument of a command, for shell completion. flags: empty for a positional argument.
    placeholder: the metavar, such as MODEL or FILE. choices: all accepted words, if they form a
    list. takes_value: whether a word follows the flag."""

    flags: tuple[str, ...]
    help: str
    placeholder: str
    choices: tuple[str, ...]
    takes_value: bool


class CommandLineParser(argparse.ArgumentParser):
    """A parser that exits with status 2 and prints one line for an invalid command line. argparse
    itself would print all options.

    forwarding_commands: the commands that run another program. The words after `--` are that
    program's arguments. subcommands: the parsers of the commands, by name.
    """

    forwarding_commands: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **keywords: Any) -> None:
        keywords.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **keywords)
        self.subcommands: dict[str, CommandLineParser] = {}
        self._examples: Examples = ()
        self._rare_actions: list[argparse.Action] = []

    def error(self, message: str) -> NoReturn:
        print_message(self._explain(message.removeprefix("argument ")))
        self.exit(2)

    def add_examples(self, examples: Examples) -> None:
        """Adds examples to the help; the first one is also shown if an argument is missing."""
        self._examples = examples
        self.epilog = "\n".join(["examples:", *_align(examples)])

    def set_usage(self) -> None:
        """Writes the usage line with the positional arguments only, unless there is one already.
        argparse's own lists every option."""
        if self.usage is None:
            forms = {"*": "[{} ...]", "+": "{} ...", "?": "[{}]"}
            arguments = [
                forms.get(str(action.nargs), "{}").format(action.metavar)
                for action in self._actions
                if not action.option_strings and action.metavar
            ]
            self.usage = " ".join(["%(prog)s", *arguments, "[options]"])

    def hide_in_short_help(self, action: argparse.Action) -> None:
        """Lists an option only in `--help-all`, which is added with the first such option."""
        if not self._rare_actions:
            self.add_argument(
                "--help-all", action=_FullHelpAction, nargs=0, help="list all options and exit"
            )
        self._rare_actions.append(action)

    def format_help(self) -> str:
        """Returns the help with the common options."""
        if not self._rare_actions:
            return self.format_full_help()
        texts = [action.help for action in self._rare_actions]
        for action in self._rare_actions:
            action.help = argparse.SUPPRESS
        try:
            text = super().format_help()
        finally:
            for action, help_text in zip(self._rare_actions, texts, strict=True):
                action.help = help_text
        hidden = len(self._rare_actions)
        return f"{text}\n`{self.prog} --help-all` lists {hidden} more options.\n"

    def format_full_help(self) -> str:
        """Returns the help with all options."""
        return super().format_help()

    def list_flags(self) -> list[str]:
        return list(self._option_string_actions)

    def list_arguments(self) -> Iterator[CommandArgument]:
        """Yields the arguments of a command, positional ones last."""
        for action in sorted(self._actions, key=lambda action: not action.option_strings):
            placeholder = action.metavar if isinstance(action.metavar, str) else ""
            choices = tuple(map(str, action.choices or ()))
            if action.option_strings and re.fullmatch(r"\w+(\|\w+)+", placeholder):
                choices = tuple(placeholder.split("|"))
            yield CommandArgument(
                flags=tuple(action.option_strings),
                help=(action.help or "").replace("%%", "%"),
                placeholder=placeholder,
                choices=choices,
                takes_value=action.nargs != 0,
            )

    def _explain(self, message: str) -> str:
        """Rewrites argparse's messages that do not say what to do."""
        if match := re.fullmatch(r"(-\S+): expected (?:one|at least one) argument", message):
            flag = match[1].partition("/")[0]
            metavar = self._option_string_actions[flag].metavar
            return f"{flag} needs a value: {flag} {metavar or 'VALUE'}"
        if match := re.fullmatch(r"(-\S+?)(?:/(-\S+))?: ignored explicit argument .*", message):
            usage = f"write {match[1]} or {match[2]}" if match[2] else f"write {match[1]}"
            return f"{match[1]} takes no value: {usage}"
        if match := re.fullmatch(r"the following arguments are required: (.*)", message):
            name = self.prog.rpartition(" ")[2]
            optional = {action.metavar for action in self._actions if action.nargs == "*"}
            needed = [word for word in match[1].split(", ") if word not in optional]
            example = f", as in `{self._examples[0][0]}`" if self._examples else ""
            return f"{name} needs {', '.join(needed)}{example}"
        if match := re.fullmatch(r"(-\S+): not allowed with argument (-\S+)", message):
            return f"{match[1]} and {match[2]} cannot be combined"
        return message


class _FullHelpAction(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, CommandLineParser)
        sys.stdout.write(parser.format_full_help())
        parser.exit()


def format_commands(groups: Sequence[CommandGroup], examples: Examples) -> str:
    """Formats the commands in groups, and examples, for the end of `mlxrunner --help`."""
    lines: list[str] = []
    for group in groups:
        lines += [f"{group.title}:", *_align(list(group.commands.items()), 12), ""]
    lines += ["examples:", *_align(examples), ""]
    return "\n".join([*lines, "`mlxrunner COMMAND --help` shows the options of a command."])


def _align(pairs: Examples, width: int = 0) -> list[str]:
    width = max([width, *(len(left) for left, _ in pairs)])
    return [f"  {left:<{width}}  {right}".rstrip() for left, right in pairs]


def make_argparse_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a `type` for add_argument. parse: raises InvalidOptionValue."""

    def read(word: str) -> Any:
        try:
            return parse(word)
        except InvalidOptionValue as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    return read


def parse_arguments(
    parser: CommandLineParser,
    argv: Sequence[str] | None,
    commands: Sequence[str] = (),
    other_names: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Parses the command line. Models may be given between flags, which argparse does not support.

    An unknown flag or command is rejected, and the error suggests the most similar one. The process
    exits with status 2 for an invalid command line. commands: the known commands. The first
    argument must be one of them or a flag. other_names: the names of the commands in other
    programs, for suggestions. Without any argument, the help is printed and the process exits with
    status 0. The result's `forwarded` holds the arguments of the program that the command runs.
    """
    argv = sys.argv[1:] if argv is None else argv
    if commands and not argv:
        parser.print_help()
        parser.exit()
    first = next(iter(argv), "")
    if commands and first not in commands:
        _check_first_word(parser, first, commands, other_names or {})
    words, forwarded = _split_forwarded(argv) if first in parser.forwarding_commands else (argv, ())
    arguments, rest = parser.parse_known_args(words)
    arguments.forwarded = tuple(forwarded)
    models: list[str] | None = getattr(arguments, "models", None)
    unknown = [word for word in rest if word.startswith("-") or models is None]
    if unknown:
        parser.error(_explain_unknown(parser.subcommands.get(first, parser), unknown[0]))
    if models is not None:
        models += rest
    return arguments


def _check_first_word(
    parser: CommandLineParser, word: str, commands: Sequence[str], other_names: Mapping[str, str]
) -> None:
    """Exits with a suggestion unless the first word is a flag of the program itself."""
    if word in parser.list_flags():
        return
    listed = f"the commands are {', '.join(commands)}"
    if not word:
        parser.error(f"no command: {listed}")
    name = word.partition("=")[0]
    if name.startswith("-"):
        if any(option.flag == name for option in OPTIONS):
            parser.error(f"no command before {name}: write `mlxrunner serve {name} …`")
        parser.error(f"unknown option {_quote(name)}{suggest(name, parser.list_flags())}")
    if "/" in word or ":" in word:
        parser.error(
            f"unknown command {word!r}: to serve a model, write `mlxrunner serve {_quote(word)}`"
        )
    command = other_names.get(word.lower())
    hint = suggest(word, commands) if command is None else f"; did you mean {command}?"
    parser.error(f"unknown command {word!r}: {listed}{hint}")


def _explain_unknown(command: CommandLineParser, word: str) -> str:
    """Returns the error for an argument that the command does not accept."""
    name = _quote(word.partition("=")[0])
    flags = command.list_flags()
    help_flag = "--help-all" if "--help-all" in flags else "--help"
    hint = f" (`{command.prog} {help_flag}` lists the accepted options)"
    if not name.startswith("-"):
        return f"unexpected argument {name!r}{hint}"
    foreign = find_option_by_other_name(name)
    if "--config" in flags and name in _MODEL_FLAGS:
        model = _quote(word.partition("=")[2]) or "MODEL"
        return (
            f"unknown option {name}: a model is given without a flag, as in "
            f"`{command.prog} {model}`"
        )
    if "--config" in flags and name in _ALIAS_FLAGS:
        return (
            f"unknown option {name}: a model gets another name with `alias` in a [[models]] table "
            "of --config FILE"
        )
    if foreign is not None and foreign.flag in flags:
        return f"unknown option {name}; did you mean {foreign.flag}?{hint}"
    return f"unknown option {name}{suggest(name, flags)}{hint}"


def _split_forwarded(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits a command line at the first `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]


def _quote(word: str) -> str:
    return word if word.isprintable() else repr(word)


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
