"""Grammars that an answer must follow: which ids may come next.

Knows: llguidance, the model's tokenizer.json, ids, what was compiled before. Must not know:
tensors, sequences, what a caller is.

Compiling needs no device and may take a second, so it is done before the engine hears of a job, on
a thread of its own; from then on the `Matcher` is the engine's. Everything that can go wrong with
it goes wrong in `compile` or in `accept`, never while others are sampled beside it. Known grammars
wait for no thread, and a compilation that no request waits for is given up.
"""

import asyncio
import os
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from app.core.errors import AppError, Kind, LibraryPanic, PanicGuard, quote_client
from app.core.files import ModelFiles
from app.core.requests import Choice, Grammar, JsonSchema, Lark, Regex
from app.core.workers import CancelToken
from app.engine.compiling import Refusal, compiled, reason_of

# compiled grammars that are kept, and refusals. A grammar takes some hundred kB; 20 MB at worst
_KEPT = 32
# seconds that a request waits for its grammar. What limits the costs keeps it far below
_PATIENCE = 10.0
# compilations at once; they take cores from the engine
_AT_ONCE = 2
# what Linux adds to the niceness of their threads
_NICE = 10
# bytes of the stack of a compilation, because native code goes as deep as references are long. It
# is room, not memory: only what is touched is taken
_STACK = 1 << 28

_NAMES = {
    JsonSchema: "JSON schema",
    Regex: "regular expression",
    Choice: "choice",
    Lark: "grammar",
}


class GrammarError(Exception):
    """A matcher can go no further. The message is a clause for whoever wrote the grammar."""


class TooComplex(GrammarError):
    """A matcher can go no further, though each id was allowed: its grammar exceeds a limit of
    llguidance, so the request is at fault."""


# what llguidance says of an id that was not allowed, and of one that led beyond a limit
_NOT_ALLOWED = "doesn't satisfy the grammar"


