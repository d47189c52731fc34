"""Converts sampled tokens to text that can be sent to the client.

Knows: incomplete characters, possible stop strings. Must not know: sampling, clients, the network.

Every stage has the methods `feed` and `flush`. The concatenated output of a stage never depends on
how its input was split.
"""

import codecs
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.text.tokenizer import ByteDecoder, Tokenizer

_MAX_CHARACTER_BYTES = 4  # the maximum length of a UTF-8 character in bytes


class Detokenizer:
    """Converts sampled tokens to text in complete characters.

    The concatenated output is the difference between decoding the prompt with and without the
    sampled tokens. A leading space after a prompt is therefore kept, while at the start of a text,
    it is dropped if the tokenizer drops it. If the first bytes of a character are in the prompt,
    the complete character is output.

    `tokenizers.decoders.DecodeStream` (0.23) is not used, for three reasons. It has no flush, so an
    incomplete character at the end is lost. After an invalid byte in a run of byte tokens, every
    further step raises "Invalid prefix encountered". A run of n invalid bytes costs O(n²): 4000
    bytes took two seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        visible_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        """visible_special_ids: the special tokens that are output as text."""
        byte_decoder = tokenizer.byte_decoder
        backend = (
            _WordDetokenizer(tokenizer, prompt, visible_special_ids)
            if byte_decoder is None
            else _ByteDetokenizer(tokenizer, byte_decoder, prompt, visible_special_ids)
        )
        self._backend = backend
        # Adds a token, and returns the text that is complete now. Bound directly, because it is
        # called for each token.
        self.feed: Callable[[int], str] = backend.feed

    @property
    def has_partial_character(self) -> bool:
        """Whether the last token ended within a character."""
        return self._backend.has_partial_character

    def flush(self) -> str:
        """Returns the remaining text: U+FFFD if the output ends within a character, otherwise
        ""."""
        return self._backend.flush()


class _ByteDetokenizer:
    """Decodes byte-level tokens with an incremental UTF-8 decoder. The decoder is initialized with
    the end of the prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        byte_decoder: ByteDecoder,
        prompt: Sequence[int],
        visible_special_ids: frozenset[int],
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._visible_bytes = tokenizer.visible_bytes
        self._visible_special_ids = visible_special_ids
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for id in reversed(prompt):
            tail = self._visible_bytes(id) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        # Discard the result, which is the prompt text. The decoder keeps the bytes of an incomplete
        # last character.
        self._utf8_decoder.decode(tail)
        self._strips_space = byte_decoder.strips_leading_space and not tail

    @property
    def has_partial_character(self) -> bool:
        return bool(self._utf8_decoder.getstate()[0])

    def feed(self, id: int) -> str:
        raw = self._token_bytes(id) if id in self._visible_special_ids else self._visible_bytes(id)
        if self._strips_space and raw:
            raw = raw.removeprefix(b" ")
            self._strips_space = False
        return self._utf8_decoder.decode(raw)

    def flush(self) -> str:
        return self._utf8_decoder.decode(b"", final=True)


