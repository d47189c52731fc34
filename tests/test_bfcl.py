"""Required tool calls are valid with any model: all questions of a leaderboard, sent to models with
random weights and the template of each family.

Every question is sent to one family, with `tool_choice: required`: in turn streamed, unstreamed,
and both with the same seed. CI sends a third of them, to a quarter of the families.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from app import store
from app.core.settings import ModelSettings, Settings
from app.core.thread_pools import ThreadPools
from app.engine.model_info import complete_config
from app.runners.pool import ModelPool
from app.runners.thread_runner import ThreadRunner
from app.serving.model_library import InstalledModels
from app.serving.registry import ModelRegistry, build_entry
from app.serving.router import ModelRouter
from app.text.family import ChatFamily, load_families
from tests import tiny
from tests.bfcl import questions
from tests.conftest import SHARED
from tests.fakes import build_fake_app
from tests.server_process import TIMEOUT
from tests.serving.in_process import accept_tokenizer

pytestmark = pytest.mark.no_cover  # see tests/conftest.py

# templates that cannot render tools: one needs a variable that only its maker's server sets, the
# macros of the other use a loop variable
TEMPLATES_WITHOUT_TOOLS = ("fireworks-ai-llama-3-firefunction-v2", "MiroThinker")

MAX_TOKENS = 160
MERGES = 4000
MAX_CONCURRENT = 16

# whether an answer is streamed, by the index of the question
# ((True, False),) sends each question in both ways, which takes 50 % longer
STREAM_MODES = ((True, False), (True,), (False,))

# Random weights generate endless strings, numbers and lists. A bias makes the closing tokens more
# likely, so that most answers end; the grammar still decides where they are allowed. A string has
# thousands of possible next tokens, a number only dozens.
CLOSES = {'"': 28.0, "</s>": 34.0, "}": 20.0, "]": 20.0, "\n]": 20.0, ")": 20.0, ",": 14.0}
# for strings that end with a tag, in which a quotation mark is mostly text
CLOSES_TAGGED = CLOSES | {'"': 20.0, "</": 28.0}
MARKER = 28.0
CLOSING_TAG = re.compile(r"</[^\s<>{}'\"]*(?:parameter|value)>")


@dataclass(frozen=True)
class Client:
    http: httpx.AsyncClient
    bias: dict[str, float]

    async def send(self, question: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """The message and its finish reason, streamed, unstreamed or both."""
        body = {
            **question,
            "model": "tiny",
            "tool_choice": "required",
            "seed": seed,
            "temperature": 2,
            "max_tokens": MAX_TOKENS,
            "logit_bias": self.bias,
        }
        answers: list[dict[str, Any]] = []
        for streamed in STREAM_MODES[seed % len(STREAM_MODES)]:
            answer = await self.http.post("/v1/chat/completions", json=body | {"stream": streamed})
            assert answer.status_code == 200, answer.text
            choice = None if streamed else answer.json()["choices"][0]
            answers.append(_join_stream(answer.text) if choice is None else _read_choice(choice))
        return answers


def _read_choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ],
        "finish": choice["finish_reason"],
    }


def _join_stream(stream: str) -> dict[str, Any]:
    """The joined deltas of the server-sent events."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    frames = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    for frame in frames:
        for choice in json.loads(frame)["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning_content") or ""
            message["finish"] = choice["finish_reason"] or message["finish"]
            for piece in delta.get("tool_calls") or ():
                _add(message["calls"], piece)
    return message


def _add(calls: list[tuple[str, str]], delta_: dict[str, Any]) -> None:
    function = delta_["function"]
    if delta_["index"] == len(calls):
        assert delta_["id"]
        calls.append((function["name"], function.get("arguments") or ""))
        return
    assert delta_["index"] == len(calls) - 1, "calls must not be interleaved"
    assert function.get("name") is None
    name, arguments = calls[-1]
    calls[-1] = (name, arguments + function["arguments"])


@contextlib.asynccontextmanager
async def serve_in_process(folder: Path) -> AsyncGenerator[httpx.AsyncClient]:
    """The application with a real engine, without a socket."""
    model = ModelSettings(name=str(folder))
    settings = Settings(models=(model,), parallel=MAX_CONCURRENT, memory=1 << 30)
    entry = build_entry(model, complete_config(store.resolve(str(folder))), settings)
    registry = ModelRegistry([entry], settings)
    pool = ModelPool(ThreadRunner, registry.load_verified_files, None, total_bytes=None)
    router = ModelRouter(
        registry,
        pool,
        [entry.served.name],
        ThreadPools(),
        load_wait=60.0,
        check_tokenizer=accept_tokenizer,
        library=InstalledModels(registry),
    )
    await pool.start()
    try:
        await router.preload_models()
        transport = httpx.ASGITransport(build_fake_app(router, settings))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=TIMEOUT
        ) as http:
            yield http
    finally:
        await pool.stop()


def template_of(family: ChatFamily) -> str | None:
    """A real template of a family."""
    for path in sorted((SHARED / "chat_templates").glob("templates*/*.jinja")):
        template = path.read_text("utf-8")
        if path.stem not in TEMPLATES_WITHOUT_TOOLS and family.matches(template):
            return template
    return None


