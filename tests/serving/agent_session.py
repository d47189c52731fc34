"""A session shaped like Claude Code's, as a client of the HTTP application.

A session is several conversations. Each request of a conversation contains all earlier messages, a
first line that changes, and a `cache_control` that moves to the last block:

    main        system prompt, 28 tools; questions, each with a tool loop:
                    user         question
                    assistant    what the server answered
                    user         result, and a reminder beside it
                    system       the number of tokens that are left
    title       beside the first request; no tools, another system prompt
    sub-agents  two at a time, with the tools and their own system prompts
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from tests.api.asgi import Conversation as Exchange
from tests.api.asgi import Reply
from tests.serving.session_engine import Prompt, SessionEngine
from tests.serving.session_output import PATH, TEXT, THOUGHT, TurnOutput

NUM_TOOLS = 28
ROUNDS = 4  # calls of a tool loop; an answer follows

READ: dict[str, Any] = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}
TOOLS: list[dict[str, Any]] = [
    READ,
    *(
        {
            "name": f"Tool{n}",
            "description": f"Does task {n} of the agent. " * 3,
            "input_schema": {
                "type": "object",
                "properties": {"target": {"type": "string", "description": "An object."}},
            },
        }
        for n in range(1, NUM_TOOLS)
    ),
]


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request with its response. words: the words that the prompt must contain. thoughts: the
    words of the reasoning that the client sent. ends: the last word of each message that ends the
    messages between two turns, or that is a turn. prompt: what the engine got. counted: the result
    of count_tokens. first_usage, usage: of the first and of the last event with counts."""

    body: dict[str, Any]
    words: tuple[str, ...]
    thoughts: tuple[str, ...]
    ends: tuple[str, ...]
    prompt: Prompt
    counted: int
    first_usage: dict[str, int]
    usage: dict[str, int]
    in_loop: bool


@dataclass
class AgentConversation:
    """One conversation. name: begins all its words, which no other text contains."""

    name: str
    model: str
    app: Starlette
    engine: SessionEngine
    output: TurnOutput
    tools: Sequence[dict[str, Any]] = ()
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    words: list[str] = field(default_factory=list[str])
    ends: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    answered: list[Answered] = field(default_factory=list[Answered])

    def __post_init__(self) -> None:
        self._random = random.Random(self.name)
        self._system = "Work with care. " * 120 + self._word("SYSTEM")
        self.ends.append(self.words[-1])

    def _word(self, kind: str) -> str:
        """A new word that each later prompt must contain. No word is the start of another one."""
        word = f"{self.name}{kind}{len(self.words):04}X"
        self.words.append(word)
        return word

    async def ask(self, text: str = "") -> None:
        """Asks a question, and gets the first turn."""
        blocks = [words(f"<system-reminder>{self._word('CONTEXT')}</system-reminder>")]
        blocks.append(words(f"{text}{self._word('QUESTION')}"))
        self.messages.append({"role": "user", "content": blocks})

    async def run_loop(self, rounds: int) -> None:
        """Asks a question that needs some calls."""
        await self.ask()
        for number in range(rounds):
            content = await self.request(self.output.call, in_loop=number > 0)
            self.add_results(content)
        await self.request(self.output.answer, in_loop=rounds > 0)

    def add_results(self, content: list[dict[str, Any]]) -> None:
        text = f"{self._word('RESULT')} " + "line of the file\n" * 6 + self._word("END")
        calls = [block for block in content if block["type"] == "tool_use"]
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": text} for call in calls
        ]
        reminder = words(f"<system-reminder>{self._word('REMINDER')}</system-reminder>")
        self.messages.append({"role": "user", "content": [*(results or [words(text)]), reminder]})
        left = f"<total_tokens>{self._word('COUNT')} tokens left</total_tokens>"
        self.messages.append({"role": "system", "content": left})

    async def request(self, output: str, *, in_loop: bool = False) -> list[dict[str, Any]]:
        """Sends a request for which the model writes this output. Returns the content of the
        answer, which becomes the next message."""
        key = self.words[-1]
        self.ends.append(key)
        must_contain, thoughts, ends = tuple(self.words), tuple(self.thoughts), tuple(self.ends)
        number = len(self.words)
        own = {
            word: f"{self.name}{kind}{number:04}X"
            for word, kind in ((THOUGHT, "THOUGHT"), (TEXT, "ANSWER"), (PATH, "PATH"))
        }
        for word, replacement in own.items():
            output = output.replace(word, replacement)
        body = self._build_body()
        counted = await self._count(body)
        self.engine.outputs[key] = output
        reply = await self._post("/v1/messages?beta=true", {**body, "stream": True})
        assert (reply.status, reply.complete) == (200, True), reply.body
        message, first = read_stream(reply)
        self.answered.append(
            Answered(
                body=body,
                words=must_contain,
                thoughts=thoughts,
                ends=ends,
                prompt=self.engine.prompts[key],
                counted=counted,
                first_usage=first,
                usage=message["usage"],
                in_loop=in_loop,
            )
        )
        self.messages.append({"role": "assistant", "content": message["content"]})
        thinking = [block for block in message["content"] if block["type"] == "thinking"]
        other = [block for block in message["content"] if block["type"] != "thinking"]
        new = [own[word] for word in (TEXT, PATH) if own[word] in json.dumps(other)]
        self.words += new
        self.ends += new[-1:]
        self.thoughts += [own[THOUGHT]] if own[THOUGHT] in json.dumps(thinking) else []
        return message["content"]

    async def _count(self, body: dict[str, Any]) -> int:
        counted = {name: value for name, value in body.items() if name != "max_tokens"}
        reply = await self._post("/v1/messages/count_tokens?beta=true", counted)
        assert reply.status == 200, reply.body
        return reply.json["input_tokens"]

    async def _post(self, path: str, body: dict[str, Any]) -> Reply:
        headers = {"anthropic-version": "2023-06-01", "user-agent": "claude-cli/2.1.197"}
        exchange = Exchange(self.app, "POST", path, json.dumps(body).encode(), headers)
        await exchange.task
        return exchange.reply

    def _build_body(self) -> dict[str, Any]:
        """The body without `stream`."""
        check = f"{self._random.randrange(1 << 20):05x}"
        billing = f"x-anthropic-billing-header: cc_version=2.1.197.{check}; cch={check};"
        messages = json.loads(json.dumps(self.messages))
        last = next(m for m in reversed(messages) if m["role"] == "user")
        last["content"][-1]["cache_control"] = {"type": "ephemeral"}
        optional: dict[str, Any] = {"tools": list(self.tools)} if self.tools else {}
        return {
            "model": self.model,
            "max_tokens": 32000,
            "system": [
                words(billing),
                {**words("You are an agent."), "cache_control": {"type": "ephemeral"}},
                {**words(self._system), "cache_control": {"type": "ephemeral"}},
            ],
            "messages": messages,
            "thinking": {"type": "enabled", "budget_tokens": 31999},
            "metadata": {"user_id": "user_1"},
            "context_management": {"edits": []},
            **optional,
        }


