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

from app.core.errors import AppError, ErrorKind, LibraryPanic, PanicGuard, mark_client_text
from app.core.model_files import ModelFiles
from app.core.requests import ChoiceGrammar, Grammar, JsonSchema, LarkGrammar, Regex
from app.core.thread_pools import CancelToken
from app.grammar.llguidance_backend import GrammarCompileError, compile_grammar, explain_error

# compiled grammars that are kept, and refusals. A grammar takes some hundred kB; 20 MB at worst
_MAX_CACHED = 32
# seconds that a request waits for its grammar. What limits the costs keeps it far below
_COMPILE_TIMEOUT = 10.0
# compilations at once; they take cores from the engine
_MAX_CONCURRENT = 2
# what Linux adds to the niceness of their threads
_THREAD_NICENESS = 10
# bytes of the stack of a compilation, because native code goes as deep as references are long. It
# is room, not memory: only what is touched is taken
_STACK_BYTES = 1 << 28

_KIND_NAMES = {
    JsonSchema: "JSON schema",
    Regex: "regular expression",
    ChoiceGrammar: "choice",
    LarkGrammar: "grammar",
}


class GrammarError(Exception):
    """A matcher can go no further. The message is a clause for whoever wrote the grammar."""


class GrammarTooComplexError(GrammarError):
    """A matcher can go no further, though each id was allowed: its grammar exceeds a limit of
    llguidance, so the request is at fault."""


# what llguidance says of an id that was not allowed, and of one that led beyond a limit
_TOKEN_NOT_ALLOWED = "doesn't satisfy the grammar"


