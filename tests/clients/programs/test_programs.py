"""The coding agents themselves, started as docs/clients.md says: three turns with tool calls.

The first turn reads a file, the second one writes a file, the third one reads that file. The model
thinks before each answer. The engine is scripted; everything else is real: the program, its tools,
HTTP, the dialect, the chat template and the parsers. The command of the first turn comes from the
guide. tests/clients/test_conversations.py has such conversations for libraries.
"""

import os
import re
import shlex
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from app.commands.client_programs import PROGRAMS
from tests.clients.client_process import run_to_end
from tests.clients.programs.conftest import Programs
from tests.clients.programs.scripted_server import (
    FOLDER_VARIABLE,
    EngineScript,
    Task,
    render_answer,
    render_call,
    write_seeing_model,
)
from tests.server_process import ROOT, TIMEOUT, ServerProcess, run_server
from tests.terminal_process import TERMINAL_TYPE, TerminalProcess

SECRET = "kumquat"
TASKS = ["FIRST-TASK", "SECOND-TASK", "THIRD-TASK"]
PROMPTS = [f"{TASKS[0]}: read the file", f"{TASKS[1]}: write it", f"{TASKS[2]}: read it again"]
ANSWERS = [
    f"The secret word is {SECRET}.",
    "The word is in answer.txt now.",
    "The word is still there.",
]

# the author of commits
IDENTITY = {
    f"GIT_{role}_{field}": "test@localhost"
    for role in ("AUTHOR", "COMMITTER")
    for field in ("NAME", "EMAIL")
}

GUIDE = (ROOT / "docs" / "clients.md").read_text("utf-8")


def call(name: str, **arguments: Any) -> str:
    return render_call(name, arguments)


@dataclass(frozen=True, kw_only=True)
class Case:
    """name: in `launch`, or of the executable. calls: the model's calls in each turn, given the
    working folder. later_turns: the arguments that continue the conversation, given the home
    folder. in_terminal: whether the program continues one only in a terminal. needs_tools: whether
    it sends tools. user_file: the user's own configuration, in the home folder, and its text.
    options: in addition to those of the guide. sent_thoughts: which reasoning the program sends
    back."""

    name: str
    calls: Callable[[Path], Sequence[Sequence[str]]]
    later_turns: Callable[[Path], list[str]]
    user_file: tuple[str, str]
    in_terminal: bool = False
    needs_tools: bool = True
    options: Sequence[str] = ()
    sent_thoughts: Literal["all", "of the turn", "none"] = "all"

    @property
    def executable(self) -> str:
        return PROGRAMS[self.name].executable if self.name in PROGRAMS else self.name


def find_cline_session(home: Path) -> str:
    [session] = (home / ".cline" / "data" / "sessions").iterdir()
    return session.name