class _WordDetokenizer:
    """Detokenizes with a word-based decoder. Outputs the text that a token adds to the text of the
    last few tokens.

    Such a decoder depends only on the previous token, to decide whether to insert a space between
    two words. The window is output
    pending, with at most `_MAX_CHARACTER_BYTES` tokens on each side. Streamed text can differ from
    fully decoded text only if the decoder also has byte tokens and a byte is invalid.
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
        # U+FFFD at the end may be an incomplete character, but not after four tokens.
        if text.endswith("\ufffd") and len(self._pending_ids) < _MAX_CHARACTER_BYTES:
            return ""
        self._context_ids, self._pending_ids = self._pending_ids, []
        return text

    def flush(self) -> str:
        text, self._pending_ids = self._new_text(), []
        return text

    def _may_begin_mid_character(self) -> bool:
        """Returns whether the previous tokens may start within a character, in which case the
        library would decode the following bytes incorrectly. A character spans at most three more
        tokens."""
        return len(
            self._context_ids
        ) < 2 * _MAX_CHARACTER_BYTES - 1 and "\ufffd" in self._tokenizer.decode(self._context_ids)

    def _decode_marker(self, id: int) -> str:
        """Returns the text of a special token, without joining it with adjacent words."""
        text = self.flush() + self._tokenizer.token_text(id)
        self._context_ids = []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context_ids)
        after = self._tokenizer.decode(self._context_ids + self._pending_ids)
        pairs = enumerate(zip(before, after, strict=False))
        return after[next((index for index, (a, b) in pairs if a != b), len(before)) :]


class VisibleTokens:
    """Counts the sampled tokens that are completely contained in a prefix of the output text. A
    client that received this prefix sends these tokens back in its next request."""

    def __init__(self) -> None:
        self._length = 0
        self._ends = array("q")  # a list of ints takes five times the memory

    def feed(self, text: str, *, has_partial_character: bool) -> None:
        """Adds the text of one token, and the state of the Detokenizer after this token."""
        self._length += len(text)
        # Pending bytes become exactly one character, complete or not.
        self._ends.append(self._length + has_partial_character)

    def count_within(self, length: int) -> int:
        """Returns the number of tokens within the first `length` characters of the output."""
        return bisect_right(self._ends, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """The result of feeding text to a StopFinder. text: the text that can be output now.
    matched_stop: the stop string that ended the output, or None."""

    text: str
    matched_stop: str | None = None


class StopFinder:
    """Cuts the text at the first stop string.

    The stop string with the earliest start wins; ties are broken by the earliest end. Text is held
    back while it is a partial match of a stop string. After a match, text is still held back while
    a stop string with an earlier start may match. For example, with the stop strings "bcde" and
    "d":

        output | held
             a | bcd      "d" was found, but "bcde" starts earlier and may follow
             a | bcde     "bcde" was found: the result is "a"
           abc | dx       "bcde" was not found: the result is "abc"

    Each stop string has its own Knuth-Morris-Pratt automaton. The amortized cost per character does
    not depend on how the text is split or on repetitions within a stop string.
    """

    def __init__(self, stop_strings: tuple[str, ...], *, include_stop: bool = False) -> None:
        """stop_strings: the non-empty stop strings. include_stop: whether the stop string is part
        of the output."""
        self._include_stop = include_stop
        self._automata = tuple(_KmpAutomaton(stop) for stop in stop_strings)
        self._held_text = ""  # the text: output | held
        self._num_read = 0  # number of characters read
        self._match: tuple[int, str] | None = (
            None  # start of the first stop string found so far, and its index
        )
        self.released = (
            0  # number of characters output; `VisibleTokens.count_within` needs it after a match
        )

    def feed(self, text: str) -> StopResult:
        """Adds text. This method must not be called after a stop string was found."""
        if not self._automata:
            self._num_read = self.released = self._num_read + len(text)
            return StopResult(text=text)
        self._held_text += text
        for character in text:
            self._step(character)
            if self._match is not None and self._match[0] <= self._open_match_start:
                return self._finish()
        return StopResult(text=self._release(self._open_match_start))

    def flush(self) -> StopResult:
        """Ends the text. Returns the remaining text, or a match that was held back in favor of an
        earlier match."""
        return self._finish()

    @property
    def _open_match_start(self) -> int:
        """Returns the start of the longest partial match."""
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
        if stop is not None and self._include_stop:
            end += len(stop)
        return StopResult(text=self._release(end), matched_stop=stop)

    def _release(self, end: int) -> str:
        text = self._held_text[: end - self.released]
        self._held_text = self._held_text[len(text) :]
        self.released = end
        return text


class _KmpAutomaton:
    """Searches for one stop string (Knuth, Morris, Pratt: Fast Pattern Matching in Strings, 1977).
    matched: the length of the longest suffix of the text that is a proper prefix of the stop
    string."""

    def __init__(self, stop: str) -> None:
        assert stop
        self.stop = stop
        self.matched = 0
        # borders[n]: the length of the longest proper prefix of stop[:n] that is also its suffix.
        # Computed only up to `matched`, so the cost of a long stop string is bounded by the length
        # of the text.
        self._borders = [0, 0]

    def step(self, character: str) -> bool:
        """Adds a character. Returns whether it completes the stop string."""
        self.matched = self._next(self.matched, character)
        if self.matched < len(self.stop):
            if self.matched == len(self._borders):
                border = self._next(self._borders[-1], self.stop[self.matched - 1])
                self._borders.append(border)
            return False
        self.matched = 0  # later matches also start later, so they cannot win
        return True

    def _next(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._borders[matched]
        return matched + (self.stop[matched] == character)
