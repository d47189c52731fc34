"""One conversation through every dialect: the same prompt, and the same greedy output.

The engine is a real one. Completions get the prompt as token ids, since they have no messages. The
conversation has a call and its result, except for templates without tools, with which Ollama's API
rejects them.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from app.core.images import ImagePixels
from app.core.jobs import Job, JobUpdate, Token
from app.core.ports import Submission
from app.core.settings import Settings
from app.runners.thread_runner import ThreadRunner
from app.text.family import find_family, load_families
from tests import tiny
from tests.api.asgi import Conversation as Exchange
from tests.api.asgi import Reply
from tests.conftest import SHARED
from tests.serving.in_process import serve_model
from tests.text.families.rows import templates
from tests.text.templates import MADE_FOR_OTHER_CONVERSATIONS

MAX_TOKENS = 16

SYSTEM, QUESTION, RESULT, NEXT = "Be brief.", "Weather in Oslo?", "Sunny.", "And in Rome?"
CALL_ID, NAME, ARGUMENTS = "call_0123456789abcdef01234567", "get_weather", {"city": "Oslo"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# the spelling that this server generates for objects; other dialects have no spelling
ARGUMENTS_TEXT = json.dumps(ARGUMENTS, separators=(",", ":"))
TOOL = {"name": NAME, "description": "Tells the weather.", "parameters": PARAMETERS}


# what templates of families contain that are not in the test data, or not in a usable template
MARKERS = {
    "function_gemma": "<start_function_call>",
    "llama_pythonic": "<|start_header_id|> [func_name1(",
    "longcat": "<longcat_tool_call>",
    "minimax": "<minimax:tool_call>",
    "mirothinker": "<use_mcp_tool> <tool_name>",
    "nemotron_v2": "<TOOLCALL>",
    "olmo3": "<function_calls> <functions>",
}
CHATML = (
    "{#- MARKER -#}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


def _list_families() -> dict[str, str]:
    """A template of each family, by the name of the family's module; "generic" is used for a
    template without a family."""
    found = {name: CHATML.replace("MARKER", marker) for name, marker in MARKERS.items()}
    families = load_families()
    for name, source in sorted(templates(SHARED).items()) if SHARED.is_dir() else ():
        if name not in MADE_FOR_OTHER_CONVERSATIONS:
            family = find_family(source)
            name = next((name for name, known in families.items() if known is family), "generic")
            # FireFunction's prompt has the time in seconds
            found.setdefault(name, source.replace(" + datetime +", " +"))
    return found


FAMILIES = _list_families()


class RecordedJob:
    """Implements `Submission`. ids: of the output so far."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self.ids: list[int] = []

    @property
    def started_ns(self) -> int | None:
        return self._submission.started_ns

    @property
    def ended_ns(self) -> int | None:
        return self._submission.ended_ns

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        raise AssertionError("the jobs have no images")

    def limit_cached_tokens(self, tokens: int) -> None:
        self._submission.limit_cached_tokens(tokens)

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        async for updates in self._submission:
            self.ids += [update.id for update in updates if isinstance(update, Token)]
            yield updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The ids of a prompt and of its output."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class RecordingRunner(ThreadRunner):
    """A runner that notes the jobs that it ran. jobs: each with its output."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.jobs: list[tuple[Job, RecordedJob]] = []

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[RecordedJob]:
        async with super().submit(job) as submission:
            recorded = RecordedJob(submission)
            self.jobs.append((job, recorded))
            yield recorded

    def take(self) -> Exchanged:
        """The only job since the last call."""
        [(job, recorded)] = self.jobs
        self.jobs.clear()
        return Exchanged(prompt=job.prompt_token_ids, output=tuple(recorded.ids))


def build_chat(*, think: bool | None) -> dict[str, Any]:
    arguments = ARGUMENTS_TEXT
    call = {"id": CALL_ID, "type": "function", "function": {"name": NAME, "arguments": arguments}}
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": CALL_ID, "content": RESULT},
            {"role": "assistant", "content": RESULT},
            {"role": "user", "content": NEXT},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        **({} if think is None else {"reasoning_effort": "none"}),
    }


def build_responses(*, think: bool | None) -> dict[str, Any]:
    arguments = ARGUMENTS_TEXT
    return {
        "instructions": SYSTEM,
        "input": [
            {"role": "user", "content": QUESTION},
            {"type": "function_call", "call_id": CALL_ID, "name": NAME, "arguments": arguments},
            {"type": "function_call_output", "call_id": CALL_ID, "output": RESULT},
            {"role": "assistant", "content": RESULT},
            {"role": "user", "content": NEXT},
        ],
        "tools": [{"type": "function", **TOOL, "strict": False}],
        "temperature": 0,
        "max_output_tokens": MAX_TOKENS,
        "store": False,
        **({} if think is None else {"reasoning": {"effort": "none"}}),
    }


def build_message(*, think: bool | None) -> dict[str, Any]:
    call = {"type": "tool_use", "id": CALL_ID, "name": NAME, "input": ARGUMENTS}
    result = {"type": "tool_result", "tool_use_id": CALL_ID, "content": RESULT}
    schema = {"input_schema": PARAMETERS}
    return {
        "system": SYSTEM,
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": RESULT},
            {"role": "user", "content": NEXT},
        ],
        "tools": [{"name": NAME, "description": TOOL["description"], **schema}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        **({} if think is None else {"thinking": {"type": "disabled"}}),
    }


def build_ollama(*, think: bool | None) -> dict[str, Any]:
    call = {"id": CALL_ID, "function": {"name": NAME, "arguments": ARGUMENTS}}
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": CALL_ID, "content": RESULT},
            {"role": "assistant", "content": RESULT},
            {"role": "user", "content": NEXT},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "options": {"temperature": 0, "num_predict": MAX_TOKENS},
        "stream": False,
        **({} if think is None else {"think": False}),
    }


BUILDERS: dict[str, Callable[..., dict[str, Any]]] = {
    "/v1/responses": build_responses,
    "/v1/messages": build_message,
    "/api/chat": build_ollama,
}


def without_tools(body: dict[str, Any]) -> dict[str, Any]:
    """The same conversation without the call and its result."""
    items = "input" if "input" in body else "messages"
    kept = [item for item in body[items] if not is_about_calls(item)]
    return {**{name: value for name, value in body.items() if name != "tools"}, items: kept}


def is_about_calls(item: dict[str, Any]) -> bool:
    content = item.get("content")
    return (
        "tool_calls" in item
        or item.get("role") == "tool"
        or item.get("type", "").startswith("function_call")
        or (isinstance(content, list) and content[0]["type"].startswith("tool_"))
    )


async def post(app: Starlette, path: str, body: dict[str, Any]) -> Reply:
    exchange = Exchange(app, "POST", path, json.dumps(body).encode())
    await exchange.task
    return exchange.reply


async def compare(folder: Path) -> None:
    runners: list[RecordingRunner] = []

    def make(settings: Settings) -> RecordingRunner:
        runners.append(RecordingRunner(settings))
        return runners[-1]

    async with serve_model(folder, make) as app:
        [runner] = runners
        model = {"model": folder.name}
        shown = (await post(app, "/api/show", model)).json
        adapt = dict if "tools" in shown["capabilities"] else without_tools
        think: bool | None = False
        chat = adapt({**model, **build_chat(think=think)})
        reply = await post(app, "/v1/chat/completions", chat)
        if reply.status == 400 and "cannot disable reasoning" in reply.error["message"]:
            think = None
            chat = adapt({**model, **build_chat(think=think)})
            reply = await post(app, "/v1/chat/completions", chat)
        assert reply.status == 200, reply.body
        expected = runner.take()
        assert len(expected.output) == MAX_TOKENS
        for path, build in BUILDERS.items():
            reply = await post(app, path, adapt({**model, **build(think=think)}))
            assert reply.status == 200, (path, reply.body)
            found = runner.take()
            assert bytes_of(found.prompt) == bytes_of(expected.prompt), path
            assert found == expected, path
        body = {"prompt": list(expected.prompt), "temperature": 0, "max_tokens": MAX_TOKENS}
        assert (await post(app, "/v1/completions", {**model, **body})).status == 200
        assert runner.take() == expected


def bytes_of(ids: tuple[int, ...]) -> bytes:
    """A readable prompt: the tokenizer has one token for each byte."""
    return bytes(id_ for id_ in ids if id_ < 256)


@pytest.mark.product
@pytest.mark.parametrize("family", FAMILIES)
def test_every_dialect_gives_the_same_greedy_ids(shared: Path, tmp_path: Path, family: str) -> None:
    folder = tiny.write(tmp_path / "model", eos_token_id=None, max_position_embeddings=1 << 14)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": FAMILIES[family]}
    file.write_text(json.dumps(config))
    asyncio.run(compare(folder))


def test_every_family_has_a_template(shared: Path) -> None:
    for name in MARKERS:
        assert find_family(FAMILIES[name]) is load_families()[name]
    assert {*load_families(), "generic"} == set(FAMILIES)
