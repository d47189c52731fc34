"""`mlxrunner completion`: the scripts, run in the shells that are installed here."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from app import cli
from app.commands.completion import render_completion
from app.config.options import OPTIONS
from tests.terminal_process import CTRL_D, CTRL_U, ENTER, TerminalProcess

ROOT = Path(__file__).resolve().parents[2]

NAMES = ("builtin", "mlx-community/Qwen3-4B-4bit", "qwen3:4b", "qwen3:8b", "$(touch pwned)")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program named mlxrunner, which lists fixed models and is itself otherwise."""
    script = tmp_path / "bin" / "mlxrunner"
    script.parent.mkdir()
    listing = "\\n".join(NAMES)
    (tmp_path / "completion.bash").write_text(render_completion("bash", cli._build_parser()))
    script.write_text(
        "#!/bin/sh\n"
        f"if [ \"$*\" = 'list --names' ]; then printf '{listing}\\n'; exit; fi\n"
        f'exec "{sys.executable}" -m app "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def prepare_shell(program: Path) -> tuple[dict[str, str], Path]:
    """The environment of a shell that finds the program on PATH, and a folder with one file."""
    folder = program.parent.parent / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "notes.toml").touch()
    environment = {
        **os.environ,
        "HOME": str(program.parent.parent),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    return environment, folder


def run_shell(program: Path, *command: str) -> str:
    """The output of a shell."""
    environment, folder = prepare_shell(program)
    process = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stderr == ""
    assert sorted(path.name for path in folder.iterdir()) == ["notes.toml"]
    return process.stdout


def complete_in_bash(program: Path, line: str) -> set[str]:
    """The completions that Tab offers at the end of the line, with readline's splitting at
    colons."""
    words = [word for word in re.split(r"\s+|([:=])", line) if word is not None]
    quoted = " ".join(f"'{word}'" for word in words)
    return set(
        run_shell(
            program,
            "bash",
            "--norc",
            "-c",
            "source ../completion.bash; COMP_WORDBREAKS=$' \\t\\n\"><=;|&(:\\''; "
            f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({quoted}) "
            f"COMP_CWORD={len(words) - 1}; _mlxrunner mlxrunner; "
            "printf '%s\\n' \"${COMPREPLY[@]}\"",
        ).splitlines()
    )


needs_bash = pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")


@needs_bash
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mlxrunner s", {name for name in cli.COMMAND_NAMES if name.startswith("s")}),
        ("mlxrunner --v", {"--version"}),
        ("mlxrunner serve b", {"builtin"}),
        ("mlxrunner serve --port 80 mlx", {"mlx-community/Qwen3-4B-4bit"}),
        ("mlxrunner serve qwen3:", {"4b", "8b"}),
        ("mlxrunner serve no", {"notes.toml"}),
        ("mlxrunner serve --cac", {"--cache"}),
        ("mlxrunner serve --no-inst", {"--no-installed"}),
        ("mlxrunner serve --cache r", {"radix"}),
        ("mlxrunner serve --cache=s", {"single", "slots"}),
        ("mlxrunner serve --config n", {"notes.toml"}),
        ("mlxrunner serve --port b", {""}),
        ("mlxrunner launch cla", {"claude"}),
        ("mlxrunner launch claude qwen3:8", {"8b"}),
        ("mlxrunner list --j", {"--json"}),
        ("mlxrunner completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_tab_completes_in_bash(line: str, offered: set[str], program: Path) -> None:
    assert complete_in_bash(program, line) == offered


@needs_bash
def test_names_are_not_run_as_shell_code(program: Path) -> None:
    """compgen -W would expand them. run_shell finds no new file in the folder."""
    assert {"builtin", "$(touch", "pwned)"} <= complete_in_bash(program, "mlxrunner show ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_command_and_option_is_in_the_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in cli.COMMAND_NAMES:
        assert re.search(rf"\b{name}\b", script), name
    for option in OPTIONS:
        flag = f"-l {option.flag[2:]} " if shell == "fish" else option.flag
        assert flag in script, flag


# what fish and zsh offer at the end of a line
OFFERED: dict[str, set[str]] = {
    "mlxrunner s": {name for name in cli.COMMAND_NAMES if name.startswith("s")},
    "mlxrunner --v": {"--version"},
    "mlxrunner serve b": {"builtin"},
    "mlxrunner serve --port 80 mlx": {"mlx-community/Qwen3-4B-4bit"},
    "mlxrunner serve qwen3:8": {"qwen3:8b"},
    "mlxrunner serve no": {"notes.toml"},
    "mlxrunner serve --cac": {"--cache"},
    "mlxrunner serve --no-inst": {"--no-installed"},
    "mlxrunner serve --cache r": {"radix"},
    "mlxrunner serve --config n": {"notes.toml"},
    "mlxrunner serve --port b": set(),
    "mlxrunner launch cla": {"claude"},
    "mlxrunner launch claude qwen3:8": {"qwen3:8b"},
    "mlxrunner list --j": {"--json"},
    "mlxrunner stop serve --in": set(),
    "mlxrunner completion ": {"bash", "zsh", "fish"},
}


def test_tab_completes_in_fish(program: Path) -> None:
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    asks = [f"echo '== {line}'; complete -C '{line}'" for line in (*OFFERED, *VALUES)]
    command = "; ".join(["mlxrunner completion fish | source", *asks])
    offered: dict[str, set[str]] = {}
    line = ""
    for text in run_shell(program, "fish", "-Nc", command).splitlines():
        if text.startswith("== "):
            line = text.removeprefix("== ")
            offered[line] = set()
        else:
            offered[line].add(text.partition("\t")[0])
    flag = "--cache="
    assert offered == {**OFFERED, **{k: {f"{flag}{v}" for v in VALUES[k]} for k in VALUES}}


# a value after `=`, which fish offers with the option
VALUES = {"mlxrunner serve --cache=s": {"single", "slots"}}

ZSHRC = """
{setup}
unset zle_bracketed_paste
setopt no_beep no_list_beep no_prompt_cr no_always_last_prompt
PS1='$ '
"""

# how a user installs the script: in .zshrc, or as a file of fpath
ZSH_SETUPS = {
    "eval": 'autoload -Uz compinit; compinit -u -D; eval "$(mlxrunner completion zsh)"',
    "fpath": "mlxrunner completion zsh >../rc/_mlxrunner; fpath=(${PWD:h}/rc $fpath); "
    "autoload -Uz compinit; compinit -u -D",
}


@pytest.mark.parametrize("setup", ZSH_SETUPS)
def test_tab_completes_in_zsh(setup: str, program: Path) -> None:
    """Ctrl-D at the end of a line lists what Tab offers."""
    if not shutil.which("zsh"):
        pytest.skip("zsh is not installed")
    environ, folder = prepare_shell(program)
    rc = folder.parent / "rc"
    rc.mkdir()
    (rc / ".zshrc").write_text(ZSHRC.format(setup=ZSH_SETUPS[setup]))
    # a terminal without colour and without lines that move
    environ = {**environ, "ZDOTDIR": str(rc), "TERM": "dumb"}
    offered: dict[str, set[str]] = {}
    with TerminalProcess(["zsh", "-di"], environ=environ, folder=folder) as terminal:
        terminal.read_until("$ ")
        for line in (*OFFERED, *VALUES):
            terminal.type(f"{line}{CTRL_D}{CTRL_U}print -r EN''D{ENTER}")
            text = terminal.read_until("\r\nEND\r\n$ ")
            offered[line] = read_zsh_list(text.partition("print -r EN")[0], line)
    assert offered == {**OFFERED, **VALUES}
    assert sorted(path.name for path in folder.iterdir()) == ["notes.toml"]


def read_zsh_list(text: str, line: str) -> set[str]:
    """The words of a list, each with a description or in columns."""
    lines = [found.strip() for found in text.replace("\r", "\n").split("\n")]
    rows = [found for found in lines if found and not found.startswith(("$", "mlxrunner "))]
    return {
        word for row in rows for word in re.split(r"\s{2,}", re.sub(r"\s+-- .*", "", row)) if word
    }
