"""A session of an agent with images over HTTP, with real chat templates and a real engine: the
prefix cache serves what two prompts have in common, and the tower encodes each image once.

The maximum that the cache may serve is computed here, from the token IDs that the engine received,
in which the rows of an image have separate IDs.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from app.core.jobs import Job
from app.core.settings import Settings
from app.engine.prefix.cache import common_prefix_length
from app.runners.dispatcher import RequestStream
from app.runners.thread_runner import ThreadRunner
from tests import tiny_vision
from tests.api.asgi import Conversation as Exchange
from tests.image_files import make_data_url
from tests.serving.in_process import serve_model

TURNS = 50

# so many that an image is sent once more
FEW_TURNS = 17

# the calls of a tool loop; an answer follows
CALLS = 4

SHARE = 0.99

# The template of SmolVLM2's tokenizer_config.json, which is not among the shared ones.
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

# family -> its template, as a file of the shared ones or as text
TEMPLATES: Mapping[str, str] = {
    "qwen2_vl": "templates_inline/hfjinja-Qwen_Qwen2.5-VL-7B-Instruct.jinja",
    "qwen2_5_vl": "templates_inline/hfjinja-Qwen_Qwen2.5-VL-7B-Instruct.jinja",
    "qwen3_vl": "templates/ollama-qwen38_chat_template.jinja",
    "qwen3_5": "templates/Qwen3.5-4B.jinja",
    "gemma3": "templates/ortx-gemma-3.jinja",
    "gemma4": "templates/google-gemma-4-31B-it.jinja",
    "mistral3": "templates/Mistral-Small-3.2-24B-Instruct-2506.jinja",
    "pixtral": "templates/mistralai-Ministral-3-14B-Reasoning-2512.jinja",
    "smolvlm": SMOLVLM,
    "lfm2_vl": "templates_inline/hfjinja-LiquidAI_LFM2.5-VL-450M.jinja",
}

# the families whose template cannot turn the reasoning off; the answers have none anyway
ALWAYS_REASON = ("pixtral", "lfm2_vl")

# one family for each kind of cache: divisible, with windows, recurrent
KINDS = ("qwen3_vl", "gemma3", "qwen3_5")

# the turns with images: width, height and grey level. Two images are sent once more.
IMAGES: Mapping[int, Sequence[tuple[int, int, int]]] = {
    0: [(96, 64, 1), (64, 64, 2)],
    2: [(33, 70, 3)],
    5: [(128, 96, 4)],
    8: [(64, 96, 5)],
    13: [(96, 64, 6), (150, 50, 7)],
    15: [(96, 64, 8)],
    16: [(96, 64, 1)],
    21: [(40, 40, 9)],
    30: [(64, 64, 10)],
    37: [(80, 120, 11)],
    40: [(128, 96, 4)],
    44: [(96, 64, 12)],
}

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "see",
        "description": "Shows a picture.",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["n"],
        },
    },
}
LETTERS = [*range(ord("a"), ord("z") + 1)]


def make_call(number: int) -> Mapping[str, Any]:
    function = {"name": "see", "arguments": json.dumps({"n": number})}
    return {"id": f"call{number:05}", "type": "function", "function": function}


class RecordingRunner(ThreadRunner):
    """jobs: those that were submitted."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> AbstractAsyncContextManager[RequestStream]:
        self.jobs.append(job)
        return super().submit(job)


@dataclass(kw_only=True)
class Turn:
    """job: what the engine got. cached: the number of tokens that it reported. output: the tokens
    of the answer. text: the answer."""

    job: Job
    cached: int
    output: Sequence[int]
    text: str


