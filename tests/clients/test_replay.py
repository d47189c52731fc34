"""The answers that Anthropic's and Ollama's libraries build are accepted when they send them back.
tests/api/test_replay.py does the same with OpenAI's library, in this process."""

import os
import subprocess
from pathlib import Path

from app.core.events import OutputEvent, ReasoningDelta, ToolCallDelta
from app.core.requests import Conversation, GenerateRequest
from app.core.settings import Settings
from tests.api.asgi import serve_app
from tests.fakes import CARD, FakeGenerate, Script, build_fake_app, finish, text
from tests.server_process import TIMEOUT

CLIENT = Path(__file__).with_name("replay_answers.py")


def write_answer(request: GenerateRequest) -> Script:
    """The answer that the last message of the user selects: `rtc-length` is reasoning, text and a
    call, truncated."""
    assert isinstance(request.prompt, Conversation)
    kinds, _, reason = (request.prompt.messages[-1].content or "").rpartition("-")
    events: list[OutputEvent] = []
    calls = 0
    for kind in kinds:
        if kind in "cb":
            arguments = '{"a": [1]}' if kind == "c" else "so: x"
            call = ToolCallDelta(call_index=calls, id=f"call_{calls}", name="f")
            events += [call, ToolCallDelta(call_index=calls, arguments=arguments)]
            calls += 1
        else:
            events.append(ReasoningDelta(text="Hm.") if kind == "r" else text("So."))
    assert reason in ("stop", "length", "tool_calls")
    return [*events, finish(reason)]


def test_answers_of_anthropics_and_ollamas_libraries_can_be_sent_back(
    clients_python: str, tmp_path: Path
):
    generate = FakeGenerate(write_answer)
    with serve_app(build_fake_app(generate, Settings())) as url:
        process = subprocess.run(
            [clients_python, str(CLIENT), url, CARD.id],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * TIMEOUT,
            check=False,
        )
    assert process.returncode == 0, process.stdout[-4000:]
    assert process.stdout.startswith("replayed ")