CASES = [
    Case(
        name="claude",
        user_file=(".claude/settings.json", "{}\n"),
        # the model cannot see the picture, and continues
        calls=lambda work: [
            [call("Read", file_path=str(work / "notes.txt"))],
            [
                call("Read", file_path=str(work / "picture.png")),
                call("Write", file_path=str(work / "answer.txt"), content=SECRET),
            ],
            [call("Read", file_path=str(work / "answer.txt"))],
        ],
        later_turns=lambda home: ["--continue", "--allowedTools=Read,Write", "-p"],
    ),
    Case(
        name="codex",
        user_file=(".codex/config.toml", "# mine\n"),
        options=["-c", 'model_reasoning_summary="detailed"'],
        calls=lambda work: [
            [call("exec_command", cmd="cat notes.txt")],
            [call("exec_command", cmd=f"printf {SECRET} > answer.txt")],
            [call("exec_command", cmd="cat answer.txt")],
        ],
        later_turns=lambda home: [
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
        calls=lambda work: [
            [call("read", filePath=str(work / "notes.txt"))],
            [call("write", filePath=str(work / "answer.txt"), content=SECRET)],
            [call("read", filePath=str(work / "answer.txt"))],
        ],
        later_turns=lambda home: ["run", "--continue"],
    ),
    Case(
        name="aider",
        user_file=(".aider.conf.yml", "dark-mode: true\n"),
        # aider sends no tools: it adds a file that the answer mentions, and writes listed files
        calls=lambda work: [
            ["I need to see notes.txt first."],
            [f"answer.txt\n```\n{SECRET}\n```\n"],
            [],
        ],
        later_turns=lambda home: ["--yes-always", "--restore-chat-history", "-m"],
        needs_tools=False,
    ),
    Case(
        name="cline",
        user_file=(
            ".cline/data/settings/providers.json",
            '{"version": 1, "modes": {}, "providers": {}}\n',
        ),
        calls=lambda work: [
            [call("read_files", files=[{"path": str(work / "notes.txt")}])],
            [call("editor", path=str(work / "answer.txt"), new_text=SECRET)],
            [call("read_files", files=[{"path": str(work / "answer.txt")}])],
        ],
        later_turns=lambda home: ["--id", find_cline_session(home)],
        in_terminal=True,
    ),
    Case(
        name="continue",
        user_file=(".continue/config.yaml", "name: mine\nversion: 1.0.0\nschema: v1\n"),
        calls=lambda work: [
            [call("Read", filepath="notes.txt")],
            [call("Write", filepath="answer.txt", content=SECRET)],
            [call("Read", filepath="answer.txt")],
        ],
        later_turns=lambda home: ["--resume", "--auto", "-p"],
        sent_thoughts="none",
    ),
    Case(
        name="copilot",
        user_file=(".copilot/settings.json", "{}\n"),
        calls=lambda work: [
            [call("view", path=str(work / "notes.txt"))],
            [call("create", path=str(work / "answer.txt"), file_text=SECRET)],
            [call("view", path=str(work / "answer.txt"))],
        ],
        later_turns=lambda home: ["--continue", "--allow-all-tools", "-p"],
        # a session that is continued is without it
        sent_thoughts="of the turn",
    ),
    Case(
        name="qwen",
        user_file=(".qwen/settings.json", '{\n  "$version": 4\n}\n'),
        calls=lambda work: [
            [call("read_file", file_path=str(work / "notes.txt"))],
            [call("write_file", file_path=str(work / "answer.txt"), content=SECRET)],
            [call("read_file", file_path=str(work / "answer.txt"))],
        ],
        later_turns=lambda home: ["--continue", "--auth-type=openai", "--yolo", "-p"],
    ),
]


def find_documented_arguments(name: str) -> list[str]:
    """The arguments of the program in the guide's command, without the prompt at the end."""
    pattern = rf"\.venv/bin/mlxrunner launch {name} .*--" if name in PROGRAMS else name
    [command] = re.findall(rf"^{pattern} (.+)$", GUIDE, re.MULTILINE)
    return shlex.split(command)[:-1]


def find_documented_variables(name: str, port: int) -> dict[str, str]:
    """The variables that the guide sets before it runs a program that `launch` does not know."""
    [lines] = re.findall(rf"^((?:export .+\n)+){name} ", GUIDE, re.MULTILINE)
    text = lines.replace("export ", "").replace(":8080", f":{port}").replace("org/model", "coder")
    return dict(word.split("=", 1) for word in shlex.split(text))


def build_script(case: Case, work: Path) -> EngineScript:
    tasks = list[Task]()
    for number, calls in enumerate(case.calls(work)):
        texts = [*calls, *find_last_text(case, number)]
        answers = [render_answer(name_thought(number, i), text) for i, text in enumerate(texts)]
        tasks.append(Task(marker=TASKS[number], answers=answers))
    return EngineScript(tasks=tasks, needs_tools=case.needs_tools)


def find_last_text(case: Case, turn: int) -> list[str]:
    """The answer after the calls. aider ends the second turn with the file."""
    return [] if turn == 1 and not case.needs_tools else [ANSWERS[turn]]


def name_thought(turn: int, answer: int) -> str:
    return f"Thought {turn}.{answer} of the model."


@pytest.mark.programs
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_reads_and_writes_files_in_three_turns(
    case: Case,
    request: pytest.FixtureRequest,
    programs: Programs,
    script_folder: Path,
    launch_command: list[str],
    home: Path,
    tmp_path: Path,
):
    path = programs.find(case.executable)
    # only after a test without its program was skipped
    server: ServerProcess = request.getfixturevalue("scripted_server")
    failures, lines = server.status()["Failures"], len(server.log)
    work = tmp_path / "work"
    write_repository(work)
    name, text = case.user_file
    user_file = home / name
    user_file.parent.mkdir(parents=True, exist_ok=True)
    user_file.write_text(text)
    temporary_folder = tmp_path / "temporary"
    temporary_folder.mkdir()
    script = build_script(case, work)
    script.write(script_folder)

    environment = {**build_environment(path, home), "TMPDIR": str(temporary_folder)}
    if case.name in PROGRAMS:
        command = [*launch_command, case.name, "--port", str(server.port), "--", *case.options]
    else:
        environment |= find_documented_variables(case.name, server.port)
        environment["NO_PROXY"] = "127.0.0.1"  # as `launch` sets it
        command = [shutil.which(case.executable, path=path) or "", *case.options]

    def find_turn(number: int) -> list[str]:
        return [prompt for prompt in read_prompts(script_folder) if TASKS[number] in prompt]

    def run_turn(number: int, words: Sequence[str]) -> None:
        words = [*command, *words, PROMPTS[number]]
        output = run_to_end(words, environment, work, server, 4 * TIMEOUT)
        for text in find_last_text(case, number):
            assert text in output

    def type_turn(number: int, terminal: TerminalProcess) -> None:
        terminal.type_until(PROMPTS[number], lambda: len(find_turn(number)) > 0)
        terminal.read_while(lambda: len(find_turn(number)) < len(script.tasks[number].answers))

    with programs.skip_if_broken(case.executable):
        run_turn(0, find_documented_arguments(case.name))
    # the program sent the content of the file to the model
    assert SECRET in find_turn(0)[-1]
    if case.in_terminal:
        variables = {**environment, "TERM": TERMINAL_TYPE}
        words = [*command, *case.later_turns(home)]
        with TerminalProcess(words, environ=variables, folder=work) as terminal:
            type_turn(1, terminal)
            type_turn(2, terminal)
    else:
        run_turn(1, case.later_turns(home))
        run_turn(2, case.later_turns(home))
    assert (work / "answer.txt").read_text().strip() == SECRET
    check_history(case, script, find_turn(2)[-1])
    assert server.status()["Failures"] == failures
    assert " 400 " not in "".join(server.log[lines:])
    # the user's configuration is unchanged
    assert user_file.read_text() == text
    if not case.in_terminal:  # where `launch` is killed
        assert list(temporary_folder.glob("mlxrunner-launch-*")) == []


@pytest.mark.programs
@pytest.mark.parametrize(
    ("name", "tool", "field"),
    [("claude", "Read", "file_path"), ("codex", "view_image", "path")],
)
def test_a_program_shows_a_picture_to_a_model_that_sees(
    name: str,
    tool: str,
    field: str,
    programs: Programs,
    script_folder: Path,
    launch_command: list[str],
    home: Path,
    tmp_path: Path,
):
    """The picture is in the prompt of this turn and of the next one."""
    path = programs.find(name)
    work = tmp_path / "work"
    write_repository(work)
    [case] = [case for case in CASES if case.name == name]
    read = call(tool, **{field: str(work / "picture.png")})
    tasks = [
        Task(marker=TASKS[0], answers=[read, "It is black."]),
        Task(marker=TASKS[1], answers=["It is still black."]),
    ]
    EngineScript(tasks=tasks).write(script_folder)
    with run_server(
        str(write_seeing_model(script_folder / "seer")),
        environ={FOLDER_VARIABLE: str(script_folder)},
        module="tests.clients.programs.scripted_server",
    ) as server:
        server.wait_until_ready()
        command = [*launch_command, name, "--port", str(server.port), "--"]
        environment = build_environment(path, home)
        words = [*command, *find_documented_arguments(name), PROMPTS[0]]
        with programs.skip_if_broken(name):
            assert "It is black." in run_to_end(words, environment, work, server, 4 * TIMEOUT)
        words = [*command, *case.later_turns(home), PROMPTS[1]]
        assert "It is still black." in run_to_end(words, environment, work, server, 4 * TIMEOUT)
        assert " 400 " not in server.log_text()
    for task in TASKS[:2]:
        prompt = [prompt for prompt in read_prompts(script_folder) if task in prompt][-1]
        _, _, image = prompt.partition("<|vision_start|>")
        rows, _, _ = image.partition("<|vision_end|>")
        assert rows == "<|image_pad|>" * (len(rows) // len("<|image_pad|>"))
        assert len(rows) >= 64 * len("<|image_pad|>"), "an image has at least 256 x 256 pixels"
        assert "image omitted" not in prompt


def check_history(case: Case, script: EngineScript, prompt: str) -> None:
    """Checks that the prompt before the last answer has everything before it exactly once."""
    last = len(script.tasks) - 1
    texts = [text for turn in range(last) for text in find_last_text(case, turn)]
    expected = dict.fromkeys([*PROMPTS, *texts], 1)
    for turn, task in enumerate(script.tasks):
        sends_thoughts = case.sent_thoughts == "all" or (
            turn == last and case.sent_thoughts == "of the turn"
        )
        for answer in range(len(task.answers) - (turn == last)):
            expected[name_thought(turn, answer)] = int(sends_thoughts)
    found = {text: prompt.count(text) for text in expected}
    assert found == expected, prompt


def write_picture(file: Path, size: int = 8) -> None:
    """A black PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">2I5B", size, size, 8, 2, 0, 0, 0)
    rows = bytes((1 + 3 * size) * size)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def write_repository(folder: Path) -> None:
    """A repository with the files that the program reads."""
    folder.mkdir()
    write_picture(folder / "picture.png")
    (folder / "notes.txt").write_text(f"secret word: {SECRET}\n")
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
        # it prints errors into the answer if it cannot reach its server
        "AIDER_ANALYTICS_DISABLE": "true",
    }


def read_prompts(folder: Path) -> list[str]:
    """The prompts that the engine got so far."""
    return [file.read_text("utf-8") for file in sorted(folder.glob("prompt-*.txt"))]


def test_each_program_has_a_case():
    assert [case.name for case in CASES if case.name in PROGRAMS] == list(PROGRAMS)


@pytest.mark.parametrize("name", sorted({case.name for case in CASES}))
def test_the_guide_has_a_command_for_each_program(name: str):
    assert find_documented_arguments(name)
