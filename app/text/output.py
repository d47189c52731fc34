"""Converts sampled tokens to deltas for the client.

Knows: detokenization, stop strings, the output parser of a chat family, the tokens in the released
text. Must not know: the engine, the network.

ChoiceOutputProcessor is a stage with `feed` and `flush`, like the stages in `detokenizer.py`:

    token → Detokenizer → the model's stops → OutputParser ┬ text → the request's stops → TextDelta
                                                           ├ reasoning → ReasoningDelta
                                                           └ calls → ToolCallDelta
"""

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.core.events import ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta, TopLogprob
from app.core.jobs import Token
from app.text.detokenizer import Detokenizer, StopFinder, StopResult, VisibleTokens
from app.text.syntax.output_parser import (
    Content,
    OutputParser,
    OutputPart,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from app.text.tokenizer import Tokenizer

Delta = TextDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The options for processing one output.

    model_stops: strings that end the model's turn at any position. stop_strings: the request's stop
    strings, which apply to client-visible text after the first `min_tokens` tokens. include_stop:
    whether the text includes the stop string or token that ended it. visible_special_ids: the
    special tokens that are output as text. return_token_ids: whether the client requested token
    IDs. parallel_tool_calls: whether more than one call may be parsed. make_call_id: see
    `ChatFamily.make_call_id`.
    """

    model_stops: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    visible_special_ids: frozenset[int] = frozenset()
    return_token_ids: bool = False
    parallel_tool_calls: bool = True
    make_call_id: Callable[[int], str | None] = lambda _: None


class ChoiceOutputProcessor:
    """Processes the output of one choice. stopped: whether the output has ended, after which no
    more tokens may be fed. matched_stop: the request's stop string that ended the output, or
    None."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        choice: int,
        prompt_ids: tuple[int, ...],
        options: OutputOptions,
        parser: OutputParser | None = None,
    ) -> None:
        """parser: the output parser of the model's family, or None if the whole output is text."""
        self._tokenizer = tokenizer
        self._choice = choice
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer, prompt_ids, visible_special_ids=options.visible_special_ids
        )
        self._model_stop_finder = StopFinder(options.model_stops)
        self._parser = parser
        self._stop_filter = _StopFilter(options.stop_strings, include_stop=options.include_stop)
        # whether no text can be held back
        self._is_plain = parser is None and not (options.model_stops or options.stop_strings)
        self._token_ends = VisibleTokens()
        self._pending_tokens: list[Token] = []  # tokens whose logprobs or IDs were not sent yet
        self._num_attached = 0  # number of tokens whose logprobs or IDs were sent
        self._parser_position = 0  # number of characters fed to the parser
        self._last_settled = 0  # the settled position before the last text
        self._cut_at: int | None = None  # the position at which the output was cut, if it was cut
        self._num_tokens = 0
        self.num_tool_calls = 0
        self._call_ids: set[str] = set()
        self.reasoning_tokens = 0
        self.stopped = False
        self.matched_stop: str | None = None

    @property
    def visible_tokens(self) -> int:
        """The number of tokens that are completely contained in the released text."""
        return self._token_ends.count_within(
            self._settled if self._cut_at is None else self._cut_at
        )

    def feed(self, token: Token) -> list[Delta]:
        """Adds a token. Returns the deltas that may be sent now."""
        self._num_tokens += 1
        text = self._detokenizer.feed(token.id)
        self._token_ends.feed(text, has_partial_character=self._detokenizer.has_partial_character)
        keeps_token = self._options.return_token_ids or token.logprob is not None
        if self._is_plain and not keeps_token:
            self._parser_position += len(text)
            return [TextDelta(choice=self._choice, text=text)] if text else []
        if keeps_token:
            self._pending_tokens.append(token)
        deltas = self._feed_parser(self._model_stop_finder.feed(text))
        return self._attach_tokens(deltas, self.visible_tokens) if self._pending_tokens else deltas

    def flush(self, stop_token_id: int | None = None) -> list[Delta]:
        """Ends the output. stop_token_id: the request's stop token that ended the output. Returns
        the remaining deltas."""
        end = ""
        if stop_token_id is not None and self._options.include_stop:
            end = self._detokenizer.feed(stop_token_id)
        end += self._detokenizer.flush()
        deltas = self._feed_parser(self._model_stop_finder.feed(end))
        if not self.stopped:
            deltas += self._feed_parser(self._model_stop_finder.flush())
        if not self.stopped and self._parser is not None:
            deltas += self._to_deltas(self._parser.flush())
        if not self.stopped:
            deltas += self._flush_text()
        return self._attach_tokens(
            deltas, self.visible_tokens if self.stopped else self._num_tokens
        )

    @property
    def _settled(self) -> int:
        """The position in the model's output before which no text is held back."""
        settled = self._parser_position if self._parser is None else self._parser.settled
        return min(settled, self._stop_filter.settled_before(settled))

    def _feed_parser(self, found: StopResult) -> list[Delta]:
        if not self._options.parallel_tool_calls:
            self._last_settled = self._settled  # where a second call would begin
        at, self._parser_position = self._parser_position, self._parser_position + len(found.text)
        if self._parser is None:
            pieces: list[OutputPart] = [Content(text=found.text, at=at)] if found.text else []
        else:
            pieces = self._parser.feed(found.text)
        deltas = self._to_deltas(pieces)
        if found.matched_stop is not None and not self.stopped:
            if self._parser is not None:
                deltas += self._to_deltas(self._parser.flush())
            deltas += [] if self.stopped else self._flush_text()
            self._stop_at(self._model_stop_finder.released)
        return deltas

    def _to_deltas(self, pieces: list[OutputPart]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if self.stopped:
                break
            deltas += self._to_delta(piece)
        return deltas

    def _to_delta(self, piece: OutputPart) -> list[Delta]:
        match piece:
            case Content(text=text, at=at):
                if self._num_tokens <= self._options.min_tokens:
                    return self._emit_text(self._stop_filter.pass_through(text, at))
                return self._emit_text(self._stop_filter.feed(text, at))
            case Reasoning(text=text):
                before = self._flush_text()
                if self.stopped:
                    return before
                self.reasoning_tokens = self._num_tokens
                return [*before, ReasoningDelta(choice=self._choice, text=text)]
            case ToolCallStart():
                before = self._flush_text()
                if self.stopped:
                    return before
                if self.num_tool_calls and not self._options.parallel_tool_calls:
                    # the call starts after all previously released text
                    self._stop_at(self._last_settled)
                    return before
                return [*before, self._start_tool_call(piece)]
            case ToolCallArguments(text=text):
                return [
                    ToolCallDelta(
                        choice=self._choice, call_index=self.num_tool_calls - 1, arguments=text
                    )
                ]

    def _start_tool_call(self, piece: ToolCallStart) -> ToolCallDelta:
        call, self.num_tool_calls = self.num_tool_calls, self.num_tool_calls + 1
        id = piece.id or self._options.make_call_id(call)
        if id is None or id in self._call_ids:  # models may repeat IDs
            id = f"call_{os.urandom(12).hex()}"
        self._call_ids.add(id)
        return ToolCallDelta(choice=self._choice, call_index=call, id=id, name=piece.name)

    def _flush_text(self) -> list[Delta]:
        """Ends a text part. A stop string cannot span two parts."""
        return self._emit_text(self._stop_filter.flush())

    def _emit_text(self, found: StopResult) -> list[Delta]:
        if found.matched_stop is not None:
            self.matched_stop = found.matched_stop
            self._stop_at(self._stop_filter.cut_at)
        return [TextDelta(choice=self._choice, text=found.text)] if found.text else []

    def _stop_at(self, at: int) -> None:
        self.stopped = True
        self._cut_at = at

    def _attach_tokens(self, deltas: list[Delta], limit: int) -> list[Delta]:
        """Attaches the data of the tokens before `limit` to the first text delta."""
        attached = self._pending_tokens[: max(0, limit - self._num_attached)]
        if not attached:
            return deltas
        self._pending_tokens = self._pending_tokens[len(attached) :]
        self._num_attached += len(attached)
        logprobs = tuple(
            build_token_logprob(self._tokenizer, token)
            for token in attached
            if token.logprob is not None
        )
        ids = tuple(token.id for token in attached) if self._options.return_token_ids else ()
        if deltas and isinstance(deltas[0], TextDelta):
            return [replace(deltas[0], logprobs=logprobs, token_ids=ids), *deltas[1:]]
        return [TextDelta(choice=self._choice, text="", logprobs=logprobs, token_ids=ids), *deltas]


class _StopFilter:
    """Cuts client-visible text at the first stop string, and computes the position of this cut in
    the model's output. A stop string cannot span a call or reasoning."""

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stop_strings = stops
        self._include_stop = include_stop
        self._finder = self._make_finder()
        self._num_fed = 0  # number of characters fed to the finder
        self._offsets: list[tuple[int, int]] = []  # pairs (position in fed text, in output)
        self.cut_at = 0

    def settled_before(self, upto: int) -> int:
        """Returns `upto`, or a smaller position if earlier text is held back."""
        return (
            upto
            if self._finder.released == self._num_fed
            else self._output_position(self._finder.released)
        )

    def pass_through(self, text: str, at: int) -> StopResult:
        """Passes text through without searching for stops."""
        return StopResult(text=self.flush().text + text)

    def feed(self, text: str, at: int) -> StopResult:
        if self._finder.released == self._num_fed:
            self._offsets.clear()  # nothing before this piece is held back
        self._offsets.append((self._num_fed, at))
        self._num_fed += len(text)
        return self._record_stop(self._finder.feed(text))

    def flush(self) -> StopResult:
        """Ends the current text part."""
        result = self._record_stop(self._finder.flush())
        self._finder = self._make_finder()
        self._offsets.clear()
        self._num_fed = 0
        return result

    def _make_finder(self) -> StopFinder:
        return StopFinder(self._stop_strings, include_stop=self._include_stop)

    def _record_stop(self, found: StopResult) -> StopResult:
        if found.matched_stop is not None:
            self.cut_at = self._output_position(self._finder.released)
        return found

    def _output_position(self, position: int) -> int:
        """Converts a position in this text to a position in the model's output."""
        number = bisect_right(self._offsets, position, key=lambda place: place[0]) - 1
        start, ids_position = self._offsets[max(0, number)]
        return ids_position + position - start


def build_token_logprob(tokenizer: Tokenizer, token: Token) -> TokenLogprob:
    """Converts a token and its alternatives to text."""
    return TokenLogprob(
        text=tokenizer.token_text(token.id),
        token_bytes=tokenizer.token_bytes(token.id),
        logprob=token.logprob,
        top_logprobs=tuple(
            TopLogprob(
                text=tokenizer.token_text(id),
                token_bytes=tokenizer.token_bytes(id),
                logprob=value,
                token_id=id,
            )
            for id, value in token.top_logprobs
        ),
        token_id=token.id,
    )
