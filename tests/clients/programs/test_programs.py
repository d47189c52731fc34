"""The coding agents themselves, started by `mlxrunner launch`: two turns with a tool call each.

The first turn reads a file, the second one writes a file. The engine is scripted; everything else
is real: the program, its tools, HTTP, the dialect, the chat template and the parsers. The arguments
of the first turn are those of the command in docs/clients.md.
"""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.commands.client_programs import PROGRAMS
from tests.clients.client_process import run_to_end
from tests.clients.programs.scripted_server import EngineScript, Task
from tests.server_process import ROOT, TIMEOUT, ServerProcess
from tests.terminal_process import TERMINAL_TYPE, TerminalProcess

SECRET = "kumquat"
READ_TASK, WRITE_TASK = "FIRST-TASK", "SECOND-TASK"
READ_ANSWER, WRITE_ANSWER = f"The secret word is {SECRET}.", "The word is in answer.txt now."

# the author of commits
IDENTITY = {
    f"GIT_{role}_{field}": "test@localhost"
    for role in ("AUTHOR", "COMMITTER")
    for field in ("NAME", "EMAIL")
}

GUIDE = (ROOT / "docs" / "clients.md").read_text("utf-8")


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


@dataclass(frozen=True, kw_only=True)
class Case:
    """read, write: the model's calls, given the working folder. second_turn: the arguments that
    continue the conversation, given the home folder. in_terminal: whether the program continues
    one only in a terminal. needs_tools: whether it sends tools. user_file: the user's own
    configuration, in the home folder, and its text."""

    name: str
    read: Callable[[Path], str]
    write: Callable[[Path], str]
    second_turn: Callable[[Path], list[str]]
    user_file: tuple[str, str]
    in_terminal: bool = False
    needs_tools: bool = True


def find_cline_session(home: Path) -> str:
    [session] = (home / ".cline" / "data" / "sessions").iterdir()
    return session.name


CASES = [
    Case(
        name="claude",
        user_file=(".claude/settings.json", "{}\n"),
        read=lambda work: call("Read", file_path=str(work / "notes.txt")),
        write=lambda work: call("Write", file_path=str(work / "answer.txt"), content=SECRET),
        second_turn=lambda home: ["--continue", "--allowedTools=Read,Write", "-p"],
    ),
    Case(
        name="codex",
        user_file=(".codex/config.toml", "# mine\n"),
        read=lambda work: call("exec_command", cmd="cat notes.txt"),
        write=lambda work: call("exec_command", cmd=f"printf {SECRET} > answer.txt"),
        second_turn=lambda home: [
            *("exec", "resume", "--last", "--skip-git-repo-check"),
            "--dangerously-bypass-approvals-and-sandbox",
        ],
    ),
    Case(
        name="opencode",
        user_file=(
            ".config/opencode/opencode.json",
            '{"$schema": "https://opencode.ai/config.json"}\n',
        ),
        read=lambda work: call("read", filePath=str(work / "notes.txt")),
        write=lambda work: call("write", filePath=str(work / "answer.txt"), content=SECRET),
        second_turn=lambda home: ["run", "--continue"],
    ),
    Case(
        name="aider",
        user_file=(".aider.conf.yml", "dark-mode: true\n"),
        # aider sends no tools: it adds a file that the answer mentions, and writes listed files
        read=lambda work: "I need to see notes.txt first.",
        write=lambda work: f"answer.txt\n```\n{SECRET}\n```\n",
        second_turn=lambda home: ["--yes-always", "--restore-chat-history", "-m"],
        needs_tools=False,
    ),
    Case(
        name="cline",
        user_file=(
            ".cline/data/settings/providers.json",
            '{"version": 1, "modes": {}, "providers": {}}\n',
        ),
        read=lambda work: call("read_files", files=[{"path": str(work / "notes.txt")}]),
        write=lambda work: call("editor", path=str(work / "answer.txt"), new_text=SECRET),
        second_turn=lambda home: ["--id", find_cline_session(home)],
        in_terminal=True,
    ),
    Case(
        name="continue",
        user_file=(".continue/config.yaml", "name: mine\nversion: 1.0.0\nschema: v1\n"),
        read=lambda work: call("Read", filepath="notes.txt"),
        write=lambda work: call("Write", filepath="answer.txt", content=SECRET),
        second_turn=lambda home: ["--resume", "--auto", "-p"],
    ),
]


