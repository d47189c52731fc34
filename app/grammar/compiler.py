"""Compiles grammars, and computes the tokens that may come next.

Knows: llguidance, the model's tokenizer.json, token IDs, the cache of grammars. Must not know:
tensors, sequences, API keys.

Compilation needs no device and may take a second. It runs on a separate thread before a job is
submitted to the engine, which then owns the `Matcher`. All errors are raised in `compile` or
`accept`, so they never affect other sequences. Requests for a cached grammar do not wait for a
thread. A compilation is cancelled when no request waits for it.
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

# The maximum number of cached grammars, including rejected ones. A grammar takes a few hundred kB,
# so the cache takes at most 20 MB.
_MAX_CACHED = 32
# The timeout in seconds for compiling a grammar. The cost limits keep compilations far below it.
_COMPILE_TIMEOUT = 10.0
# the maximum number of concurrent compilations, because they take CPU time from the engine
_MAX_CONCURRENT = 2
# the nice increment of compilation threads on Linux
_THREAD_NICENESS = 10
# The stack size of a compilation in bytes. It is large because native code recurses through nested
# references. Only touched pages use memory.
_STACK_BYTES = 1 << 28

_KIND_NAMES = {
    JsonSchema: "JSON schema",
    Regex: "regular expression",
    ChoiceGrammar: "choice",
    LarkGrammar: "grammar",
}


class GrammarError(Exception):
    """The matcher cannot continue. The message is a clause for the author of the grammar."""


class GrammarTooComplexError(GrammarError):
    """The matcher cannot continue, although each token was allowed, because the grammar exceeds a
    limit of llguidance. This is a client error."""


# llguidance's error for a token that is not allowed, and for a token that exceeds a limit
_TOKEN_NOT_ALLOWED = "doesn't satisfy the grammar"


class Matcher:
    """The state of a grammar for one output.

    bitmask: the tokens that may come next, with one bit per token ID in little-endian words of 32
    bits. It contains end-of-sequence tokens if and only if the output may end. done: whether only
    an end-of-sequence token may follow. The sequence can also end without such a token.
    """

    def __init__(
        self,
        ll_matcher: LLMatcher,
        *,
        stop_ids: frozenset[int],
        eos_ids: frozenset[int],
        on_exhausted: Callable[[], None] | None = None,
    ) -> None:
        """stop_ids: the tokens that end this output. eos_ids: the tokens that llguidance treats as
        end-of-sequence tokens and allows wherever the output may end. on_exhausted: called before
        GrammarTooComplexError is raised, because all copies of `ll_matcher` share the lexer, whose
        states are exhausted."""
        self._ll_matcher = ll_matcher
        self._on_exhausted = on_exhausted
        self._disallowed_ends = eos_ids - stop_ids
        self._extra_ends = stop_ids - eos_ids
        self._update()

    def accept(self, token: int) -> None:
        """Advances by one token. Raises GrammarError if the token is not allowed, or if the grammar
        is too complex. After an error, the matcher must not be used again."""
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
        # a matcher in an error state still allows the end of the output
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
    """A queued or running compilation, shared by all requests for the grammar. The result is the
    matcher in its initial state, which is copied but never advanced."""

    def __init__(self, grammar: Grammar, caller: str) -> None:
        self.grammar = grammar
        self.caller = caller
        self.future: Future[LLMatcher] = Future()
        self.cancel_token = CancelToken()
        self.num_waiters = 0


class GrammarCompiler:
    """Compiles grammars for one model, and caches them. It is thread-safe.

    tokenizer: the path of the model's tokenizer.json. vocab: the number of tokens that may be
    sampled, at least the size of the tokenizer's vocabulary. Their IDs are 0 to vocab-1. eos_ids:
    the tokens that end the model's outputs, if known. read: returns the text of the tokenizer; None
    reads the file.
    """

    def __init__(
        self,
        tokenizer: Path,
        *,
        vocab: int,
        eos_ids: Collection[int] = (),
        read: Callable[[], str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._read = read or partial(tokenizer.read_text, "utf-8")
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
            files.tokenizer_path,
            vocab=vocab,
            eos_ids=[id for id in named if id < vocab],
            read=files.read_tokenizer,
        )

    def preload_tokenizer(self) -> None:
        """Reads the tokenizer while the model loads. For a large vocabulary, this holds the GIL for
        a second, which would delay all running outputs if it were done later."""
        threading.Thread(target=self._preload, name="grammar-tokenizer", daemon=True).start()

    async def compile_async(
        self, grammar: Grammar, stop_ids: frozenset[int], caller: str = ""
    ) -> Matcher:
        """Compiles a grammar like `compile`, without blocking the event loop. For a cached grammar,
        it returns immediately. If this coroutine is cancelled, the compilation is cancelled too,
        unless another request waits for it."""
        compilation = self._enqueue(grammar, caller)
        try:
            await _wait_until_done(compilation.future, _COMPILE_TIMEOUT)
        except asyncio.CancelledError:
            self._stop_waiting(compilation)
            raise
        return self._build_matcher(compilation, stop_ids)

    def compile(self, grammar: Grammar, stop_ids: frozenset[int], caller: str = "") -> Matcher:
        """Compiles a grammar, and returns the matcher in its initial state.

        stop_ids: the stop tokens of the job. caller: the caller of the request, for fair
        scheduling: the next compilation is started for the caller with the fewest running
        compilations.

        Raises AppError(INVALID), with the keyword as `param`, for an invalid or unsupported
        grammar. Raises AppError(BUSY) if compiling other grammars takes too long. Raises
        AppError(MODEL_FILES) if the tokenizer is not supported.
        """
        compilation = self._enqueue(grammar, caller)
        wait([compilation.future], timeout=_COMPILE_TIMEOUT)
        return self._build_matcher(compilation, stop_ids)

    def _enqueue(self, grammar: Grammar, caller: str) -> _Compilation:
        """Adds a waiting request. The caller must call `_build_matcher` or `_stop_waiting`
        afterwards."""
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
        """Removes a waiting request. Native code cannot be interrupted, so a running compilation
        stops at its next step."""
        with self._lock:
            compilation.num_waiters -= 1
            if not compilation.num_waiters and not compilation.future.done():
                compilation.cancel_token.cancel()
                self._drop(compilation)

    def _build_matcher(self, compilation: _Compilation, stop_ids: frozenset[int]) -> Matcher:
        """Waits for the compilation and returns the matcher. Raises the same errors as
        `compile`."""
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
                # the compilation continues, so a later request may find the result
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
        """Removes the compilation from the cache, so that the next request for this grammar
        compiles it again."""
        with self._lock:
            self._drop(compilation)

    def _drop(self, compilation: _Compilation) -> None:
        """Removes the compilation from the queue and the cache. The lock must be held. A running
        compilation keeps its thread until it ends."""
        if compilation in self._queue:
            self._queue.remove(compilation)
        if self._cache.get(compilation.grammar) is compilation:
            del self._cache[compilation.grammar]

    def _start_next(self) -> None:
        """Starts compilations for the callers with the fewest running compilations, in order of
        arrival. The lock must be held."""
        while self._queue and len(self._running) < _MAX_CONCURRENT:
            running = Counter(compilation.caller for compilation in self._running)
            compilation = min(self._queue, key=lambda waiting: running[waiting.caller])
            self._queue.remove(compilation)
            self._running.append(compilation)
            self._start_thread(compilation)

    def _start_thread(self, compilation: _Compilation) -> None:
        """Starts a daemon thread, so that the process can exit without waiting for it."""
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
                # not a grammar error, so the next attempt may succeed
                self._drop(compilation)
            self._start_next()
        if matcher is not None:
            compilation.future.set_result(matcher)
        else:
            compilation.future.set_exception(error)

    def _preload(self) -> None:
        # an unsupported tokenizer is reported by the first request that needs it
        with suppress(AppError):
            self._tokenizer()

    def _tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._ll_tokenizer is None:
                self._ll_tokenizer = self._read_tokenizer()
            return self._ll_tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        try:
            # llguidance requires an end-of-sequence token, and guesses one if none is given
            with PanicGuard():
                return LLTokenizer(
                    self._read(),
                    n_vocab=self._vocab,
                    eos_token=self._eos_ids or None,
                )
        except (LibraryPanic, OSError, ValueError) as error:
            message = (
                f"{self.tokenizer}: structured output does not support this tokenizer: {error}"
            )
            raise AppError(ErrorKind.MODEL_FILES, message) from error


def _lower_priority() -> None:
    """Lowers the priority of this thread, so that generation takes precedence. Only Linux supports
    per-thread priorities."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_NICENESS)


async def _wait_until_done(result: Future[Any], seconds: float) -> None:
    """Returns when the result is available, or after `seconds`."""
    if result.done():
        return
    loop = asyncio.get_running_loop()
    settled = asyncio.Event()

    def notify(_: Future[Any]) -> None:
        # the loop may already be closed when a cancelled compilation ends
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settled.set)

    result.add_done_callback(notify)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await settled.wait()


def _to_app_error(error: GrammarCompileError) -> AppError:
    name, start = _KIND_NAMES[type(error.grammar)], error.grammar.param
    if isinstance(error.grammar, JsonSchema) and error.grammar.generated:
        message = f"{start} is invalid: {mark_client_text(error.reason)}"
        return AppError(ErrorKind.INVALID, message, param=start)
    location = f" at {'.'.join(error.path)}" if error.path else ""
    # keywords and property names also come from the client
    message = f"invalid {name}{mark_client_text(f'{location}: {error.reason}')}"
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
