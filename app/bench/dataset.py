"""The prompts of a load: random words, fixed texts, or a trace file.

Knows: prompt lengths, the format of trace files. Must not know: HTTP, concurrency, metrics.

A trace file has one JSON object per line; docs/benchmarks.md describes its fields. They follow
vLLM's custom datasets and the traces of Mooncake (Qin et al., FAST 2025).
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.core.units import pluralize

# short words, most of which are one token in every vocabulary
_WORDS = (
    "the of and to in is that for it as with on be at by this from or an are was not have one all "
    "can if there which when each other about many then these some would make like time has look "
    "two more write see number way"
)

# tokens per id of `hash_ids`, as in Mooncake's traces
_BLOCK_TOKENS = 512

# tokens of a random prompt
DEFAULT_INPUT_LEN = 128

_OUTPUT_FIELDS = ("output_tokens", "output_length", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """text: a prompt, or the content of one user message. messages: a conversation; empty for plain
    text. tools: the tools of a conversation. output_tokens: None for the default."""

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Prompts that are sent one after the other. arrival: seconds after the start of the trace;
    None if the trace has no times."""

    prompts: tuple[BenchPrompt, ...]
    arrival: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLength:
    """The relation of words and tokens for one server. tokens_per_word: the average for random
    words. template_tokens: the number of tokens that the chat template adds to a prompt."""

    tokens_per_word: float = 1.0
    template_tokens: float = 0.0

    def count_words(self, tokens: float, *, with_template: bool = True) -> int:
        """Returns the number of words of a prompt with about this number of tokens."""
        fixed = self.template_tokens if with_template else 0.0
        return max(1, round((tokens - fixed) / self.tokens_per_word))


