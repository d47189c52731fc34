"""Generated turns: the exact tokens of earlier outputs, for later prompts that contain them.

Knows: assistant turns, their generated token IDs, rendered prompts. Must not
know: templates, families, requests, the prefix cache.

A client sends a turn back in parts: reasoning, content, and calls with arguments that it may have
parsed and re-encoded. The rendered turn may then differ from the generated text (spaces, escapes,
the order of keys, trimmed white space), and the prefix cache hit ends at the first difference. This
module therefore keeps the generated token IDs. The generated text replaces the rendered turn if the
prompt before the turn is the same and both texts have the same meaning:

    then    [ prompt .............. ]{"city":"Oslo"}<|im_end|>
    now     [ the same characters . ]{"city": "Oslo"}<|im_end|>…     → the generated text

Losing a turn only affects performance.
"""

import hashlib
import json
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from app.core.events import TextDelta, ToolCallDelta
from app.core.requests import Message
from app.text.detokenizer import Detokenizer
from app.text.output import Delta
from app.text.syntax.output_parser import (
    Content,
    OutputPart,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from app.text.tokenizer import Tokenizer

# Limits per model: the total number of bytes, and the number of turns of one caller with the same
# parts.
_MAX_BYTES, _MAX_SAME_TURNS = 32 << 20, 16

# the maximum number of turns added between two prompts; older turns are dropped
_MAX_ADDED = 1024

# the overhead of a turn in bytes, in addition to its token IDs
_TURN_BYTES = 512

# the number of prompt tokens that may affect how the first generated token is decoded
_CONTEXT_IDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Characters [start, end) of the original text were replaced by `length` characters."""

    start: int
    end: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedText:
    """A text in which parts of an original were replaced. edits: in ascending order."""

    text: str
    edits: tuple[Edit, ...] = ()

    @staticmethod
    def replace(text: str, parts: Sequence[tuple[int, int, str]]) -> "EditedText":
        """Replaces the parts (start, end, replacement) of text, in ascending order."""
        pieces: list[str] = []
        done = 0
        for start, end, replacement in parts:
            pieces += (text[done:start], replacement)
            done = end
        return EditedText(
            text="".join((*pieces, text[done:])),
            edits=tuple(
                Edit(start=start, end=end, length=len(replacement))
                for start, end, replacement in parts
            ),
        )

    def map_position(self, position: int) -> int:
        """Converts a position in the original text. A position within a replaced part is mapped to
        the start of the part."""
        moved = 0
        for edit in self.edits:
            if edit.start < position < edit.end:
                return edit.start + moved
            if edit.end <= position:
                moved += edit.length - (edit.end - edit.start)
        return position + moved


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTurn:
    """A generated turn. prompt_length: the length of the rendered prompt in characters.
    prompt_digest: the digest of this prompt. token_ids: the generated token IDs, without the
    end-of-turn token. context_ids: the last token IDs of the prompt."""

    prompt_length: int
    prompt_digest: bytes
    token_ids: "array[int]"
    context_ids: tuple[int, ...]

    def decode(self, tokenizer: Tokenizer) -> str:
        """Returns the generated text, including special tokens."""
        if tokenizer.byte_decoder is not None:
            return b"".join(map(tokenizer.token_bytes, self.token_ids)).decode(errors="replace")
        # slower, but correct for decoders that join words
        shown = tokenizer.special_ids
        detokenizer = Detokenizer(tokenizer, self.context_ids, visible_special_ids=shown)
        return "".join(map(detokenizer.feed, self.token_ids)) + detokenizer.flush()

    @property
    def nbytes(self) -> int:
        return _TURN_BYTES + len(self.token_ids) * self.token_ids.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParts:
    """The parts of a turn that a client sends back, without the reasoning. calls: the name and
    arguments of each call."""

    content: str
    calls: tuple[tuple[str, str], ...]

    @staticmethod
    def of(message: Message) -> "TurnParts":
        calls = tuple((call.name, call.arguments) for call in message.tool_calls)
        return TurnParts(content=message.content or "", calls=calls)

    @property
    def key(self) -> bytes:
        """A digest of the calls, or of the content if there are no calls. It is equal for turns
        with the same meaning."""
        calls = [(name, normalize_json(text)) for name, text in self.calls]
        return hashlib.blake2b(_to_bytes(repr(calls or self.content.strip()))).digest()


class GeneratedTurns:
    """The generated turns of one model, per caller. When `max_bytes` is exceeded, the least
    recently used turns of the caller with the most bytes are evicted. Thread-safe."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._turns: dict[str, OrderedDict[bytes, list[GeneratedTurn]]] = {}
        self._nbytes: dict[str, int] = {}
        self._added = deque[tuple[str, TurnParts, GeneratedTurn]](maxlen=_MAX_ADDED)

    @property
    def nbytes(self) -> int:
        return sum(self._nbytes.values())

    def add(self, caller: str, parts: TurnParts, turn: GeneratedTurn) -> None:
        """Adds a turn. This takes only microseconds, because indexing is deferred to the next
        `find`."""
        self._added.append((caller, parts, turn))

    def find(self, caller: str, messages: Iterable[Message]) -> list[GeneratedTurn]:
        """Returns the turns that the messages may contain, sorted by prompt length. For the same
        prompt, the newest turn comes first."""
        keys = {TurnParts.of(m).key for m in messages if m.role == "assistant"}
        candidates: list[GeneratedTurn] = []
        with self._lock:
            while self._added:
                self._insert(*self._added.popleft())
            turns = self._turns.get(caller, OrderedDict())
            for key in keys & turns.keys():
                turns.move_to_end(key)
                candidates += reversed(turns[key])
        return sorted(candidates, key=lambda turn: turn.prompt_length)

    def _insert(self, caller: str, parts: TurnParts, turn: GeneratedTurn) -> None:
        turns = self._turns.setdefault(caller, OrderedDict())
        same = turns.setdefault(parts.key, [])
        turns.move_to_end(parts.key)
        same.append(turn)
        dropped = [same.pop(0)] if len(same) > _MAX_SAME_TURNS else []
        self._charge(caller, turn.nbytes - sum(old.nbytes for old in dropped))
        while self.nbytes > self._max_bytes:
            largest = max(self._nbytes, key=self._nbytes.__getitem__)
            _, oldest = self._turns[largest].popitem(last=False)
            self._charge(largest, -sum(old.nbytes for old in oldest))

    def _charge(self, caller: str, num_bytes: int) -> None:
        self._nbytes[caller] = self._nbytes.get(caller, 0) + num_bytes
        if not self._nbytes[caller]:
            del self._nbytes[caller], self._turns[caller]


class TurnRecorder:
    """Records the output of one choice. `feed` receives each token with its deltas. `finish` stores
    the turn; call it only if the model ended the turn."""

    def __init__(
        self,
        turns: GeneratedTurns,
        caller: str,
        *,
        prompt_length: int,
        prompt_digest: bytes,
        context_ids: Sequence[int],
    ) -> None:
        """prompt_length, prompt_digest, context_ids: see `GeneratedTurn`."""
        self._turns = turns
        self._caller = caller
        self._prompt_length = prompt_length
        self._prompt_digest = prompt_digest
        self._context_ids = tuple(context_ids[-_CONTEXT_IDS:])
        self._token_ids = array("I")
        self._content: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def feed(self, token_id: int, deltas: Sequence[Delta]) -> None:
        self._token_ids.append(token_id)
        if deltas:
            self._add(deltas)

    def finish(self, deltas: Iterable[Delta]) -> None:
        """deltas: the remaining deltas, which belong to no token."""
        self._add(deltas)
        turn = GeneratedTurn(
            prompt_length=self._prompt_length,
            prompt_digest=self._prompt_digest,
            token_ids=self._token_ids,
            context_ids=self._context_ids,
        )
        calls = tuple((name, "".join(arguments)) for name, arguments in self._calls)
        parts = TurnParts(content="".join(self._content), calls=calls)
        self._turns.add(self._caller, parts, turn)

    def _add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            match delta:
                case TextDelta(text=text):
                    self._content.append(text)
                case ToolCallDelta(name=name, arguments=arguments):
                    if name is not None:
                        self._calls.append((name, []))
                    self._calls[-1][1].append(arguments)
                case _:
                    pass


def digest_prompt(text: str) -> bytes:
    return hashlib.blake2b(_to_bytes(text), digest_size=16).digest()


def normalize_json(text: str) -> str:
    """Returns the same text for equal JSON values, and invalid JSON unchanged. Empty text is
    treated as an empty object."""
    try:
        return json.dumps(json.loads(text or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputMeaning:
    """The parts of an output, with surrounding white space removed and JSON normalized. calls: the
    name, ID and arguments of each call."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str | None, str], ...]

    @staticmethod
    def of(parts: Iterable[OutputPart]) -> "OutputMeaning":
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[tuple[ToolCallStart, list[str]]] = []
        for part in parts:
            match part:
                case Reasoning(text=text):
                    reasoning.append(text)
                case Content(text=text):
                    content.append(text)
                case ToolCallStart():
                    calls.append((part, []))
                case ToolCallArguments(text=text):
                    calls[-1][1].append(text)
        return OutputMeaning(
            reasoning="".join(reasoning).strip(),
            content="".join(content).strip(),
            calls=tuple(
                (start.name, start.id, normalize_json("".join(texts))) for start, texts in calls
            ),
        )


def restore_generated_text(
    text: str,
    turns: Iterable[GeneratedTurn],
    *,
    decode: Callable[[GeneratedTurn], str],
    turn_ends: Sequence[str],
    parse: Callable[[str, str], OutputMeaning],
) -> EditedText:
    """Replaces rendered turns of a prompt with their generated texts.

    turns: the result of `GeneratedTurns.find`. turn_ends: the texts that end an assistant turn.
    parse(prompt, output): parses the output for a prompt. Text is replaced only by text with the
    same meaning.
    """
    edits: list[Edit] = []
    hashed = hashlib.blake2b(digest_size=16)
    done = moved = 0  # characters in the digest; change in length due to edits so far
    settled = -1  # the start of the last turn that was found
    for turn in turns:
        start = turn.prompt_length
        if start == settled or not done <= start < len(text):
            continue
        hashed.update(_to_bytes(text[done:start]))
        done = start
        if hashed.copy().digest() != turn.prompt_digest:
            continue
        ends = (position for end in turn_ends if (position := text.find(end, start)) >= 0)
        end = min(ends, default=None)
        if end is None:
            continue
        rendered, generated = text[start:end], decode(turn)
        if rendered != generated and parse(text[:start], rendered) != parse(
            text[:start], generated
        ):
            continue
        settled = start
        if rendered == generated:
            continue
        edits.append(Edit(start=start - moved, end=end - moved, length=len(generated)))
        moved += len(generated) - len(rendered)
        text = text[:start] + generated + text[end:]
    return EditedText(text=text, edits=tuple(edits))


def _to_bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