@dataclass
class Session:
    """A conversation. Each request has all earlier messages."""

    app: Starlette
    runner: RecordingRunner
    reasoning: Mapping[str, Any]
    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "system", "content": "Work with care. " * 20}]
    )
    turns: list[Turn] = field(default_factory=list[Turn])

    async def run(self, turns: int) -> None:
        call = ""
        for number in range(turns):
            content = [
                {"type": "text", "text": f"Part {number}: the size of a picture and more."},
                *(
                    {"type": "image_url", "image_url": {"url": make_data_url(*image)}}
                    for image in IMAGES.get(number, ())
                ),
            ]
            position = number % (CALLS + 1)
            role = {"role": "tool", "tool_call_id": call} if position else {"role": "user"}
            self.messages.append({**role, "content": content})
            message = await self.ask(calls=position < CALLS)
            if position < CALLS:
                # random weights may reason until the end; then the client writes the call itself
                message.setdefault("tool_calls", [make_call(number)])
                call = message["tool_calls"][0]["id"]
            self.messages.append(message)

    async def ask(self, *, calls: bool, **fields: Any) -> dict[str, Any]:
        """Returns the message of the answer."""
        output = {"tool_choice": "required"} if calls else {"allowed_token_ids": LETTERS}
        body: dict[str, Any] = {
            "model": "model",
            "messages": self.messages,
            "tools": [TOOL],
            "parallel_tool_calls": False,
            **self.reasoning,
            "return_token_ids": True,
            "temperature": 0,
            "max_tokens": 100 if calls else 12,
            **output,
            **fields,
        }
        exchange = Exchange(self.app, "POST", "/v1/chat/completions", json.dumps(body).encode())
        reply = await exchange.end()
        assert reply.status == 200, reply.body
        [choice] = reply.json["choices"]
        usage = reply.json["usage"]
        message = {k: v for k, v in choice["message"].items() if v}
        job = self.runner.jobs[-1]
        assert usage["prompt_tokens"] == len(job.prompt_token_ids)
        self.turns.append(
            Turn(
                job=job,
                cached=usage["prompt_tokens_details"]["cached_tokens"],
                output=choice["token_ids"],
                text=json.dumps([message.get("content"), message.get("tool_calls")]),
            )
        )
        return {"role": "assistant", "content": "", **message}


def run_session(folder: Path, family: str, template: str, turns: int) -> tuple[Session, int]:
    """Returns the session, and how often the tower ran."""
    model = tiny_vision.write(folder / "model", family, template=template)
    runner: RecordingRunner | None = None

    def make_runner(settings: Settings) -> RecordingRunner:
        nonlocal runner
        runner = RecordingRunner(settings)
        return runner

    async def drive() -> tuple[Session, int]:
        async with serve_model(model, make_runner) as app:
            assert runner is not None
            reasoning = {} if family in ALWAYS_REASON else {"reasoning_effort": "none"}
            session = Session(app, runner, reasoning)
            await session.run(turns)
            return session, runner.status().stats.images_encoded

    return asyncio.run(drive())


def count_possible(before: Turn, now: Turn, *, divisible: bool) -> int:
    """Returns the number of tokens that the turn before lets the cache serve: all that both have in
    common, or, for layers that resume at checkpoints, those up to the last end of a message or of
    an image within the prompt."""
    prompt = before.job.prompt_token_ids
    old = (*prompt, *before.output)
    common = common_prefix_length(old, now.job.prompt_token_ids[:-1])
    if divisible or common == len(old):
        return common
    assert before.job.message_ends is not None
    ends = [*before.job.message_ends, *(image.end for image in before.job.images)]
    return max((end for end in ends if end <= common and end < len(prompt)), default=0)


@pytest.mark.parametrize(
    ("family", "turns"),
    [
        *((family, FEW_TURNS) for family in KINDS),
        *(pytest.param(family, TURNS, marks=pytest.mark.exhaustive) for family in TEMPLATES),
    ],
)
def test_a_session_with_images_is_served_from_the_prefix_cache(
    shared: Path, tmp_path: Path, family: str, turns: int
) -> None:
    template = TEMPLATES[family]
    if template.endswith(".jinja"):
        template = (shared / "chat_templates" / template).read_text("utf-8")
    session, encoded = run_session(tmp_path, family, template, turns)
    sent = [image for turn, images in IMAGES.items() if turn < turns for image in images]
    assert encoded == len(set(sent)) < len(sent)
    assert {len(turn.job.images) for turn in session.turns} >= {2, len(sent)}
    divisible = family not in ("qwen3_5", "gemma3", "gemma4", "lfm2_vl")
    pairs = list(zip(session.turns, session.turns[1:], strict=False))
    possible = [count_possible(*pair, divisible=divisible) for pair in pairs]
    late = {
        number: (now.cached, most, len(now.job.prompt_token_ids))
        for number, ((_, now), most) in enumerate(zip(pairs, possible, strict=True), 1)
        if now.cached < SHARE * most
    }
    assert late == {}
    assert sum(possible) > 0.5 * sum(len(now.job.prompt_token_ids) for _, now in pairs)
