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

from app.text.spelling import Spelling
from app.text.tokenizer import Tokenizer

_CHARACTER = 4  # bytes of the longest character in UTF-8


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
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """shown: special tokens of the answer that are text nevertheless."""
        spelling = tokenizer.spelling
        self._stage: _Stage = (
            _Words(tokenizer, prompt, shown)
            if spelling is None
            else _Bytes(tokenizer, spelling, prompt, shown)
        )

    @property
    def waiting(self) -> bool:
        """The last id fed ends within a character that has not been given out yet."""
        return self._stage.waiting

    def feed(self, id: int) -> str:
        return self._stage.feed(id)

    def flush(self) -> str:
        """The rest: U+FFFD where the text ends within a character."""
        return self._stage.flush()


class _Stage(Protocol):
    @property
    def waiting(self) -> bool: ...

    def feed(self, id: int) -> str: ...

    def flush(self) -> str: ...


class _Bytes:
    """For tokens that spell bytes: an incremental UTF-8 decoder, primed with the prompt's end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        spelling: Spelling,
        prompt: Sequence[int],
        shown: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for id in reversed(prompt):
            tail = self._visible(id) + tail
            if len(tail) >= _CHARACTER:
                break
        # All of it is the prompt's own text but the beginning of a last, unfinished character.
        self._utf8.decode(tail)
        self._strips_space = spelling.strips_space and not tail

    @property
    def waiting(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def feed(self, id: int) -> str:
        raw = self._tokenizer.token_bytes(id) if id in self._shown else self._visible(id)
        if self._strips_space and raw:
            raw = raw.removeprefix(b" ")
            self._strips_space = False
        return self._utf8.decode(raw)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _visible(self, id: int) -> bytes:
        return self._tokenizer.token_bytes(id) if self._tokenizer.shows(id) else b""


class _Words:
    """For decoders that join words: what a token adds to the text of the few before it.

    Such decoders look no further than at the neighbour: is there a word before this one, to be
    set apart from? The window is  given out | not yet  with at most `_CHARACTER` ids on each side.
    Only if one knows byte tokens too, and a byte is bad, may the stream differ from the whole.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], shown: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._given: list[int] = []
        self._fresh: list[int] = []
        for id in reversed(prompt):
            if len(self._given) >= _CHARACTER and not self._begins_amid():
                break
            if tokenizer.shows(id):
                self._given.insert(0, id)

    @property
    def waiting(self) -> bool:
        return bool(self._fresh)

    def feed(self, id: int) -> str:
        if id in self._shown:
            return self._marker(id)
        if not self._tokenizer.shows(id):
            return ""
        self._fresh.append(id)
        text = self._added()
        # U+FFFD at the end may be the first bytes of a character, but not after four tokens.
        if text.endswith("\ufffd") and len(self._fresh) < _CHARACTER:
            return ""
        self._given, self._fresh = self._fresh, []
        return text

    def flush(self) -> str:
        text, self._fresh = self._added(), []
        return text

    def _begins_amid(self) -> bool:
        """Whether the ids before may begin within a character, which spoils the bytes behind it for
        the library. A character's other bytes are no further away than three ids."""
        return len(self._given) < 2 * _CHARACTER - 1 and "\ufffd" in self._tokenizer.decode(
            self._given
        )

    def _marker(self, id: int) -> str:
        """A special token, as it is written; words on its two sides are no neighbours."""
        text = self.flush() + self._tokenizer.token_text(id)
        self._given = []
        return text

    def _added(self) -> str:
        before = self._tokenizer.decode(self._given)
        after = self._tokenizer.decode(self._given + self._fresh)
        pairs = enumerate(zip(before, after, strict=False))
        return after[next((place for place, (a, b) in pairs if a != b), len(before)) :]


class VisibleTokens:
    """How many sampled tokens lie wholly within the first characters of their text: those are the
    ones a client that was shown just these characters will send back."""

    def __init__(self) -> None:
        self._length = 0
        self._ends = array("q")  # a list of ints takes five times as much

    def feed(self, text: str, *, waiting: bool) -> None:
        """What one token brought out of the Detokenizer, and the Detokenizer's state after it."""
        self._length += len(text)
        # Waiting bytes are the beginning of exactly one character, whatever becomes of them.
        self._ends.append(self._length + waiting)

    def within(self, length: int) -> int:
        """length: characters of the text that were shown."""
        return bisect_right(self._ends, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """text: what may be shown now. stop: the stop string that was found, and then all is over."""

    text: str
    stop: str | None = None


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

    def __init__(self, stops: tuple[str, ...]) -> None:
        """stops: none of them empty."""
        self._automata = tuple(_Automaton(stop) for stop in stops)
        self._held = ""  # the text  shown | held
        self._read = 0  # characters read
        self._hit: tuple[int, str] | None = None  # where the first stop so far starts; which it is
        self.shown = 0  # characters given out; after a hit, `VisibleTokens.within` wants this

    def feed(self, text: str) -> Found:
        """Not to be called again once a stop was found."""
        self._held += text
        for character in text:
            self._step(character)
            if self._hit is not None and self._hit[0] <= self._open:
                return self._end()
        return Found(text=self._show(self._open))

    def flush(self) -> Found:
        """No more text will come: the rest, or the stop that was waiting for an earlier one."""
        return self._end()

    @property
    def _open(self) -> int:
        """Where the longest stop string that is not complete yet starts."""
        return self._read - max((automaton.matched for automaton in self._automata), default=0)

    def _step(self, character: str) -> None:
        self._read += 1
        for automaton in self._automata:
            if not automaton.step(character):
                continue
            start = self._read - len(automaton.stop)
            if self._hit is None or start < self._hit[0]:
                self._hit = (start, automaton.stop)

    def _end(self) -> Found:
        end, stop = self._hit or (self._read, None)
        return Found(text=self._show(end), stop=stop)

    def _show(self, end: int) -> str:
        text = self._held[: end - self.shown]
        self._held = self._held[len(text) :]
        self.shown = end
        return text


class _Automaton:
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