class Matcher:
    """Where one answer is in its grammar.

    allowed: one bit per id, in little-endian words of 32: the ids that may come next. An id that
    ends the sequence is among them where, and only where, the answer may end.
    done: nothing may follow but such an id. The sequence can end here without one.
    """

    def __init__(
        self,
        inner: LLMatcher,
        *,
        stop_ids: frozenset[int],
        known_ends: frozenset[int],
        on_exhausted: Callable[[], None] | None = None,
    ) -> None:
        """stop_ids: those that end this answer. known_ends: those that llguidance takes for ends,
        and so allows where the answer may end. on_exhausted: called before TooComplex is raised,
        because copies of `inner` share the lexer whose states are used up."""
        self._inner = inner
        self._on_exhausted = on_exhausted
        self._hidden = known_ends - stop_ids
        self._unknown = stop_ids - known_ends
        self._look()

    def accept(self, token: int) -> None:
        """The answer goes on, or ends, with this id. Raises GrammarError when it must not, or when
        the grammar turns out to be too complex; this object is dead then."""
        if token in self._unknown and self._inner.is_accepting():
            self.done = True
            return
        allowed = self.allowed[token // 8] >> token % 8 & 1
        try:
            with PanicGuard():
                self._inner.consume_token(token)
        except LibraryPanic as panic:
            raise self._too_complex(f"panic: {panic}") from panic
        # llguidance also reports an exceeded limit as a token that does not satisfy the grammar
        if not allowed and self._inner.is_error():
            self.allowed = bytes(len(self.allowed))
            raise GrammarError(reason_of(self._inner.get_error()))
        self._look()

    def _look(self) -> None:
        try:
            with PanicGuard():
                self._read_state()
        except LibraryPanic as panic:
            raise self._too_complex(f"panic: {panic}") from panic

    def _read_state(self) -> None:
        allowed = self._inner.compute_bitmask()
        # a broken matcher also allows something: the end
        if self._inner.is_error():
            raise self._too_complex(self._inner.get_error())
        self.done = self._inner.is_stopped()
        allowed = _without(allowed, self._hidden) if self._hidden else allowed
        if self._unknown and self._inner.is_accepting():
            allowed = _with(allowed, self._unknown)
        self.allowed = allowed
        if not self.done and not any(self.allowed):
            raise self._too_complex("NoExtensionBias")

    def _too_complex(self, error: str) -> TooComplex:
        if self._on_exhausted is not None:
            self._on_exhausted()
        if _NOT_ALLOWED in error:
            error = "too many states"
        return TooComplex(reason_of(error))


class _Compilation:
    """A grammar that is compiled, or waits for it, for all who asked for it. Its result is the
    matcher at its beginning, never to be moved from there."""

    def __init__(self, grammar: Grammar, caller: str) -> None:
        self.grammar = grammar
        self.caller = caller
        self.result: Future[LLMatcher] = Future()
        self.token = CancelToken()
        self.waiting = 0


class Grammars:
    """Compiles for one model, and remembers. May be used on any thread.

    tokenizer: its tokenizer.json. vocab: ids that may be sampled, 0 to vocab-1; at least those of
    the tokenizer. ends: ids that end this model's answers, as far as they are known.
    """

    def __init__(self, tokenizer: Path, *, vocab: int, ends: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._vocab = vocab
        self._ends = sorted(ends)
        self._lock = threading.Lock()
        self._known: OrderedDict[Grammar, _Compilation] = OrderedDict()
        self._queue: list[_Compilation] = []
        self._running: list[_Compilation] = []
        self._making = threading.Lock()
        self._made: LLTokenizer | None = None

    @staticmethod
    def of(files: ModelFiles) -> "Grammars":
        vocab = files.tokens or files.vocab_size
        named = next(files.configured_ids("eos_token_id"), frozenset[int]())
        return Grammars(files.tokenizer, vocab=vocab, ends=[id for id in named if id < vocab])

    def start(self) -> None:
        """Read the tokenizer now, beside the model's load. It takes a second for a large
        vocabulary, in which the interpreter is held: later, everyone's answers would wait."""
        threading.Thread(target=self._warm, name="grammar-tokenizer", daemon=True).start()

    async def matcher(
        self, grammar: Grammar, stop_ids: frozenset[int], caller: str = ""
    ) -> Matcher:
        """As `compile`, without a thread of its own: a known grammar waits for nothing. Cancelling
        ends the compilation, unless another request waits for it."""
        compilation = self._request(grammar, caller)
        try:
            await _settled(compilation.result, _PATIENCE)
        except asyncio.CancelledError:
            self._leave(compilation)
            raise
        return self._matcher(compilation, stop_ids)

    def compile(self, grammar: Grammar, stop_ids: frozenset[int], caller: str = "") -> Matcher:
        """stop_ids: those of the job. caller: whose request it is; who has fewest compilations is
        next. Raises AppError(INVALID) for what is no grammar, or none that can be followed, with
        the keyword as `param`; AppError(BUSY) when others are compiled for too long;
        AppError(MODEL_FILES) when the tokenizer is of no use for any."""
        compilation = self._request(grammar, caller)
        wait([compilation.result], timeout=_PATIENCE)
        return self._matcher(compilation, stop_ids)

    def _request(self, grammar: Grammar, caller: str) -> _Compilation:
        """To be followed by `_matcher` or `_leave`."""
        with self._lock:
            compilation = self._known.get(grammar)
            if compilation is None:
                compilation = self._known[grammar] = _Compilation(grammar, caller)
                self._queue.append(compilation)
                self._start_next()
            compilation.waiting += 1
            self._known.move_to_end(grammar)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return compilation

    def _leave(self, compilation: _Compilation) -> None:
        """The request does not need it any more. Native code cannot be stopped, so a compilation
        that runs ends at its next step."""
        with self._lock:
            compilation.waiting -= 1
            if not compilation.waiting and not compilation.result.done():
                compilation.token.cancel()
                self._give_up(compilation)

    def _matcher(self, compilation: _Compilation, stop_ids: frozenset[int]) -> Matcher:
        """Of a compilation that was waited for. Raises as `compile` does."""
        grammar = compilation.grammar
        name = _NAMES[type(grammar)]
        with self._lock:
            compilation.waiting -= 1
            if not compilation.result.done():
                if compilation in self._queue:
                    if not compilation.waiting:
                        self._give_up(compilation)
                    busy = "the server is busy compiling other grammars; retry later"
                    raise AppError(Kind.BUSY, busy, retry_after=int(_PATIENCE))
                # it goes on: whoever sends it again may find it compiled
                slow = f"compiling this {name} took more than {_PATIENCE:g} s: simplify it"
                raise AppError(Kind.INVALID, slow, param=grammar.at)
            try:
                inner = compilation.result.result().deep_copy()
            except Refusal as refused:
                raise _invalid(refused) from refused
        assert self._made is not None
        try:
            ends = frozenset(self._made.eos_tokens)
            return Matcher(
                inner,
                stop_ids=stop_ids,
                known_ends=ends,
                on_exhausted=partial(self._forget, compilation),
            )
        except GrammarError as error:
            message = f"invalid {name}: {quote_client(str(error))}"
            raise AppError(Kind.INVALID, message, param=grammar.at) from error

    def _forget(self, compilation: _Compilation) -> None:
        """The next request for this grammar compiles it again."""
        with self._lock:
            self._give_up(compilation)

    def _give_up(self, compilation: _Compilation) -> None:
        """With the lock held. A running one keeps its thread until it ends."""
        if compilation in self._queue:
            self._queue.remove(compilation)
        if self._known.get(compilation.grammar) is compilation:
            del self._known[compilation.grammar]

    def _start_next(self) -> None:
        """With the lock held: who has fewest compilations that run, and of those the first."""
        while self._queue and len(self._running) < _AT_ONCE:
            running = Counter(compilation.caller for compilation in self._running)
            compilation = min(self._queue, key=lambda waiting: running[waiting.caller])
            self._queue.remove(compilation)
            self._running.append(compilation)
            self._start_thread(compilation)

    def _start_thread(self, compilation: _Compilation) -> None:
        """One that the process does not wait for when it ends."""
        ordinary = threading.stack_size(_STACK)
        try:
            threading.Thread(
                target=self._work, args=(compilation,), name="grammar", daemon=True
            ).start()
        finally:
            threading.stack_size(ordinary)

    def _work(self, compilation: _Compilation) -> None:
        _lower_priority()
        matcher: LLMatcher | None = None
        error: BaseException | None = None
        try:
            matcher = compiled(compilation.grammar, self._tokenizer(), compilation.token)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._running.remove(compilation)
            if error is not None and not isinstance(error, Refusal):
                # not the grammar's fault, so it may work the next time
                self._give_up(compilation)
            self._start_next()
        if matcher is not None:
            compilation.result.set_result(matcher)
        else:
            compilation.result.set_exception(error)

    def _warm(self) -> None:
        # a tokenizer of no use is the error of the first request that needs it
        with suppress(AppError):
            self._tokenizer()

    def _tokenizer(self) -> LLTokenizer:
        with self._making:
            if self._made is None:
                self._made = self._read_tokenizer()
            return self._made

    def _read_tokenizer(self) -> LLTokenizer:
        try:
            # llguidance cannot do without an end: where there is none it guesses one
            with PanicGuard():
                return LLTokenizer(
                    self.tokenizer.read_text("utf-8"),
                    n_vocab=self._vocab,
                    eos_token=self._ends or None,
                )
        except (LibraryPanic, OSError, ValueError) as error:
            message = (
                f"{self.tokenizer}: structured output does not support this tokenizer: {error}"
            )
            raise AppError(Kind.MODEL_FILES, message) from error


def _lower_priority() -> None:
    """Of this thread: answers that are being generated come first. Linux alone has one for each
    thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


async def _settled(result: Future[Any], seconds: float) -> None:
    """Returns when the result is there, or after so many seconds."""
    if result.done():
        return
    loop = asyncio.get_running_loop()
    settled = asyncio.Event()

    def notify(_: Future[Any]) -> None:
        # the loop may be closed when a compilation ends that was given up
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settled.set)

    result.add_done_callback(notify)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await settled.wait()


def _invalid(refused: Refusal) -> AppError:
    name, start = _NAMES[type(refused.grammar)], refused.grammar.at
    at = f" at {'.'.join(refused.path)}" if refused.path else ""
    # keywords and names of properties too are the client's
    message = f"invalid {name}{quote_client(f'{at}: {refused.reason}')}"
    param = ".".join((start, *refused.path) if start else refused.path)
    return AppError(Kind.INVALID, message, param=param or None)


def _with(allowed: bytes, ids: frozenset[int]) -> bytes:
    bits = bytearray(allowed)
    for id in ids:
        bits[id // 8] |= 1 << id % 8
    return bytes(bits)


def _without(allowed: bytes, ids: frozenset[int]) -> bytes:
    bits = bytearray(allowed)
    for id in ids:
        bits[id // 8] &= ~(1 << id % 8)
    return bytes(bits)
