"""From sampled ids to released text, piece by piece.

Knows: how to wait for whole characters, and for what may become a stop string. Must not know: who
samples, who reads, or that there is a network. Every stage has `feed` and `flush`; what it gives
out, joined, never depends on how its input was cut.
"""

import codecs
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.text.tokenizer import ByteDecoder, Tokenizer

_MAX_CHARACTER_BYTES = 4  # bytes of the longest character in UTF-8


class Detokenizer:
    """Sampled ids → text. Never half a character; joined, it is what decoding the prompt's ids and
    the sampled ids together adds to the prompt's text. So a space before the first word is kept
    after a prompt, and dropped at the start of a text where the tokenizer drops it; a character
    whose first bytes are the prompt's appears whole.

    Why not `tokenizers.decoders.DecodeStream` (0.23): it has no flush, so a text that ends in half
    a character is lost; after a bad byte in a run of byte tokens every further step raises
    "Invalid prefix encountered"; and a run of n bad bytes costs n² (4000 took two seconds).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        visible_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        """visible_special_ids: special tokens of the answer that are text nevertheless."""
        spelling = tokenizer.byte_decoder
        self._backend: _Backend = (
            _WordDetokenizer(tokenizer, prompt, visible_special_ids)
            if spelling is None
            else _ByteDetokenizer(tokenizer, spelling, prompt, visible_special_ids)
        )

    @property
    def has_partial_character(self) -> bool:
        """The last id fed ends within a character that has not been given out yet."""
        return self._backend.has_partial_character

    def feed(self, id: int) -> str:
        return self._backend.feed(id)

    def flush(self) -> str:
        """The rest: U+FFFD where the text ends within a character."""
        return self._backend.flush()


class _Backend(Protocol):
    @property
    def has_partial_character(self) -> bool: ...

    def feed(self, id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteDetokenizer:
    """For tokens that spell bytes: an incremental UTF-8 decoder, primed with the prompt's end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        byte_decoder: ByteDecoder,
        prompt: Sequence[int],
        visible_special_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._visible_special_ids = visible_special_ids
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for id in reversed(prompt):
            tail = self._visible_bytes(id) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        # All of it is the prompt's own text but the beginning of a last, unfinished character.
        self._utf8_decoder.decode(tail)
        self._strips_space = byte_decoder.strips_leading_space and not tail

    @property
    def has_partial_character(self) -> bool:
        return bool(self._utf8_decoder.getstate()[0])

    def feed(self, id: int) -> str:
        raw = (
            self._tokenizer.token_bytes(id)
            if id in self._visible_special_ids
            else self._visible_bytes(id)
        )
        if self._strips_space and raw:
            raw = raw.removeprefix(b" ")
            self._strips_space = False
        return self._utf8_decoder.decode(raw)

    def flush(self) -> str:
        return self._utf8_decoder.decode(b"", final=True)

    def _visible_bytes(self, id: int) -> bytes:
        return self._tokenizer.token_bytes(id) if self._tokenizer.is_visible(id) else b""


class _WordDetokenizer:
    """For decoders that join words: what a token adds to the text of the few before it.

    Such decoders look no further than at the neighbour: is there a word before this one, to be set
    apart from? The window is  given out | not yet  with at most `_MAX_CHARACTER_BYTES` ids on each
    side. Only if one knows byte tokens too, and a byte is bad, may the stream differ from the
    whole.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], visible_special_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._visible_special_ids = visible_special_ids
        self._context_ids: list[int] = []
        self._pending_ids: list[int] = []
        for id in reversed(prompt):
            if (
                len(self._context_ids) >= _MAX_CHARACTER_BYTES
                and not self._may_begin_mid_character()
            ):
                break
            if tokenizer.is_visible(id):
                self._context_ids.insert(0, id)

    @property
    def has_partial_character(self) -> bool:
        return bool(self._pending_ids)

    def feed(self, id: int) -> str:
        if id in self._visible_special_ids:
            return self._decode_marker(id)
        if not self._tokenizer.is_visible(id):
            return ""
        self._pending_ids.append(id)
        text = self._new_text()
        # U+FFFD at the end may be the first bytes of a character, but not after four tokens.
        if text.endswith("\ufffd") and len(self._pending_ids) < _MAX_CHARACTER_BYTES:
            return ""
        self._context_ids, self._pending_ids = self._pending_ids, []
        return text

    def flush(self) -> str:
        text, self._pending_ids = self._new_text(), []
        return text

    def _may_begin_mid_character(self) -> bool:
        """Whether the ids before may begin within a character, which spoils the bytes behind it for
        the library. A character's other bytes are no further away than three ids."""
        return len(
            self._context_ids
        ) < 2 * _MAX_CHARACTER_BYTES - 1 and "\ufffd" in self._tokenizer.decode(self._context_ids)

    def _decode_marker(self, id: int) -> str:
        """A special token, as it is written; words on its two sides are no neighbours."""
        text = self.flush() + self._tokenizer.token_text(id)
        self._context_ids = []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context_ids)
        after = self._tokenizer.decode(self._context_ids + self._pending_ids)
        pairs = enumerate(zip(before, after, strict=False))
        return after[next((place for place, (a, b) in pairs if a != b), len(before)) :]