def find_documented_arguments(name: str) -> list[str]:
    """The arguments of the program in the guide's command, without the prompt at the end."""
    [command] = re.findall(rf"^\.venv/bin/mlxrunner launch {name} .*-- (.+)$", GUIDE, re.MULTILINE)
    return shlex.split(command)[:-1]


@pytest.mark.programs
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_reads_and_writes_a_file_in_two_turns(
    case: Case,
    request: pytest.FixtureRequest,
    programs: Callable[[str], str],
    script_folder: Path,
    launch_command: list[str],
    home: Path,
    tmp_path: Path,
):
    path = programs(PROGRAMS[case.name].executable)
    # only after a test without its program was skipped
    server: ServerProcess = request.getfixturevalue("scripted_server")
    work = tmp_path / "work"
    write_repository(work)
    name, text = case.user_file
    user_file = home / name
    user_file.parent.mkdir(parents=True, exist_ok=True)
    user_file.write_text(text)
    temporary_folder = tmp_path / "temporary"
    temporary_folder.mkdir()
    EngineScript(
        tasks=[
            Task(marker=READ_TASK, answers=[case.read(work), READ_ANSWER]),
            Task(marker=WRITE_TASK, answers=[case.write(work), WRITE_ANSWER]),
        ],
        needs_tools=case.needs_tools,
    ).write(script_folder)

    command = [*launch_command, case.name, "--port", str(server.port), "--"]
    environment = {**build_environment(path, home), "TMPDIR": str(temporary_folder)}

    words = [*find_documented_arguments(case.name), f"{READ_TASK}: read the file"]
    output = run_to_end([*command, *words], environment, work, server, 4 * TIMEOUT)
    assert READ_ANSWER in output
    # the program sent the content of the file to the model
    first = read_prompts(script_folder)
    assert SECRET in first[-1]

    def find_second_turn() -> list[str]:
        return [p for p in read_prompts(script_folder)[len(first) :] if WRITE_TASK in p]

    words, prompt = case.second_turn(home), f"{WRITE_TASK}: write the word"
    if case.in_terminal:
        variables = {**environment, "TERM": TERMINAL_TYPE}
        with TerminalProcess([*command, *words], environ=variables, folder=work) as terminal:
            terminal.type_until(prompt, lambda: len(find_second_turn()) > 0)
            terminal.read_while(lambda: len(find_second_turn()) < 2)
    else:
        output = run_to_end([*command, *words, prompt], environment, work, server, 4 * TIMEOUT)
        # aider ends with the file
        assert WRITE_ANSWER in output or not case.needs_tools
    assert (work / "answer.txt").read_text().strip() == SECRET
    # the prompt of the second turn holds the first turn
    assert READ_TASK in find_second_turn()[0]
    assert READ_ANSWER in find_second_turn()[0]
    assert server.status()["Failures"] == 0
    # the user's configuration is unchanged
    assert user_file.read_text() == text
    if not case.in_terminal:  # where `launch` is killed
        assert list(temporary_folder.glob("mlxrunner-launch-*")) == []


def write_repository(folder: Path) -> None:
    """A repository with the file that the program reads."""
    folder.mkdir()
    (folder / "notes.txt").write_text(f"The secret word is {SECRET}.\n")
    for command in ("init --quiet", "add notes.txt", "commit --quiet --message=Notes"):
        environment = {**IDENTITY, "PATH": os.environ["PATH"]}
        subprocess.run(["git", *command.split()], cwd=folder, env=environment, check=True)


def build_environment(path: str, home: Path) -> Mapping[str, str]:
    """The complete environment of a program: its own home and no internet access."""
    unreachable = "http://127.0.0.1:9"
    return {
        "PATH": path,
        "HOME": str(home),
        "TERM": "dumb",
        **IDENTITY,
        "HTTP_PROXY": unreachable,
        "HTTPS_PROXY": unreachable,
    }


def read_prompts(folder: Path) -> list[str]:
    """The prompts that the engine got so far."""
    return [file.read_text("utf-8") for file in sorted(folder.glob("prompt-*.txt"))]


def test_each_program_has_a_case():
    assert [case.name for case in CASES] == list(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_guide_has_a_command_for_each_program(name: str):
    assert find_documented_arguments(name)
