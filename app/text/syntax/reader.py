"""A resumable text reader, so that parsers for streamed text can be written as if all text were
available.

Knows: the text received so far, the end of the text. Must not know: the syntax of any family.

A parser is a generator that reads from a `Reader` with `yield from`. If a result is not known yet,
the reader yields, and the caller resumes the parser when more text has arrived. Each syntax is
therefore implemented only once, top-down, and the result does not depend on how the text was split.

    consumed | known, not consumed | not known yet
             at                    added by `push`
"""

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")

# The maximum number of characters of a name or a number. This bounds the cost, because matching is
# repeated with every new chunk.
_MAX_MATCH_LENGTH = 4096

# the return type of parsers, which are suspended until the following text is known
Resumable = Generator[None, None, T]

OnText = Callable[[str, int], None]
"""A callback that receives a chunk of text and the position of its first character."""


class Reader:
    """Reads the text of one output. at: the position of the next character. ended: whether the text
    is complete. call_ends: the markers that end the current call even if its arguments are
    incomplete."""

    def __init__(self) -> None:
        self.at = 0
        self.ended = False
        self.call_ends: tuple[str, ...] = ()
        self._buffer = ""
        self._start = 0  # position of the first character of _known
        self._held: int | None = None
        self._last_mark = (0, 0)  # start and end of the last mark consumed by `read_until`

    def push(self, text: str) -> None:
        """Appends text."""
        assert not self.ended
        needed = self.at if self._held is None else min(self.at, self._held)
        self._buffer = self._buffer[needed - self._start :] + text
        self._start = needed

    def end(self) -> None:
        self.ended = True

    @property
    def ahead(self) -> str:
        """The known text that has not been consumed."""
        return self._buffer[self.at - self._start :]

    @property
    def settled(self) -> int:
        """The position before which the text is final. A consumed mark may still become text while
        the text after it is held."""
        settled = self.at if self._held is None else min(self.at, self._held)
        begins, ends = self._last_mark
        return begins if settled == ends else settled

    def take(self, count: int) -> str:
        """Consumes the next characters, which must be known."""
        text = self.ahead[:count]
        assert len(text) == count
        self.at += count
        return text

    def hold(self) -> int:
        """Keeps the text from the current position on until `release`, so that `rewind` can return
        to it."""
        self._held = self.at
        return self.at

    def rewind(self, at: int) -> None:
        """Returns to a position from `hold`."""
        assert self._held is not None
        assert self._held <= at <= self.at
        self.at = at
        self._held = None

    def release(self) -> None:
        self._held = None

    # methods that may wait for more text

    def wait_for_more(self) -> Resumable[bool]:
        """Waits for the next character. Returns False at the end of the text."""
        length = len(self.ahead)
        while len(self.ahead) == length and not self.ended:
            yield
        return len(self.ahead) > length

    def peek(self) -> Resumable[str]:
        """Returns the next character without consuming it, or "" at the end of the text."""
        while not self.ahead and not self.ended:
            yield
        return self.ahead[:1]

    def peek_any(self, *texts: str) -> Resumable[str | None]:
        """Returns the longest of the given texts that matches at the current position, without
        consuming it, or None if none matches."""
        longest = max(map(len, texts))
        while True:
            ahead = self.ahead[:longest]
            open_ = [text for text in texts if len(text) > len(ahead) and text.startswith(ahead)]
            if not open_ or self.ended:
                met = [text for text in texts if ahead.startswith(text)]
                return max(met, key=len, default=None)
            yield from self.wait_for_more()

    def accept(self, *texts: str) -> Resumable[str | None]:
        """Like `peek_any`, but consumes the text."""
        met = yield from self.peek_any(*texts)
        if met is not None:
            self.at += len(met)
        return met

    def skip_space(self) -> Resumable[str]:
        """Consumes all white space that follows, and returns it."""
        skipped = ""
        while (character := (yield from self.peek())) and character.isspace():
            count = len(self.ahead) - len(self.ahead.lstrip())
            skipped += self.take(count)
        return skipped

    def match(self, pattern: re.Pattern[str]) -> Resumable[str]:
        """Returns the longest match of the pattern without consuming it, or "" if there is no
        match. The pattern must also match every non-empty prefix of a matching text. A match that
        exceeds the length limit is rejected."""
        while True:
            match = pattern.match(self.ahead)
            if (match is None and self.ahead) or (match and match.end() > _MAX_MATCH_LENGTH):
                return ""
            if (match and match.end() < len(self.ahead)) or self.ended:
                return match[0] if match else ""
            yield from self.wait_for_more()

    def read_before(self, *marks: str, on_text: OnText) -> Resumable[str | None]:
        """Like `read_until`, but does not consume the mark."""
        mark = yield from self.read_until(*marks, on_text=on_text)
        self.at -= len(mark or "")
        return mark

    def read_until(self, *marks: str, on_text: OnText) -> Resumable[str | None]:
        """Outputs the text before the first of the given marks, and consumes the mark. Each chunk
        is output as soon as it cannot be part of a mark. Returns the mark, or None if the text ends
        without a mark. If two marks start at the same position, the longer mark is used."""
        pattern = re.compile("|".join(re.escape(m) for m in sorted(marks, key=len, reverse=True)))
        while True:
            ahead = self.ahead
            match = pattern.search(ahead) if marks else None
            begins = match.start() if match else len(ahead)
            # a longer mark may also start there
            open_ = len(ahead) if self.ended else find_partial_mark(ahead, marks)
            clear = min(begins, open_)
            if clear:
                at = self.at
                on_text(self.take(clear), at)
            if match and begins < open_:
                begins, self.at = self.at, self.at + len(match[0])
                self._last_mark = (begins, self.at)
                return match[0]
            if self.ended:
                return None
            yield from self.wait_for_more()

    def read_text_until(self, *marks: str) -> Resumable[tuple[str, str | None]]:
        """Like `read_until`, but returns the text together with the mark."""
        pieces: list[str] = []
        mark = yield from self.read_until(*marks, on_text=lambda text, _: pieces.append(text))
        return "".join(pieces), mark


def find_partial_mark(text: str, marks: Iterable[str]) -> int:
    """Returns the position near the end of the text at which a partial mark may start."""
    first = len(text)
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), len(text) - first, -1):
            if text.endswith(mark[:size]):
                first = len(text) - size
                break
    return first