class Matcher:
    """Where one answer is in its grammar.

    bitmask: one bit per id, in little-endian words of 32: the ids that may come next. An id that
    ends the sequence is among them where, and only where, the answer may end.
    done: nothing may follow but such an id. The sequence can end here without one.
    """

    def __init__(
        self,
        ll_matcher: LLMatcher,
        *,
        stop_ids: frozenset[int],
        eos_ids: frozenset[int],
        on_exhausted: Callable[[], None] | None = None,
    ) -> None:
        """stop_ids: those that end this answer. eos_ids: those that llguidance takes for ends,
        and so allows where the answer may end. on_exhausted: called before TooComplex is raised,
        because copies of `ll_matcher` share the lexer whose states are used up."""
        self._ll_matcher = ll_matcher
        self._on_exhausted = on_exhausted
        self._disallowed_ends = eos_ids - stop_ids
        self._extra_ends = stop_ids - eos_ids
        self._update()

    def accept(self, token: int) -> None:
        """The answer goes on, or ends, with this id. Raises GrammarError when it must not, or when
        the grammar turns out to be too complex; this object is dead then."""
        if token in self._extra_ends and self._ll_matcher.is_accepting():
            self.done = True
            return
        allowed = self.bitmask[token // 8] >> token % 8 & 1
        try:
            with PanicGuard():
                self._ll_matcher.consume_token(token)
        except LibraryPanic as panic:
            raise self._too_complex_error(f"panic: {panic}") from panic
        # llguidance also reports an exceeded limit as a token that does not satisfy the grammar
        if not allowed and self._ll_matcher.is_error():
            self.bitmask = bytes(len(self.bitmask))
            raise GrammarError(explain_error(self._ll_matcher.get_error()))
        self._update()

    def _update(self) -> None:
        try:
            with PanicGuard():
                self._read_state()
        except LibraryPanic as panic:
            raise self._too_complex_error(f"panic: {panic}") from panic

    def _read_state(self) -> None:
        allowed = self._ll_matcher.compute_bitmask()
        # a broken matcher also allows something: the end
        if self._ll_matcher.is_error():
            raise self._too_complex_error(self._ll_matcher.get_error())
        self.done = self._ll_matcher.is_stopped()
        allowed = _clear_bits(allowed, self._disallowed_ends) if self._disallowed_ends else allowed
        if self._extra_ends and self._ll_matcher.is_accepting():
            allowed = _set_bits(allowed, self._extra_ends)
        self.bitmask = allowed
        if not self.done and not any(self.bitmask):
            raise self._too_complex_error("NoExtensionBias")

    def _too_complex_error(self, error: str) -> GrammarTooComplexError:
        if self._on_exhausted is not None:
            self._on_exhausted()
        if _TOKEN_NOT_ALLOWED in error:
            error = "too many states"
        return GrammarTooComplexError(explain_error(error))


class _Compilation:
    """A grammar that is compiled, or waits for it, for all who asked for it. Its result is the
    matcher at its beginning, never to be moved from there."""

    def __init__(self, grammar: Grammar, caller: str) -> None:
        self.grammar = grammar
        self.caller = caller
        self.future: Future[LLMatcher] = Future()
        self.cancel_token = CancelToken()
        self.num_waiters = 0


class GrammarCompiler:
    """Compiles for one model, and remembers. May be used on any thread.

    tokenizer: its tokenizer.json. vocab: ids that may be sampled, 0 to vocab-1; at least those of
    the tokenizer. eos_ids: ids that end this model's answers, as far as they are known.
    """

    def __init__(self, tokenizer: Path, *, vocab: int, eos_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._vocab = vocab
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, _Compilation] = OrderedDict()
        self._queue: list[_Compilation] = []
        self._running: list[_Compilation] = []
        self._tokenizer_lock = threading.Lock()
        self._ll_tokenizer: LLTokenizer | None = None

    @staticmethod
    def for_model(files: ModelFiles) -> "GrammarCompiler":
        vocab = files.tokenizer_vocab_size or files.vocab_size
        named = next(files.read_token_ids("eos_token_id"), frozenset[int]())
        return GrammarCompiler(
            files.tokenizer_path, vocab=vocab, eos_ids=[id for id in named if id < vocab]
        )

    def preload_tokenizer(self) -> None:
        """Read the tokenizer now, beside the model's load. It takes a second for a large
        vocabulary, in which the interpreter is held: later, everyone's answers would wait."""
        threading.Thread(target=self._preload, name="grammar-tokenizer", daemon=True).start()

    async def compile_async(
        self, grammar: Grammar, stop_ids: frozenset[int], caller: str = ""
    ) -> Matcher:
        """As `compile`, without a thread of its own: a known grammar waits for nothing. Cancelling
        ends the compilation, unless another request waits for it."""
        compilation = self._enqueue(grammar, caller)
        try:
            await _wait_until_done(compilation.future, _COMPILE_TIMEOUT)
        except asyncio.CancelledError:
            self._stop_waiting(compilation)
            raise
        return self._build_matcher(compilation, stop_ids)

    def compile(self, grammar: Grammar, stop_ids: frozenset[int], caller: str = "") -> Matcher:
        """stop_ids: those of the job. caller: whose request it is; who has fewest compilations is
        next. Raises AppError(INVALID) for what is no grammar, or none that can be followed, with
        the keyword as `param`; AppError(BUSY) when others are compiled for too long;
        AppError(MODEL_FILES) when the tokenizer is of no use for any."""
        compilation = self._enqueue(grammar, caller)
        wait([compilation.future], timeout=_COMPILE_TIMEOUT)
        return self._build_matcher(compilation, stop_ids)

    def _enqueue(self, grammar: Grammar, caller: str) -> _Compilation:
        """To be followed by `_matcher` or `_leave`."""
        with self._lock:
            compilation = self._cache.get(grammar)
            if compilation is None:
                compilation = self._cache[grammar] = _Compilation(grammar, caller)
                self._queue.append(compilation)
                self._start_next()
            compilation.num_waiters += 1
            self._cache.move_to_end(grammar)
            while len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return compilation

    def _stop_waiting(self, compilation: _Compilation) -> None:
        """The request does not need it any more. Native code cannot be stopped, so a compilation
        that runs ends at its next step."""
        with self._lock:
            compilation.num_waiters -= 1
            if not compilation.num_waiters and not compilation.future.done():
                compilation.cancel_token.cancel()
                self._drop(compilation)

    def _build_matcher(self, compilation: _Compilation, stop_ids: frozenset[int]) -> Matcher:
        """Of a compilation that was waited for. Raises as `compile` does."""
        grammar = compilation.grammar
        name = _KIND_NAMES[type(grammar)]
        with self._lock:
            compilation.num_waiters -= 1
            if not compilation.future.done():
                if compilation in self._queue:
                    if not compilation.num_waiters:
                        self._drop(compilation)
                    busy = "the server is busy compiling other grammars; retry later"
                    raise AppError(ErrorKind.BUSY, busy, retry_after=int(_COMPILE_TIMEOUT))
                # it goes on: whoever sends it again may find it compiled
                slow = f"compiling this {name} took more than {_COMPILE_TIMEOUT:g} s: simplify it"
                raise AppError(ErrorKind.INVALID, slow, param=grammar.param)
            try:
                inner = compilation.future.result().deep_copy()
            except GrammarCompileError as refused:
                raise _to_app_error(refused) from refused
        assert self._ll_tokenizer is not None
        try:
            ends = frozenset(self._ll_tokenizer.eos_tokens)
            return Matcher(
                inner,
                stop_ids=stop_ids,
                eos_ids=ends,
                on_exhausted=partial(self._invalidate, compilation),
            )
        except GrammarError as error:
            message = f"invalid {name}: {mark_client_text(str(error))}"
            raise AppError(ErrorKind.INVALID, message, param=grammar.param) from error

    def _invalidate(self, compilation: _Compilation) -> None:
        """The next request for this grammar compiles it again."""
        with self._lock:
            self._drop(compilation)

    def _drop(self, compilation: _Compilation) -> None:
        """With the lock held. A running one keeps its thread until it ends."""
        if compilation in self._queue:
            self._queue.remove(compilation)
        if self._cache.get(compilation.grammar) is compilation:
            del self._cache[compilation.grammar]

    def _start_next(self) -> None:
        """With the lock held: who has fewest compilations that run, and of those the first."""
        while self._queue and len(self._running) < _MAX_CONCURRENT:
            running = Counter(compilation.caller for compilation in self._running)
            compilation = min(self._queue, key=lambda waiting: running[waiting.caller])
            self._queue.remove(compilation)
            self._running.append(compilation)
            self._start_thread(compilation)

    def _start_thread(self, compilation: _Compilation) -> None:
        """One that the process does not wait for when it ends."""
        ordinary = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(
                target=self._run_compilation, args=(compilation,), name="grammar", daemon=True
            ).start()
        finally:
            threading.stack_size(ordinary)

    def _run_compilation(self, compilation: _Compilation) -> None:
        _lower_priority()
        matcher: LLMatcher | None = None
        error: BaseException | None = None
        try:
            matcher = compile_grammar(
                compilation.grammar, self._tokenizer(), compilation.cancel_token
            )
        except BaseException as raised:
            error = raised
        with self._lock:
            self._running.remove(compilation)
            if error is not None and not isinstance(error, GrammarCompileError):
                # not the grammar's fault, so it may work the next time
                self._drop(compilation)
            self._start_next()
        if matcher is not None:
            compilation.future.set_result(matcher)
        else:
            compilation.future.set_exception(error)

    def _preload(self) -> None:
        # a tokenizer of no use is the error of the first request that needs it
        with suppress(AppError):
            self._tokenizer()

    def _tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._ll_tokenizer is None:
                self._ll_tokenizer = self._read_tokenizer()
            return self._ll_tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        try:
            # llguidance cannot do without an end: where there is none it guesses one
            with PanicGuard():
                return LLTokenizer(
                    self.tokenizer.read_text("utf-8"),
                    n_vocab=self._vocab,
                    eos_token=self._eos_ids or None,
                )
        except (LibraryPanic, OSError, ValueError) as error:
            message = (
                f"{self.tokenizer}: structured output does not support this tokenizer: {error}"
            )
            raise AppError(ErrorKind.MODEL_FILES, message) from error


def _lower_priority() -> None:
    """Of this thread: answers that are being generated come first. Linux alone has one for each
    thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_NICENESS)


async def _wait_until_done(result: Future[Any], seconds: float) -> None:
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


def _to_app_error(error: GrammarCompileError) -> AppError:
    name, start = _KIND_NAMES[type(error.grammar)], error.grammar.param
    at = f" at {'.'.join(error.path)}" if error.path else ""
    # keywords and names of properties too are the client's
    message = f"invalid {name}{mark_client_text(f'{at}: {error.reason}')}"
    param = ".".join((start, *error.path) if start else error.path)
    return AppError(ErrorKind.INVALID, message, param=param or None)


def _set_bits(allowed: bytes, ids: frozenset[int]) -> bytes:
    bits = bytearray(allowed)
    for id in ids:
        bits[id // 8] |= 1 << id % 8
    return bytes(bits)


def _clear_bits(allowed: bytes, ids: frozenset[int]) -> bytes:
    bits = bytearray(allowed)
    for id in ids:
        bits[id // 8] &= ~(1 << id % 8)
    return bytes(bits)