class VisibleTokens:
    """How many sampled tokens lie wholly within the first characters of their text: those are the
    ones a client that was shown just these characters will send back."""

    def __init__(self) -> None:
        self._length = 0
        self._ends = array("q")  # a list of ints takes five times as much

    def feed(self, text: str, *, has_partial_character: bool) -> None:
        """What one token brought out of the Detokenizer, and the Detokenizer's state after it."""
        self._length += len(text)
        # Waiting bytes are the beginning of exactly one character, whatever becomes of them.
        self._ends.append(self._length + has_partial_character)

    def count_within(self, length: int) -> int:
        """length: characters of the text that were shown."""
        return bisect_right(self._ends, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """text: what may be shown now. matched_stop: the stop string that was found, and then all is
    over."""

    text: str
    matched_stop: str | None = None


class StopFinder:
    """Text → the text before the first stop string.

    The first is the one that starts first, and of two that start together the one that ends first.
    Held back is only what may still turn out to be a stop string or, when one was found, to be in
    another that started before it. With the stops "bcde" and "d":

        shown | held
            a | bcd      "d" is there, but "bcde" starts earlier and may come
            a | bcde     it came: "a" is all
          abc | dx       it did not: "abc" is all

    One Knuth-Morris-Pratt automaton per stop string: a character costs the same, amortised, however
    the text is cut and however a stop string repeats itself.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        """stop_strings: none of them empty."""
        self._automata = tuple(_KmpAutomaton(stop) for stop in stop_strings)
        self._held_text = ""  # the text  shown | held
        self._num_read = 0  # characters read
        self._match: tuple[int, str] | None = (
            None  # where the first stop so far starts; which it is
        )
        self.released = (
            0  # characters given out; after a hit, `VisibleTokens.count_within` wants this
        )

    def feed(self, text: str) -> StopResult:
        """Not to be called again once a stop was found."""
        self._held_text += text
        for character in text:
            self._step(character)
            if self._match is not None and self._match[0] <= self._open_match_start:
                return self._finish()
        return StopResult(text=self._release(self._open_match_start))

    def flush(self) -> StopResult:
        """No more text will come: the rest, or the stop that was waiting for an earlier one."""
        return self._finish()

    @property
    def _open_match_start(self) -> int:
        """Where the longest stop string that is not complete yet starts."""
        return self._num_read - max((automaton.matched for automaton in self._automata), default=0)

    def _step(self, character: str) -> None:
        self._num_read += 1
        for automaton in self._automata:
            if not automaton.step(character):
                continue
            start = self._num_read - len(automaton.stop)
            if self._match is None or start < self._match[0]:
                self._match = (start, automaton.stop)

    def _finish(self) -> StopResult:
        end, stop = self._match or (self._num_read, None)
        return StopResult(text=self._release(end), matched_stop=stop)

    def _release(self, end: int) -> str:
        text = self._held_text[: end - self.released]
        self._held_text = self._held_text[len(text) :]
        self.released = end
        return text


class _KmpAutomaton:
    """`matched`: the most characters at the end of the text that begin the stop string, but not
    all of it (Knuth, Morris, Pratt: Fast Pattern Matching in Strings, 1977)."""

    def __init__(self, stop: str) -> None:
        assert stop
        self.stop = stop
        self.matched = 0
        # borders[n]: the longest proper prefix of stop[:n] that also ends it. Only those up to
        # `matched` are looked at, so a stop string costs no more than the text that it is held
        # against, however long it is.
        self._borders = [0, 0]

    def step(self, character: str) -> bool:
        """Whether this character completes the stop string."""
        self.matched = self._next(self.matched, character)
        if self.matched < len(self.stop):
            if self.matched == len(self._borders):
                border = self._next(self._borders[-1], self.stop[self.matched - 1])
                self._borders.append(border)
            return False
        self.matched = 0  # whatever follows starts later, and so is not the first
        return True

    def _next(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._borders[matched]
        return matched + (self.stop[matched] == character)
