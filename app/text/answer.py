"""Sampled tokens → the pieces of an answer that a client is shown.

Knows: detokenising, stop strings, and which tokens lie in what was shown. Must not know: where
tokens come from, events other than text. A stage like those of `stream.py`: `feed` and `flush`.
"""

from app.core.events import TextDelta, TokenLogprob, TopLogprob
from app.core.jobs import Token
from app.text.stream import Detokenizer, Found, StopFinder, VisibleTokens
from app.text.tokenizer import Tokenizer


class Answer:
    """The text of one job. stopped: a stop string was found, and nothing more is to be fed."""

    def __init__(
        self, tokenizer: Tokenizer, *, prompt: tuple[int, ...], stops: tuple[str, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopFinder(stops)
        self._visible = VisibleTokens()
        self._logprobs: list[TokenLogprob] = []
        self._told = 0  # tokens whose logprobs were given out
        self.stopped = False

    @property
    def visible_tokens(self) -> int:
        """Tokens that lie wholly in the text given out."""
        return self._visible.within(self._stops.shown)

    def feed(self, token: Token) -> TextDelta | None:
        """What may be shown now that this token is known."""
        text = self._detokenizer.feed(token.id)
        self._visible.feed(text, waiting=self._detokenizer.waiting)
        if token.logprob is not None:
            self._logprobs.append(self._scored(token, token.logprob))
        return self._delta(self._stops.feed(text), upto=None)

    def flush(self) -> TextDelta | None:
        """The rest, now that no token will follow."""
        found = self._stops.feed(self._detokenizer.flush())
        if found.stop is None:
            last = self._stops.flush()
            found = Found(text=found.text + last.text, stop=last.stop)
        return self._delta(found, upto=None if found.stop else len(self._logprobs))

    def _delta(self, found: Found, *, upto: int | None) -> TextDelta | None:
        """upto: how many logprobs may be told; None for those of the tokens in sight."""
        self.stopped = found.stop is not None
        if upto is None:
            upto = self.visible_tokens
        logprobs = tuple(self._logprobs[self._told : upto])
        if not found.text and not logprobs:
            return None
        self._told += len(logprobs)
        return TextDelta(text=found.text, logprobs=logprobs)

    def _scored(self, token: Token, logprob: float) -> TokenLogprob:
        return TokenLogprob(
            text=self._tokenizer.token_text(token.id),
            raw=self._tokenizer.token_bytes(token.id),
            logprob=logprob,
            top=tuple(
                TopLogprob(
                    text=self._tokenizer.token_text(id),
                    raw=self._tokenizer.token_bytes(id),
                    logprob=value,
                )
                for id, value in token.top
            ),
        )
