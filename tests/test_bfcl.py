"""Calls that must be made are valid, whatever the model: all questions of a leaderboard, put to
models with random weights that speak like each family.

Every question is asked of one family, with `tool_choice: required`: in turn streamed, whole, and
in both ways from the same seed.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
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
from app.runners.tokenizer_check import TokenizerChecker
from app.serving.registry import ModelRegistry, build_entry
from app.serving.router import ModelRouter
from app.text import families
from app.text.family import ChatFamily
from tests import tiny
from tests.bfcl import questions
from tests.conftest import SHARED
from tests.fakes import build_fake_app
from tests.server_process import TIMEOUT

pytestmark = pytest.mark.no_cover  # see tests/conftest.py

# templates that cannot show any tool: one wants it in a variable that only its makers' server has,
# the other's macros look for the variable of a loop
UNABLE = ("fireworks-ai-llama-3-firefunction-v2", "MiroThinker")

MAX_TOKENS = 160
MERGES = 4000
AT_ONCE = 16

# whether an answer is streamed, by the question's place
# ((True, False),) asks all of them both ways, which takes half as long again
WAYS = ((True, False), (True,), (False,))

# Random weights write strings without an end, and numbers, and lists. What closes them is made
# likelier, so that most answers come to their end; which of it may stand where is for the grammar
# to say all the same. A string has thousands of ways to go on, a number only dozens.
CLOSES = {'"': 28.0, "</s>": 34.0, "}": 20.0, "]": 20.0, "\n]": 20.0, ")": 20.0, ",": 14.0}
# where strings end with a tag, and a quotation mark is mostly text
CLOSES_TAGGED = CLOSES | {'"': 20.0, "</": 28.0}
MARKER = 28.0
CLOSING_TAG = re.compile(r"</[^\s<>{}'\"]*(?:parameter|value)>")


@dataclass(frozen=True)
class Client:
    http: httpx.AsyncClient
    bias: dict[str, float]

    async def ask(self, question: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """The message and why it ended, in each of the ways that it is asked in."""
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
        for streamed in WAYS[seed % len(WAYS)]:
            answer = await self.http.post("/v1/chat/completions", json=body | {"stream": streamed})
            assert answer.status_code == 200, answer.text
            whole = None if streamed else answer.json()["choices"][0]
            answers.append(_folded(answer.text) if whole is None else _said(whole))
        return answers


def _said(choice: dict[str, Any]) -> dict[str, Any]:
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


def _folded(stream: str) -> dict[str, Any]:
    """Server-sent events, added up as a client would."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    frames = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    for frame in frames:
        for choice in json.loads(frame)["choices"]:
            delta = choice["delta"]
            said["content"] += delta.get("content") or ""
            said["reasoning"] += delta.get("reasoning_content") or ""
            said["finish"] = choice["finish_reason"] or said["finish"]
            for piece in delta.get("tool_calls") or ():
                _add(said["calls"], piece)
    return said


