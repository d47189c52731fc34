"""Sampled tokens → the pieces of an answer that a client is shown.

Knows: detokenising, stop strings, the splitter of a chat family, and which tokens lie in what was
shown. Must not know: where tokens come from, how pieces are sent. A stage like those of
`stream.py`: `feed` and `flush`.

    id → Detokenizer → the model's stops → Splitter ┬ text → the request's stops → TextDelta
                                                    ├ reasoning → ReasoningDelta
                                                    └ calls → CallDelta
"""

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.core.events import CallDelta, ReasoningDelta, TextDelta, TokenLogprob, TopLogprob
from app.core.jobs import Token
from app.text.stream import Detokenizer, Found, StopFinder, VisibleTokens
from app.text.syntax.pieces import Arguments, Called, Piece, Said, Splitter, Thought
from app.text.tokenizer import Tokenizer

Delta = TextDelta | ReasoningDelta | CallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How one answer is read. stops: what ends the model's turns wherever it stands. asked: the
    request's stop strings, which end the text that the client sees; not in the first `min_tokens`
    tokens. shown: special tokens that are text. ids: whether the client wants the tokens' ids.
    parallel: whether more than one call may be read. call_id: see `ChatFamily.call_id`."""

    stops: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    min_tokens: int = 0
    shown: frozenset[int] = frozenset()
    ids: bool = False
    parallel: bool = True
    call_id: Callable[[int], str | None] = lambda _: None


class Answer:
    """The text of one choice. stopped: it is over, and nothing more is to be fed. stop: by which of
    the request's stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        choice: int,
        prompt: tuple[int, ...],
        reading: Reading,
        splitter: Splitter | None = None,
    ) -> None:
        """splitter: of the model's family; None where all is text."""
        self._tokenizer = tokenizer
        self._choice = choice
        self._reading = reading
        self._detokenizer = Detokenizer(tokenizer, prompt, shown=reading.shown)
        self._raw_stops = StopFinder(reading.stops)
        self._splitter = splitter
        self._shown = _Shown(reading.asked)
        self._visible = VisibleTokens()
        self._tokens: list[Token] = []  # whose logprobs or ids have not been told
        self._told = 0  # tokens whose have
        self._read = 0  # characters given to the splitter
        self._given = 0  # before which nothing was held back when the last were
        self._cut: int | None = None  # where the answer was cut off, when it was
        self._count = 0
        self.calls = 0
        self._call_ids: set[str] = set()
        self.reasoning_tokens = 0
        self.stopped = False
        self.stop: str | None = None

    @property
    def visible_tokens(self) -> int:
        """Tokens that lie wholly in what was given out."""
        return self._visible.within(self._settled if self._cut is None else self._cut)

    def feed(self, token: Token) -> list[Delta]:
        """What may be shown now that this token is known."""
        self._count += 1
        text = self._detokenizer.feed(token.id)
        self._visible.feed(text, waiting=self._detokenizer.waiting)
        if self._reading.ids or token.logprob is not None:
            self._tokens.append(token)
        deltas = self._take(self._raw_stops.feed(text))
        return self._with_tokens(deltas, self.visible_tokens)

    def flush(self) -> list[Delta]:
        """The rest, now that no token will follow."""
        deltas = self._take(self._raw_stops.feed(self._detokenizer.flush()))
        if not self.stopped:
            deltas += self._take(self._raw_stops.flush())
        if not self.stopped and self._splitter is not None:
            deltas += self._spoken(self._splitter.flush())
        if not self.stopped:
            deltas += self._close_text()
        return self._with_tokens(deltas, self.visible_tokens if self.stopped else self._count)

    @property
    def _settled(self) -> int:
        """Position before which nothing is held back, in all that the model wrote."""
        settled = self._read if self._splitter is None else self._splitter.settled
        return min(settled, self._shown.settled(settled))

    def _take(self, found: Found) -> list[Delta]:
        self._given = self._settled
        at, self._read = self._read, self._read + len(found.text)
        if self._splitter is None:
            pieces: list[Piece] = [Said(text=found.text, at=at)] if found.text else []
        else:
            pieces = self._splitter.feed(found.text)
        deltas = self._spoken(pieces)
        if found.stop is not None and not self.stopped:
            if self._splitter is not None:
                deltas += self._spoken(self._splitter.flush())
            deltas += [] if self.stopped else self._close_text()
            self._end(self._raw_stops.shown)
        return deltas

    def _spoken(self, pieces: list[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if self.stopped:
                break
            deltas += self._delta(piece)
        return deltas

    def _delta(self, piece: Piece) -> list[Delta]:
        match piece:
            case Said(text=text, at=at):
                if self._count <= self._reading.min_tokens:
                    return self._text(self._shown.pass_by(text, at))
                return self._text(self._shown.feed(text, at))
            case Thought(text=text):
                before = self._close_text()
                if self.stopped:
                    return before
                self.reasoning_tokens = self._count
                return [*before, ReasoningDelta(choice=self._choice, text=text)]
            case Called():
                before = self._close_text()
                if self.stopped:
                    return before
                if self.calls and not self._reading.parallel:
                    # it began behind all that had been given out before this text was read
                    self._end(self._given)
                    return before
                return [*before, self._called(piece)]
            case Arguments(text=text):
                return [CallDelta(choice=self._choice, call=self.calls - 1, arguments=text)]

    def _called(self, piece: Called) -> CallDelta:
        call, self.calls = self.calls, self.calls + 1
        id = piece.id or self._reading.call_id(call)
        if id is None or id in self._call_ids:  # a model that has lost its way repeats itself
            id = f"call_{os.urandom(12).hex()}"
        self._call_ids.add(id)
        return CallDelta(choice=self._choice, call=call, id=id, name=piece.name)

    def _close_text(self) -> list[Delta]:
        """Something else begins, or nothing: no stop string reaches beyond here."""
        return self._text(self._shown.flush())

    def _text(self, found: Found) -> list[Delta]:
        if found.stop is not None:
            self.stop = found.stop
            self._end(self._shown.cut)
        return [TextDelta(choice=self._choice, text=found.text)] if found.text else []

    def _end(self, at: int) -> None:
        self.stopped = True
        self._cut = at

    def _with_tokens(self, deltas: list[Delta], upto: int) -> list[Delta]:
        """What is to be told of the tokens that are in sight now goes with the first text."""
        told = self._tokens[: max(0, upto - self._told)]
        if not told:
            return deltas
        self._tokens = self._tokens[len(told) :]
        self._told += len(told)
        logprobs = tuple(
            scored(self._tokenizer, token) for token in told if token.logprob is not None
        )
        ids = tuple(token.id for token in told) if self._reading.ids else ()
        if deltas and isinstance(deltas[0], TextDelta):
            return [replace(deltas[0], logprobs=logprobs, ids=ids), *deltas[1:]]
        return [TextDelta(choice=self._choice, text="", logprobs=logprobs, ids=ids), *deltas]


class _Shown:
    """Text that the client sees → the same before the first of its stop strings, and where in all
    that the model wrote it ends. A stop string does not reach over a call or over reasoning."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._finder = StopFinder(stops)
        self._fed = 0  # characters given to the finder
        self._places: list[tuple[int, int]] = []  # of its pieces: position there, and in all
        self.cut = 0

    def settled(self, upto: int) -> int:
        """upto, unless text before it is held back."""
        return upto if self._finder.shown == self._fed else self._place(self._finder.shown)

    def pass_by(self, text: str, at: int) -> Found:
        """Text in which no stop is looked for."""
        return Found(text=self.flush().text + text)

    def feed(self, text: str, at: int) -> Found:
        if self._finder.shown == self._fed:
            self._places.clear()  # nothing before this piece is held back
        self._places.append((self._fed, at))
        self._fed += len(text)
        return self._found(self._finder.feed(text))

    def flush(self) -> Found:
        """No more text will come in this place."""
        found = self._found(self._finder.flush())
        self._finder = StopFinder(self._stops)
        self._places.clear()
        self._fed = 0
        return found

    def _found(self, found: Found) -> Found:
        if found.stop is not None:
            self.cut = self._place(self._finder.shown)
        return found

    def _place(self, position: int) -> int:
        """Where a character of this text stands in all that the model wrote."""
        number = bisect_right(self._places, position, key=lambda place: place[0]) - 1
        start, at = self._places[max(0, number)]
        return at + position - start


def scored(tokenizer: Tokenizer, token: Token) -> TokenLogprob:
    """A token with its alternatives, in text."""
    return TokenLogprob(
        text=tokenizer.token_text(token.id),
        raw=tokenizer.token_bytes(token.id),
        logprob=token.logprob,
        top=tuple(
            TopLogprob(text=tokenizer.token_text(id), raw=tokenizer.token_bytes(id), logprob=value)
            for id, value in token.top
        ),
    )