async def run_session(
    app: Starlette, engine: SessionEngine, model: str, output: TurnOutput, turns: int
) -> list[AgentConversation]:
    """Runs a session whose main conversation has this many requests."""

    def begin(name: str, *, tools: bool = True) -> AgentConversation:
        return AgentConversation(name, model, app, engine, output, tools=TOOLS if tools else ())

    main, title = begin("MAIN"), begin("TITLE", tools=False)
    agents = [begin("FIRSTAGENT"), begin("SECONDAGENT")]
    questions = turns // (ROUNDS + 1)
    for question in range(questions):
        if question == 0:
            await _run_with_title(main, title, engine)
        else:
            await main.run_loop(ROUNDS)
        if question == questions // 2:
            engine.run_together(len(agents))
            await asyncio.gather(*(agent.run_loop(2) for agent in agents))
            engine.run_together(1)
    return [main, title, *agents]


async def _run_with_title(
    main: AgentConversation, title: AgentConversation, engine: SessionEngine
) -> None:
    """Runs the first loop. The request for a title runs alongside its first request."""
    await main.ask()
    await title.ask("Write a title for: ")
    engine.run_together(2)
    content, _ = await asyncio.gather(
        main.request(main.output.call), title.request(title.output.answer)
    )
    engine.run_together(1)
    for number in range(ROUNDS):
        main.add_results(content)
        output = main.output.answer if number == ROUNDS - 1 else main.output.call
        content = await main.request(output, in_loop=True)


def read_stream(reply: Reply) -> tuple[dict[str, Any], dict[str, int]]:
    """The message of a stream, read as the official clients do, and the counts of its first
    event."""
    message: dict[str, Any] = {}
    first: dict[str, int] = {}
    texts: list[str] = []
    for frame in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        event = json.loads(frame.partition("\ndata: ")[2])
        match event:
            case {"type": "message_start"}:
                message = event["message"]
                first = dict(message["usage"])
            case {"type": "content_block_start"}:
                message["content"].append(event["content_block"])
                texts = []
            case {"type": "content_block_delta", "delta": {"signature": signature}}:
                message["content"][-1]["signature"] = signature
            case {"type": "content_block_delta", "delta": delta}:
                texts += [value for name, value in delta.items() if name != "type"]
            case {"type": "content_block_stop"}:
                _complete(message["content"][-1], "".join(texts))
            case {"type": "message_delta"}:
                message["usage"] |= event["usage"]
            case {"type": kind}:
                assert kind in ("ping", "message_stop"), frame
    assert event["type"] == "message_stop"
    return message, first


def _complete(block: dict[str, Any], text: str) -> None:
    match block["type"]:
        case "tool_use":
            block["input"] = json.loads(text or "{}")
        case kind:
            block[kind] = text
