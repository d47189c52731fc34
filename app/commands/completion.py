"""`mlxrunner completion`: prints a script that completes the command line in a shell.

Knows: the completion systems of bash, zsh and fish. Must not know: individual commands and options.
They come from the parser. The names of models come from `mlxrunner list --names`, when Tab is
pressed.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from app.config.command_line import CommandArgument, CommandLineParser

Shell = Literal["bash", "zsh", "fish"]

_FILE, _MODEL = "FILE", "MODEL"


def render_completion(shell: Shell, parser: CommandLineParser) -> str:
    """Returns the script, ending with a newline."""
    render = {"bash": _render_bash, "zsh": _render_zsh, "fish": _render_fish}[shell]
    return "\n".join(render(parser)) + "\n"


def _list_arguments(parser: CommandLineParser) -> Mapping[str, Sequence[CommandArgument]]:
    return {name: list(sub.list_arguments()) for name, sub in parser.subcommands.items()}


def _render_bash(parser: CommandLineParser) -> Iterator[str]:
    yield _BASH_HEAD
    first = " ".join([*parser.subcommands, *parser.list_flags()])
    yield f"    if ((${{#words[@]}} <= 1)); then _mlxrunner_words {shlex.quote(first)}; return; fi"
    yield "    case ${words[1]} in"
    for command, arguments in _list_arguments(parser).items():
        yield f"    {command})"
        yield "        case $prev in"
        for argument in arguments:
            if argument.flags and argument.takes_value:
                yield f"        {'|'.join(argument.flags)}) {_render_bash_value(argument)}return ;;"
        yield "        esac"
        flags = " ".join(flag for argument in arguments for flag in argument.flags)
        yield f"        if [[ $cur == -* ]]; then _mlxrunner_words {shlex.quote(flags)}; return; fi"
        yield from (f"        {line}" for line in _render_bash_positional(arguments))
        yield "        ;;"
    yield "    esac"
    yield "}"
    yield "complete -F _mlxrunner mlxrunner"


def _render_bash_value(argument: CommandArgument) -> str:
    if argument.choices:
        return f"_mlxrunner_words {shlex.quote(' '.join(argument.choices))}; "
    return "_mlxrunner_files; " if argument.placeholder == _FILE else ""


def _render_bash_positional(arguments: Sequence[CommandArgument]) -> Iterator[str]:
    words = [word for one in arguments if not one.flags for word in one.choices]
    takes_model = _takes_model(arguments)
    if words or takes_model:
        names = ' $("$1" list --names 2>/dev/null)' if takes_model else ""
        yield f'_mlxrunner_words "{" ".join(words)}{names}"'
    if takes_model:
        yield "_mlxrunner_files"


def _takes_model(arguments: Sequence[CommandArgument]) -> bool:
    return any(not one.flags and one.placeholder == _MODEL for one in arguments)


_BASH_HEAD = """\
# bash completion of mlxrunner; source it, or: eval "$(mlxrunner completion bash)"
_mlxrunner_words() {
    # compgen -W is not used, because it would expand names as shell code
    local word prefix="" choices
    # readline splits words at colons, and completes only the part after the last one
    if [[ $cur == *:* && $COMP_WORDBREAKS == *:* ]]; then prefix=${cur%"${cur##*:}"}; fi
    read -rd '' -a choices <<<"$1"
    for word in "${choices[@]}"; do
        if [[ $word == "$cur"* ]]; then COMPREPLY+=("${word#"$prefix"}"); fi
    done
}
_mlxrunner_files() {
    local name
    while IFS= read -r name; do COMPREPLY+=("$name"); done < <(compgen -f -- "$cur")
    compopt -o filenames 2>/dev/null
}
_mlxrunner() {
    # the word at the cursor is taken from the line, because readline splits names at colons
    local line=${COMP_LINE:0:COMP_POINT} cur prev words
    cur=${line##*[[:space:]]}
    read -ra words <<<"${line%"$cur"}"
    prev=${words[${#words[@]}-1]}
    COMPREPLY=()
    if [[ $cur == --*=* ]]; then prev=${cur%%=*} cur=${cur#*=}; fi"""


def _render_zsh(parser: CommandLineParser) -> Iterator[str]:
    yield "#compdef mlxrunner"
    yield '# zsh completion of mlxrunner; after compinit: eval "$(mlxrunner completion zsh)"'
    yield "_mlxrunner_models() {"
    yield '    local -a names=("${(@f)$(_call_program models mlxrunner list --names 2>/dev/null)}")'
    yield "    compadd -a names"
    yield "    _files"
    yield "}"
    yield "_mlxrunner() {"
    yield "    local -a commands=("
    for name, sub in parser.subcommands.items():
        described = f"{name}:{_escape_zsh(sub.description or '')}"
        yield f"        {shlex.quote(described)}"
    yield "    )"
    yield "    if (( CURRENT == 2 )); then"
    yield "        if [[ $PREFIX != -* ]]; then _describe command commands; return; fi"
    flags = [flag for one in parser.list_arguments() for flag in _list_zsh_flags(one)]
    yield f"        _arguments {' '.join(map(shlex.quote, flags))}; return"
    yield "    fi"
    yield "    local command=$words[2]"
    yield "    shift words; (( CURRENT-- ))"
    yield "    case $command in"
    for command, arguments in _list_arguments(parser).items():
        specs = " ".join(shlex.quote(spec) for one in arguments for spec in _list_zsh_specs(one))
        yield f"    {command}) _arguments {specs} ;;"
    yield "    esac"
    yield "}"
    # in a file of fpath, this script is the body of the function at its first call
    yield "if [[ $funcstack[1] == _mlxrunner ]]; then _mlxrunner; else"
    yield "    compdef _mlxrunner mlxrunner"
    yield "fi"


def _list_zsh_specs(argument: CommandArgument) -> Iterator[str]:
    if argument.flags:
        yield from _list_zsh_flags(argument)
        return
    value = _render_zsh_value(argument)
    yield f"*{value}" if argument.placeholder == _MODEL else value


def _list_zsh_flags(argument: CommandArgument) -> Iterator[str]:
    for flag in argument.flags:
        # `=` also accepts the value as the next word
        equals = "=" if argument.takes_value and flag.startswith("--") else ""
        value = _render_zsh_value(argument) if argument.takes_value else ""
        yield f"*{flag}{equals}[{_escape_zsh(argument.help)}]{value}"


def _render_zsh_value(argument: CommandArgument) -> str:
    action = f"({' '.join(argument.choices)})" if argument.choices else ""
    if argument.placeholder == _FILE:
        action = "_files"
    elif argument.placeholder == _MODEL and not argument.flags:
        action = "_mlxrunner_models"
    return f":{_escape_zsh(argument.placeholder or 'VALUE')}:{action}"


def _escape_zsh(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


_FISH_HEAD = """\
complete -c mlxrunner -f
# a model may have the name of a command, so only the first word is compared
function __mlxrunner_runs
    set -l words (commandline -opc)
    test (count $words) -gt 1; and test $words[2] = $argv[1]
end"""

_FISH_FIRST = "complete -c mlxrunner -n 'test (count (commandline -opc)) -eq 1'"


def _render_fish(parser: CommandLineParser) -> Iterator[str]:
    yield "# fish completion of mlxrunner; mlxrunner completion fish | source"
    yield _FISH_HEAD
    for name, sub in parser.subcommands.items():
        yield f"{_FISH_FIRST} -a {name} -d {_quote_fish(sub.description or '')}"
    flags = [argument for argument in parser.list_arguments() if argument.flags]
    yield from (f"{_FISH_FIRST} {line}" for one in flags for line in _list_fish_lines(one))
    for command, arguments in _list_arguments(parser).items():
        when = f"complete -c mlxrunner -n '__mlxrunner_runs {command}'"
        for argument in arguments:
            yield from (f"{when} {line}" for line in _list_fish_lines(argument))


def _list_fish_lines(argument: CommandArgument) -> Iterator[str]:
    words = _quote_fish(" ".join(argument.choices))
    if not argument.flags:
        if argument.choices:
            yield f"-a {words}"
        if argument.placeholder == _MODEL:
            yield "-F -a '(mlxrunner list --names 2>/dev/null)'"
        return
    value = ""
    if argument.takes_value:
        value = " -r -F" if argument.placeholder == _FILE else " -x"
        value += f" -a {words}" if argument.choices else ""
    for flag in argument.flags:
        name = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
        yield f"{name}{value} -d {_quote_fish(argument.help)}"


def _quote_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