def list_families() -> dict[str, tuple[ChatFamily, str]]:
    """Every family with a syntax, by name, with a real template of it."""
    found: dict[str, tuple[ChatFamily, str]] = {}
    for name, family in load_families().items():
        template = template_of(family)
        if (
            template is not None
            and type(family).build_tool_call_grammar is not ChatFamily.build_tool_call_grammar
        ):
            found[name] = family, template
    return found


def write_model(folder: Path, family: ChatFamily, template: str) -> dict[str, float]:
    """Write a model of two layers with the family's markers as tokens. Returns the `logit_bias`
    that makes its answers end."""
    tags = set(CLOSING_TAG.findall(template)) - set(family.markers)
    tag_tokens = sorted({*tags, *(f"\n{tag}" for tag in tags)})
    tokenizer = load_short_tokenizer(
        SHARED / "tokenizers" / "gpt2" / "tokenizer.json", [*tag_tokens, "\n]"]
    )
    markers = [AddedToken(text, special=True) for text in ("<s>", "</s>", *family.markers)]
    tokenizer.add_special_tokens(markers)
    end = tokenizer.token_to_id("</s>")
    tiny.write(folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=end, chat=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    closes = CLOSES_TAGGED if tags or "DSML" in template else CLOSES
    biases = {_to_byte_level(text): bias for text, bias in closes.items()}
    biases |= dict.fromkeys((*map(_to_byte_level, tag_tokens), *family.markers), MARKER)
    ids = {tokenizer.token_to_id(text): bias for text, bias in biases.items()}
    return {str(id): bias for id, bias in ids.items() if id is not None}


def load_short_tokenizer(file: Path, more: Sequence[str]) -> Tokenizer:
    """A byte-level tokenizer without its later merges, because the time of a step depends on the
    vocabulary. more: texts that become ordinary tokens."""
    data = json.loads(file.read_text("utf-8"))
    model = data["model"]
    # first the bytes, then the result of each merge, in order
    model["vocab"] = {text: id for text, id in model["vocab"].items() if id < 256 + MERGES}
    model["merges"] = model["merges"][:MERGES]
    # the model may generate these, although no text is encoded to them
    model["vocab"] |= {_to_byte_level(text): 256 + MERGES + i for i, text in enumerate(more)}
    data["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(data))


def _to_byte_level(text: str) -> str:
    """The text in the alphabet of a byte-level vocabulary."""
    [(encoded, _)] = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    return encoded


def check(question: dict[str, Any], message: dict[str, Any]) -> None:
    """The answer has only valid calls to the given functions. In a truncated answer, the last call
    is the beginning of a valid one."""
    schemas = {
        tool["function"]["name"]: jsonschema_rs.Draft202012Validator(tool["function"]["parameters"])
        for tool in question["tools"]
    }
    truncated = message["finish"] == "length"
    complete_calls = message["calls"][:-1] if truncated else message["calls"]
    assert truncated or (complete_calls and message["finish"] == "tool_calls"), message
    assert truncated or not message["content"].strip(), message
    for name, arguments in complete_calls:
        schemas[name].validate(json.loads(arguments))
    if truncated:
        for name, arguments in message["calls"][-1:]:
            assert name in schemas
            assert begins_an_object(arguments), arguments


def begins_an_object(text: str) -> bool:
    """Whether more text could make it a JSON object."""
    open_: list[str] = []
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "{[":
            open_.append({"{": "}", "[": "]"}[character])
        elif character in "}]" and (not open_ or open_.pop() != character):
            return False
    return text[:1] in ("", "{")


FAMILIES = list_families()


def test_the_data_covers_most_families(shared: Path):
    assert len(FAMILIES) >= 25


@pytest.mark.parametrize("name", [*FAMILIES][::4])
def test_required_calls_are_valid_and_streamed_equals_collected(
    name: str, shared: Path, tmp_path: Path
):
    ask_all(name, list_questions(name, shared)[::3], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_the_calls_of_every_question_are_valid(name: str, shared: Path, tmp_path: Path):
    ask_all(name, list_questions(name, shared), tmp_path)


def list_questions(name: str, shared: Path) -> list[dict[str, Any]]:
    """The questions of a family."""
    return list(questions(shared / "traces"))[[*FAMILIES].index(name) :: len(FAMILIES)]


def ask_all(name: str, own_questions: Sequence[dict[str, Any]], folder: Path) -> None:
    family, template = FAMILIES[name]
    bias = write_model(folder / "tiny", family, template)

    async def send_all() -> list[list[dict[str, Any]]]:
        semaphore = asyncio.Semaphore(MAX_CONCURRENT)

        async def send_one(client: Client, seed: int) -> list[dict[str, Any]]:
            async with semaphore:
                return await client.send(own_questions[seed], seed)

        async with serve_in_process(folder / "tiny") as http:
            client = Client(http, bias)
            return await asyncio.gather(
                *(send_one(client, seed) for seed in range(len(own_questions)))
            )

    answers = asyncio.run(send_all())
    for question, (answer, *again) in zip(own_questions, answers, strict=True):
        check(question, answer)
        assert all(other == answer for other in again)
    num_ended = sum(answer["finish"] == "tool_calls" for answer, *_ in answers)
    assert num_ended > 0.4 * len(own_questions), (
        f"{num_ended} of {len(own_questions)}: too few answers ended"
    )