def _add(calls: list[tuple[str, str]], piece: dict[str, Any]) -> None:
    function = piece["function"]
    if piece["index"] == len(calls):
        assert piece["id"]
        calls.append((function["name"], function.get("arguments") or ""))
        return
    assert piece["index"] == len(calls) - 1, "one call is over before the next one begins"
    assert function.get("name") is None
    name, arguments = calls[-1]
    calls[-1] = (name, arguments + function["arguments"])


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncGenerator[httpx.AsyncClient]:
    """The application with a real engine, without a socket."""
    model = ModelSettings(name=str(folder))
    settings = Settings(models=(model,), parallel=AT_ONCE, memory=1 << 30)
    entry = build_entry(model, complete_config(store.resolve(str(folder))), settings)
    registry = ModelRegistry([entry], settings)
    pool = ModelPool(ThreadRunner, registry.load_verified_files, None, total_bytes=None)
    router = ModelRouter(
        registry,
        pool,
        [entry.served.name],
        ThreadPools(),
        load_wait=60.0,
        check_tokenizer=TokenizerChecker(store.is_builtin).check,
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
        if path.stem not in UNABLE and family.matches(template):
            return template
    return None


def spoken() -> dict[str, tuple[ChatFamily, str]]:
    """Every family with a syntax, by name, with a real template of it."""
    found: dict[str, tuple[ChatFamily, str]] = {}
    for module in iter_modules(families.__path__):
        family: ChatFamily = import_module(f"{families.__name__}.{module.name}").Family()
        template = template_of(family)
        if (
            template is not None
            and type(family).build_tool_call_grammar is not ChatFamily.build_tool_call_grammar
        ):
            found[module.name] = family, template
    return found


def write(folder: Path, family: ChatFamily, template: str) -> dict[str, float]:
    """A model of two layers, which has the family's markers as tokens. The `logit_bias` that brings
    its answers to an end."""
    tags = set(CLOSING_TAG.findall(template)) - set(family.markers)
    tagged = sorted({*tags, *(f"\n{tag}" for tag in tags)})
    tokenizer = shortened(SHARED / "tokenizers" / "gpt2" / "tokenizer.json", [*tagged, "\n]"])
    markers = [AddedToken(text, special=True) for text in ("<s>", "</s>", *family.markers)]
    tokenizer.add_special_tokens(markers)
    end = tokenizer.token_to_id("</s>")
    tiny.write(folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=end, chat=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    closes = CLOSES_TAGGED if tags or "DSML" in template else CLOSES
    biases = {_spelled(text): bias for text, bias in closes.items()}
    biases |= dict.fromkeys((*map(_spelled, tagged), *family.markers), MARKER)
    ids = {tokenizer.token_to_id(text): bias for text, bias in biases.items()}
    return {str(id): bias for id, bias in ids.items() if id is not None}


def shortened(file: Path, more: Sequence[str]) -> Tokenizer:
    """A byte-level tokenizer without its later merges, because a step's time goes into the
    vocabulary. more: texts that become tokens of it, not special ones."""
    described = json.loads(file.read_text("utf-8"))
    model = described["model"]
    # first the bytes, then what each merge makes, in order
    model["vocab"] = {text: id for text, id in model["vocab"].items() if id < 256 + MERGES}
    model["merges"] = model["merges"][:MERGES]
    # the model may say these, though nothing is ever encoded as one of them
    model["vocab"] |= {_spelled(text): 256 + MERGES + i for i, text in enumerate(more)}
    described["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(described))


def _spelled(text: str) -> str:
    """As a byte-level vocabulary writes it."""
    [(spelled, _)] = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    return spelled


def check(question: dict[str, Any], said: dict[str, Any]) -> None:
    """Calls, and nothing but calls; each of a function that was offered, each as its schema wants
    it. Of an answer that was cut, the last call is the beginning of such a one."""
    schemas = {
        tool["function"]["name"]: jsonschema_rs.Draft202012Validator(tool["function"]["parameters"])
        for tool in question["tools"]
    }
    cut = said["finish"] == "length"
    whole = said["calls"][:-1] if cut else said["calls"]
    assert cut or (whole and said["finish"] == "tool_calls"), said
    assert cut or not said["content"].strip(), said
    for name, arguments in whole:
        schemas[name].validate(json.loads(arguments))
    if cut:
        for name, arguments in said["calls"][-1:]:
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


FAMILIES = spoken()


def test_the_data_speaks_most_families(shared: Path):
    assert len(FAMILIES) >= 25


@pytest.mark.parametrize("name", FAMILIES)
def test_required_calls_are_valid_and_streamed_equals_collected(
    name: str, shared: Path, tmp_path: Path
):
    family, template = FAMILIES[name]
    place, count = [*FAMILIES].index(name), len(FAMILIES)
    mine = list(questions(shared / "traces"))[place::count]
    bias = write(tmp_path / "tiny", family, template)

    async def ask_all() -> list[list[dict[str, Any]]]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(client: Client, seed: int) -> list[dict[str, Any]]:
            async with gate:
                return await client.ask(mine[seed], seed)

        async with serving(tmp_path / "tiny") as http:
            client = Client(http, bias)
            return await asyncio.gather(*(one(client, seed) for seed in range(len(mine))))

    answers = asyncio.run(ask_all())
    for question, (answer, *again) in zip(mine, answers, strict=True):
        check(question, answer)
        assert all(other == answer for other in again)
    ended = sum(answer["finish"] == "tool_calls" for answer, *_ in answers)
    assert ended > 0.4 * len(mine), f"{ended} of {len(mine)}: too few to have proved anything"
