"""An answer's text, read as it arrives by code that is written as if it were all there.

Knows: characters that are known, and that more may come. Must not know: any family's syntax.

A parser is a generator that asks a `Reader` for text with `yield from`; where the answer is not
known yet, the reader yields, and whoever feeds it resumes the parser once there is more. So a
syntax is written down once, from top to bottom, and reads the same text the same way however that
text was cut.

    taken | known, not taken | not known yet
          at                 whatever `push` brings
"""

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")

# characters of a name or a number. What is longer is matched again with every piece of it
_MAX_MATCH_LENGTH = 4096

# what `yield from` of it gives: suspended while the text ahead is not known
Resumable = Generator[None, None, T]

OnText = Callable[[str, int], None]
"""Takes a piece of text, and the position of its first character."""


class Reader:
    """at: position of the next character. ended: nothing will come behind what is known."""

    def __init__(self) -> None:
        self.at = 0
        self.ended = False
        self._buffer = ""
        self._start = 0  # position of the first character of _known
        self._held: int | None = None
        self._last_mark = (0, 0)  # where the last one that `until` took begins and ends

    def push(self, text: str) -> None:
        """More text is known."""
        assert not self.ended
        needed = self.at if self._held is None else min(self.at, self._held)
        self._buffer = self._buffer[needed - self._start :] + text
        self._start = needed

    def end(self) -> None:
        self.ended = True

    @property
    def ahead(self) -> str:
        """What is known and not taken."""
        return self._buffer[self.at - self._start :]

    @property
    def settled(self) -> int:
        """Position before which nothing will be read again, nor turn out to be text. A mark may,
        as long as what stands behind it is held."""
        settled = self.at if self._held is None else min(self.at, self._held)
        begins, ends = self._last_mark
        return begins if settled == ends else settled

    def take(self, count: int) -> str:
        """The next characters, which must be known."""
        text = self.ahead[:count]
        assert len(text) == count
        self.at += count
        return text

    def hold(self) -> int:
        """From here on nothing is forgotten: `rewind` may come back. Until `release`."""
        self._held = self.at
        return self.at

    def rewind(self, at: int) -> None:
        """Read again from a position that `hold` gave."""
        assert self._held is not None
        assert self._held <= at <= self.at
        self.at = at
        self._held = None

    def release(self) -> None:
        self._held = None

    # what waits

    def wait_for_more(self) -> Resumable[bool]:
        """Wait for a character that is not known yet. Whether one came."""
        known = len(self.ahead)
        while len(self.ahead) == known and not self.ended:
            yield
        return len(self.ahead) > known

    def peek(self) -> Resumable[str]:
        """The next character, not taken; "" at the end."""
        while not self.ahead and not self.ended:
            yield
        return self.ahead[:1]

    def peek_any(self, *texts: str) -> Resumable[str | None]:
        """Which of these the text goes on with, the longest that does; not taken."""
        longest = max(map(len, texts))
        while True:
            ahead = self.ahead[:longest]
            open_ = [text for text in texts if len(text) > len(ahead) and text.startswith(ahead)]
            if not open_ or self.ended:
                met = [text for text in texts if ahead.startswith(text)]
                return max(met, key=len, default=None)
            yield from self.wait_for_more()

    def accept(self, *texts: str) -> Resumable[str | None]:
        """As `meets`, and taken."""
        met = yield from self.peek_any(*texts)
        if met is not None:
            self.at += len(met)
        return met

    def skip_space(self) -> Resumable[str]:
        """White space, as much as there is."""
        taken = ""
        while (character := (yield from self.peek())) and character.isspace():
            count = len(self.ahead) - len(self.ahead.lstrip())
            taken += self.take(count)
        return taken

    def match(self, pattern: re.Pattern[str]) -> Resumable[str]:
        """The longest text ahead that the pattern matches, not taken; "" for none. The pattern goes
        on matching where more of what it matches comes; what gets too long for a name or a number
        is no match."""
        while True:
            match = pattern.match(self.ahead)
            if (match is None and self.ahead) or (match and match.end() > _MAX_MATCH_LENGTH):
                return ""
            if (match and match.end() < len(self.ahead)) or self.ended:
                return match[0] if match else ""
            yield from self.wait_for_more()

    def read_before(self, *marks: str, on_text: OnText) -> Resumable[str | None]:
        """As `until`, but the mark is not taken."""
        mark = yield from self.read_until(*marks, on_text=on_text)
        self.at -= len(mark or "")
        return mark

    def read_until(self, *marks: str, on_text: OnText) -> Resumable[str | None]:
        """Hand on the text before the first of these marks, each piece as soon as it can be no
        part of one, and take the mark too. Which it was; None when the text ended without one. Of
        two that begin together it is the longer."""
        found = re.compile("|".join(re.escape(m) for m in sorted(marks, key=len, reverse=True)))
        while True:
            ahead = self.ahead
            match = found.search(ahead) if marks else None
            begins = match.start() if match else len(ahead)
            # a longer mark may begin there, too
            open_ = len(ahead) if self.ended else _find_partial_mark(ahead, marks)
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
        """The text before the first mark, and which it was, as `until`."""
        pieces: list[str] = []
        mark = yield from self.read_until(*marks, on_text=lambda text, _: pieces.append(text))
        return "".join(pieces), mark


def _find_partial_mark(text: str, marks: Iterable[str]) -> int:
    """Where, at the end of the text, a mark may have begun that is longer than what is known."""
    first = len(text)
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), len(text) - first, -1):
            if text.endswith(mark[:size]):
                first = len(text) - size
                break
    return first
