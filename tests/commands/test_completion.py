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


def run_shell(program: Path, *command: str) -> str:
    """The output of a shell that finds the program on PATH, in a folder with one file."""
    folder = program.parent.parent / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "notes.toml").touch()
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stderr == ""
    assert sorted(path.name for path in folder.iterdir()) == ["notes.toml"]
    return process.stdout


def complete_in_bash(program: Path, line: str) -> set[str]:
    """What Tab offers at the end of the line, with readline's splitting at colons."""
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
        ("mlxrunner s", {name for name in cli.COMMANDS if name.startswith("s")}),
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
    for name in cli.COMMANDS:
        assert re.search(rf"\b{name}\b", script), name
    for option in OPTIONS:
        flag = f"-l {option.flag[2:]} " if shell == "fish" else option.flag
        assert flag in script, flag


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_accept_the_script(shell: str, program: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    if shell == "zsh":
        command = 'autoload -Uz compinit; compinit -u; eval "$(mlxrunner completion zsh)"; '
        assert run_shell(program, "zsh", "-fc", f"{command} print $_comps[mlxrunner]") == (
            "_mlxrunner\n"
        )
    else:
        command = "mlxrunner completion fish | source; complete -C 'mlxrunner serve --cac'"
        assert run_shell(program, "fish", "-Nc", command).startswith("--cache")
