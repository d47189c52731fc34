"""Libraries in conversations of three turns, against a server with a scripted engine.

The model thinks before each answer, and calls tools. Every thought, call and text must reach the
library exactly once. The turns that the library sends back must be accepted, and occur exactly once
in the next prompt. tests/clients/programs has the same for coding agents.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.client_process import run_client
from tests.clients.conversations import LIBRARIES, PROMPTS, SHELL_PROMPT
from tests.clients.programs.scripted_server import (
    FOLDER_VARIABLE,
    THINKING_TEMPLATE,
    EngineScript,
    Task,
    render_answer,
    render_call,
    write_model,
)
from tests.server_process import ServerProcess, run_server

SCRIPT = Path(__file__).parent / "conversations.py"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of the model."""

    thought: str
    text: str = ""
    call: tuple[str, dict[str, str]] | None = None

    @property
    def calls(self) -> list[str]:
        return [render_call(*self.call)] if self.call else []

    def render(self) -> str:
        """The answer as the model writes it."""
        return render_answer(self.thought, *([self.text] if self.text else []), *self.calls)


# the answers in each turn
WEATHER_TURNS = [
    [
        Answer(thought="I need Rome.", call=("get_weather", {"city": "Rome"})),
        Answer(thought="Rome is known.", text="It is mild in Rome."),
    ],
    [
        Answer(thought="Now Oslo.", text="A moment.", call=("get_weather", {"city": "Oslo"})),
        Answer(thought="Oslo is known.", text="Oslo is mild, too."),
    ],
    [Answer(thought="Compare them.", text="Both are equally warm.")],
]
TEXT_TURNS = [
    [Answer(thought="I know Rome.", text="It is mild in Rome.")],
    [Answer(thought="I know Oslo.", text="Oslo is mild, too.")],
    [Answer(thought="Compare them.", text="Both are equally warm.")],
]
SHELL_TURN = [
    Answer(thought="Look around.", call=("bash", {"command": "echo one"})),
    Answer(thought="Go on.", text="Next.", call=("bash", {"command": "echo two"})),
    Answer(
        thought="It is done.",
        call=("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    ),
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """python: the fixture of its interpreter. names: of its conversations, in their order.
    omits_thoughts: those in which it does not send the thoughts back."""

    library: str
    python: str
    names: Sequence[str]
    omits_thoughts: Sequence[str] = ()
    turns: Sequence[Sequence[Answer]] = tuple(WEATHER_TURNS)


def add_streamed(*names: str) -> list[str]:
    return [name + suffix for name in names for suffix in ("", ", streamed")]


ROUTES = add_streamed("openai", "hosted_vllm", "lm_studio", "anthropic", "ollama_chat")
CASES = [
    Case(library="litellm", python="agents_python", names=ROUTES),
    Case(
        library="litellm-generate",
        python="agents_python",
        names=add_streamed("ollama"),
        omits_thoughts=add_streamed("ollama"),
        turns=TEXT_TURNS,
    ),
    Case(
        library="mini-swe-agent",
        python="agents_python",
        names=["openai", "hosted_vllm"],
        turns=[SHELL_TURN],
    ),
    Case(
        library="openai-agents",
        python="clients_python",
        names=add_streamed("chat", "responses"),
        omits_thoughts=add_streamed("chat"),
    ),
    Case(library="pydantic-ai", python="clients_python", names=add_streamed("chat", "responses")),
    Case(
        library="strands",
        python="agents_python",
        names=add_streamed("chat"),
        omits_thoughts=add_streamed("chat"),
    ),
]


@pytest.fixture
def script_folder(tmp_path: Path, case: Case) -> Path:
    """The folder of the engine's script and of the prompts that it got."""
    prompts = PROMPTS if len(case.turns) == len(PROMPTS) else [SHELL_PROMPT]
    tasks = [
        Task(marker=prompt, answers=[answer.render() for answer in turn])
        for prompt, turn in zip(prompts, case.turns, strict=True)
    ]
    EngineScript(tasks=tasks, needs_tools=False).write(tmp_path)
    return tmp_path


@pytest.fixture
def server(script_folder: Path) -> Iterator[ServerProcess]:
    """Replaces the server with the built-in model."""
    with run_server(
        str(write_model(script_folder / "thinker", THINKING_TEMPLATE)),
        environ={FOLDER_VARIABLE: str(script_folder)},
        module="tests.clients.programs.scripted_server",
    ) as server:
        yield server


@pytest.mark.product
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.library)
def test_a_library_gets_and_sends_everything_exactly_once(
    case: Case,
    request: pytest.FixtureRequest,
    client_environment: dict[str, str],
    script_folder: Path,
    server: ServerProcess,
):
    python = request.getfixturevalue(case.python)
    environment = {
        **client_environment,
        "SERVER_URL": server.url,
        "SERVER_MODEL": "thinker",
        # the price list of the package instead of a download
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_SILENT_STARTUP": "1",
        # an error must not be hidden
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    }
    output = run_client([python, str(SCRIPT), case.library], environment, script_folder, server)
    conversations = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [conversation["name"] for conversation in conversations] == list(case.names)

    answers = [answer for turn in case.turns for answer in turn]
    expected = {
        "thoughts": [answer.thought for answer in answers],
        "calls": [list(answer.call) for answer in answers if answer.call],
        "texts": [answer.text for answer in answers if answer.text],
    }
    assert conversations == [{"name": name, **expected} for name in case.names]

    files = sorted(script_folder.glob("prompt-*.txt"))
    assert len(files) == len(answers) * len(conversations)
    last_prompts = [file.read_text("utf-8") for file in files[len(answers) - 1 :: len(answers)]]
    sent = {
        name: count_sent(answers[:-1], prompt)
        for name, prompt in zip(case.names, last_prompts, strict=True)
    }
    assert sent == {
        name: count_sent(answers[:-1], "".join(answer.render() for answer in answers))
        | ({"thoughts": [0] * (len(answers) - 1)} if name in case.omits_thoughts else {})
        for name in case.names
    }


def count_sent(answers: Sequence[Answer], prompt: str) -> dict[str, Any]:
    """How often the prompt has each part of the answers."""
    return {
        "thoughts": [prompt.count(answer.thought) for answer in answers],
        "texts": [prompt.count(answer.text) for answer in answers if answer.text],
        "calls": [prompt.count(call) for answer in answers for call in answer.calls],
    }


def test_each_library_has_a_case():
    assert [case.library for case in CASES] == list(LIBRARIES)
