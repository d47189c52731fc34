"""Recorded traffic as the ids that a server would evaluate.

There are two kinds. Conversations of agents (tau-bench, SWE-agent) are rendered with the chat
template of Qwen 3 and encoded with its tokenizer; recorded assistant messages count as generated.
The request traces of Mooncake (Qin et al., FAST 2025) have one id for each block of 512 tokens: one
of our ids is such a block, so lengths are scaled down by 512.
"""

import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.model_files import ModelFiles
from app.core.requests import Message, ToolCall
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer

CONCURRENCY = 8
END_OF_TURN = "<|im_end|>"

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """turn_ends: positions of the prompt after each end of a turn."""

    prompt: Ids
    answer: Ids = ()
    turn_ends: Ids = ()


def load_conversations(shared: Path) -> list[list[RecordedTurn]]:
    """tau-bench's 50 airline conversations and SWE-agent's 7 runs in random order, because the
    order is not recorded."""
    traces = shared / "traces"
    tools = json.loads((traces / "tau_airline_tools.json").read_text())
    script = _ConversationEncoder(shared / "tokenizers" / "qwen3")
    recorded = [
        script.encode_turns(_messages(row), row_tools)
        for name, row_tools in (("tau_airline", tools), ("sweagent", None))
        for row in _rows(traces / f"{name}_conversations.jsonl")
    ]
    random.Random(0).shuffle(recorded)
    return recorded


def interleave(
    conversations: Sequence[Sequence[RecordedTurn]], concurrency: int = CONCURRENCY
) -> list[RecordedTurn]:
    """Interleave the turns of concurrent conversations; when one ends, the next starts."""
    waiting = deque(map(iter, conversations))
    running = deque(waiting.popleft() for _ in range(min(concurrency, len(waiting))))
    turns: list[RecordedTurn] = []
    while running:
        turn = next(running[0], None)
        if turn is not None:
            turns.append(turn)
            running.rotate(-1)
        else:
            running.popleft()
            if waiting:
                running.appendleft(waiting.popleft())
    return turns


def load_mooncake(shared: Path, name: str) -> list[RecordedTurn]:
    """name: conversation or synthetic. Traces have no answers; if a conversation continues, its
    next request includes them as new blocks."""
    rows = _rows(shared / "traces" / f"mooncake_{name}_trace.jsonl")
    return [RecordedTurn(prompt=tuple(row["hash_ids"])) for row in rows]


class _ConversationEncoder:
    """Encodes recorded messages as a server would, turn by turn."""

    def __init__(self, folder: Path) -> None:
        """folder: with tokenizer.json, and tokenizer_config.json with a template."""
        files = ModelFiles(
            name=folder.name,
            path=folder,
            config={},
            shards=(),
            tokenizer_path=folder / "tokenizer.json",
            tokenizer_config=json.loads((folder / "tokenizer_config.json").read_text()),
            generation_config={},
            chat_template=None,
            created=0,
        )
        self._template = ChatTemplate(files)
        self._tokenizer = Tokenizer.load(files)
        end = self._tokenizer.token_to_id(END_OF_TURN)
        assert end is not None
        self._end = end
        self._known: dict[str, Ids] = {}

    def encode_turns(self, messages: Sequence[Message], tools: Any) -> list[RecordedTurn]:
        spoken = [place for place, m in enumerate(messages) if m.role == "assistant"]
        return [self._encode_turn(messages[: place + 1], tools) for place in spoken]

    def _encode_turn(self, messages: Sequence[Message], tools: Any) -> RecordedTurn:
        prompt_text = self._template.render(messages[:-1], tools=tools)
        # append a message, so that the answer is rendered as history
        full_text = self._template.render(
            [*messages, Message(role="user", content="")], tools=tools, add_generation_prompt=False
        )
        assert full_text.startswith(prompt_text)
        answer, found, _ = full_text[len(prompt_text) :].partition(END_OF_TURN)
        prompt = self._encode(prompt_text)
        marks = tuple(place + 1 for place, id in enumerate(prompt) if id == self._end)
        return RecordedTurn(prompt=prompt, answer=self._encode(answer + found), turn_ends=marks)

    def _encode(self, text: str) -> Ids:
        """Encode each piece between special tokens once, because no token spans a special one."""
        ids: list[int] = []
        for piece in text.split(END_OF_TURN):
            if piece not in self._known:
                self._known[piece] = tuple(self._tokenizer.encode(piece, add_special_tokens=False))
            ids += (*self._known[piece], self._end)
        return tuple(ids[:-1])


def _messages(row: dict[str, Any]) -> list[Message]:
    return [
        Message(
            role=message["role"],
            content=message["content"],
            name=message.get("name"),
            tool_calls=tuple(
                ToolCall(
                    id=call["id"],
                    name=call["function"]["name"],
                    arguments=call["function"]["arguments"],
                )
                for call in message.get("tool_calls") or ()
            ),
            tool_call_id=message.get("tool_call_id"),
        )
        for message in row["messages"]
    ]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)