def make_words(label: str, count: int) -> str:
    """Returns random words. Different labels give texts that differ from the first few words on."""
    return " ".join(random.Random(label).choices(_WORDS.split(), k=count))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomDataset:
    """Prompts of random words, which no server has in its prefix cache. input_len: tokens of each
    prompt after the prefix. prefix_len: tokens of a prefix that all prompts share."""

    input_len: int = DEFAULT_INPUT_LEN
    prefix_len: int = 0

    @property
    def description(self) -> str:
        shared = f" after a shared prefix of {self.prefix_len}" if self.prefix_len else ""
        return f"unique prompts of {self.input_len} tokens{shared}"

    def make_sessions(self, label: str, seed: str, length: PromptLength) -> Iterator[Session]:
        """Yields any number of sessions. The prompts depend on the label and the seed, the prefix
        only on the seed."""
        prefix = ""
        if self.prefix_len:
            words = length.count_words(self.prefix_len, with_template=False)
            prefix = make_words(f"{seed}/prefix", words) + " "
        words = length.count_words(self.input_len)
        index = 0
        while True:
            text = prefix + make_words(f"{seed}/{label}/{index}", words)
            yield Session(prompts=(BenchPrompt(text=text),))
            index += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDataset:
    """The same texts again and again, unchanged."""

    texts: tuple[str, ...]

    @property
    def description(self) -> str:
        return f"{pluralize(len(self.texts), 'fixed prompt')}"

    def make_sessions(self, label: str, seed: str, length: PromptLength) -> Iterator[Session]:
        while True:
            for text in self.texts:
                yield Session(prompts=(BenchPrompt(text=text),))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One line of a trace. prompts: the turns of a recorded conversation, or one text; empty if
    only the length is recorded. input_length: tokens. hash_ids: one id per block of the prompt;
    equal ids mean equal text. arrival: in seconds."""

    prompts: tuple[BenchPrompt, ...] = ()
    input_length: int = 0
    hash_ids: tuple[int, ...] = ()
    output_tokens: int | None = None
    arrival: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDataset:
    """A trace, once. speed: divides the arrival times. length_scale: multiplies recorded lengths,
    of the prompt and the output; recorded texts remain unchanged."""

    rows: Sequence[TraceRow] = field(repr=False)
    speed: float = 1.0
    length_scale: float = 1.0

    @property
    def description(self) -> str:
        return f"a trace of {pluralize(len(self.rows), 'row')}"

    @property
    def is_timed(self) -> bool:
        return any(row.arrival is not None for row in self.rows) and math.isfinite(self.speed)

    def make_sessions(self, label: str, seed: str, length: PromptLength) -> Iterator[Session]:
        """Yields one session per row. Texts that only have a length differ for each label."""
        first = min((row.arrival for row in self.rows if row.arrival is not None), default=0.0)
        for index, row in enumerate(self.rows):
            arrival = None if row.arrival is None else (row.arrival - first) / self.speed
            prompts = row.prompts
            if not prompts:
                text = self._make_text(row, f"{seed}/{label}", index, length)
                output = row.output_tokens
                scaled = None if output is None else max(1, round(output * self.length_scale))
                prompts = (BenchPrompt(text=text, output_tokens=scaled),)
            yield Session(prompts=prompts, arrival=arrival)

    def _make_text(self, row: TraceRow, key: str, index: int, length: PromptLength) -> str:
        """The text of each block depends on its id only."""
        blocks: list[str] = []
        rest = length.count_words(row.input_length * self.length_scale)
        words = length.count_words(_BLOCK_TOKENS * self.length_scale, with_template=False)
        for block in row.hash_ids:
            blocks.append(make_words(f"{key}/block/{block}", min(rest, words)))
            rest -= min(rest, words)
            if not rest:
                break
        if rest:
            blocks.append(make_words(f"{key}/row/{index}", rest))
        return " ".join(blocks)


Dataset = RandomDataset | FixedDataset | TraceDataset


def read_trace(file: Path) -> tuple[TraceRow, ...]:
    """Raises AppError(INVALID) that names the line, and for a file that cannot be read."""
    try:
        lines = file.read_text("utf-8").splitlines()
        rows = tuple(_parse_rows(file, lines))
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror}"
        raise AppError(ErrorKind.INVALID, message) from error
    except UnicodeDecodeError as error:
        raise AppError(ErrorKind.INVALID, f"{file} is not UTF-8 text: {error}") from error
    if not rows:
        raise AppError(
            ErrorKind.INVALID, f"{file} has no requests: it needs one JSON object per line"
        )
    return rows


def _parse_rows(file: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed: object = json.loads(line)
            if not isinstance(parsed, dict):
                raise ValueError("not a JSON object")
            yield _parse_row(cast("dict[str, Any]", parsed))
        except ValueError as error:
            raise AppError(ErrorKind.INVALID, f"{file}, line {number}: {error}") from error


def _parse_row(row: Mapping[str, Any]) -> TraceRow:
    output = _parse_number(row, *_OUTPUT_FIELDS)
    timestamp = _parse_number(row, "timestamp")
    arrival = None if timestamp is None else timestamp / 1000
    output_tokens = None if output is None else max(1, round(output))
    prompts = tuple(_parse_prompts(row, output_tokens))
    input_length = _parse_number(row, "input_length")
    if not prompts and not input_length:
        raise ValueError("a request needs prompt, messages or input_length")
    ids: object = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(
        isinstance(id, int) for id in cast("list[object]", ids)
    ):
        raise ValueError("hash_ids is not a list of integers")
    return TraceRow(
        prompts=prompts,
        input_length=round(input_length or 0),
        hash_ids=tuple(cast("list[int]", ids)),
        output_tokens=output_tokens,
        arrival=arrival,
    )


def _parse_prompts(row: Mapping[str, Any], output_tokens: int | None) -> Iterator[BenchPrompt]:
    """Yields one prompt per recorded assistant message, and one for the messages after the last."""
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError("prompt is not a string")
        yield BenchPrompt(text=row["prompt"], output_tokens=output_tokens)
        return
    messages = _parse_objects(row, "messages")
    tools = _parse_objects(row, "tools")
    for end in range(1, len(messages) + 1):
        is_reply = end < len(messages) and messages[end].get("role") == "assistant"
        is_last = end == len(messages) and messages[-1].get("role") != "assistant"
        if is_reply or is_last:
            yield BenchPrompt(messages=messages[:end], tools=tools, output_tokens=output_tokens)


def _parse_objects(row: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], ...]:
    value: object = row.get(name, [])
    if not isinstance(value, list) or not all(
        isinstance(item, dict) for item in cast("list[object]", value)
    ):
        raise ValueError(f"{name} is not a list of objects")
    return tuple(cast("list[dict[str, Any]]", value))


def _parse_number(row: Mapping[str, Any], *names: str) -> float | None:
    """The first of these fields. Raises ValueError for a negative number or a different type."""
    for name in names:
        value: object = row.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} is not a number")
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is negative or not finite")
            return value
    return None
