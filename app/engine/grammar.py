"""Grammars that an answer must follow: which ids may come next.

Knows: llguidance, the model's tokenizer.json, ids, what was compiled before. Must not know:
tensors, sequences, who asked.

Compiling needs no device and may take a second, so it is done before the engine hears of a job, on
a thread of its own; from then on the `Matcher` is the engine's. Everything that can go wrong with
it goes wrong in `compile` or in `accept`, never while others are sampled beside it.
"""

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from app.core.errors import AppError, Kind, LibraryPanic, PanicGuard
from app.core.requests import Choice, Grammar, JsonSchema, Lark, Regex
from app.engine.compiling import Refusal, compiled, reason_of

# compiled grammars that are kept, and refusals. A grammar takes some hundred kB; 20 MB at worst
_KEPT = 32
# tokenizers, by what ends a text
_KEPT_TOKENIZERS = 4
# seconds that a request waits for its grammar. What limits the costs keeps it far below
_PATIENCE = 10.0
# compilations at once; they take cores from the engine
_AT_ONCE = 2
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


class Matcher:
    """Where one answer is in its grammar.

    allowed: one bit per id, in little-endian words of 32: the ids that may come next. An id that
    ends the sequence is among them where, and only where, the answer may end.
    done: nothing may follow but such an id. The sequence can end here without one.
    """

    def __init__(self, inner: LLMatcher, *, hidden: frozenset[int]) -> None:
        """hidden: ids that llguidance takes for ends, and nobody else does."""
        self._inner = inner
        self._hidden = hidden
        self._look()

    def accept(self, token: int) -> None:
        """The answer goes on, or ends, with this id. Raises GrammarError when it must not, or when
        the grammar turns out to be too complex; this object is dead then."""
        try:
            with PanicGuard():
                self._inner.consume_token(token)
        except LibraryPanic as panic:
            raise GrammarError(reason_of(f"panic: {panic}")) from panic
        self._look()

    def _look(self) -> None:
        try:
            with PanicGuard():
                self._read_state()
        except LibraryPanic as panic:
            raise GrammarError(reason_of(f"panic: {panic}")) from panic

    def _read_state(self) -> None:
        allowed = self._inner.compute_bitmask()
        # a broken matcher also allows something: the end
        if self._inner.is_error():
            raise GrammarError(reason_of(self._inner.get_error()))
        self.done = self._inner.is_stopped()
        self.allowed = _without(allowed, self._hidden) if self._hidden else allowed
        if not self.done and not any(self.allowed):
            raise GrammarError(reason_of("NoExtensionBias"))


class Grammars:
    """Compiles for one model, and remembers. May be called on any thread.

    tokenizer: its tokenizer.json, read when the first grammar is. vocab: ids that may be sampled, 0
    to vocab-1; at least those of the tokenizer.
    """

    def __init__(self, tokenizer: Path, *, vocab: int) -> None:
        self.tokenizer = tokenizer
        self._vocab = vocab
        self._lock = threading.Lock()
        self._known = OrderedDict[tuple[Grammar, frozenset[int]], Future[LLMatcher]]()
        # they take a second to make
        self._tokenizers = OrderedDict[frozenset[int], LLTokenizer]()
        self._making = threading.Lock()
        self._slots = threading.Semaphore(_AT_ONCE)

    def compile(self, grammar: Grammar, stop_ids: frozenset[int]) -> Matcher:
        """stop_ids: those of the job. Raises AppError(INVALID) for what is no grammar, or none that
        can be followed, with the keyword as `param`; AppError(BUSY) when others are compiled for
        too long; AppError(MODEL_FILES) when the tokenizer is of no use for any."""
        # seconds for a large vocabulary, once: they are not the grammar's
        tokenizer = self._tokenizer(stop_ids)
        future = self._compiling(grammar, stop_ids)
        name = _NAMES[type(grammar)]
        try:
            first = future.result(_PATIENCE)
        except Refusal as refused:
            raise _invalid(refused) from refused
        except (TimeoutError, CancelledError) as error:
            if future.cancel() or future.cancelled():
                busy = "the server is busy with other grammars; try again in a moment"
                raise AppError(Kind.BUSY, busy, retry_after=int(_PATIENCE)) from error
            message = f"this {name} takes more than {_PATIENCE:g} s to compile; make it simpler"
            raise AppError(Kind.INVALID, message, param=grammar.at) from error
        with self._lock, PanicGuard():
            inner = first.deep_copy()
        try:
            return Matcher(inner, hidden=frozenset(tokenizer.eos_tokens) - stop_ids)
        except GrammarError as error:
            message = f"this {name} cannot be followed: {error}"
            raise AppError(Kind.INVALID, message, param=grammar.at) from error

    def _compiling(self, grammar: Grammar, stop_ids: frozenset[int]) -> "Future[LLMatcher]":
        """The grammar's matcher at its beginning, never to be moved from there; perhaps still being
        made, for somebody else."""
        key = (grammar, stop_ids)
        with self._lock:
            future = self._known.get(key)
            if future is None or future.cancelled():
                future = self._known[key] = Future[LLMatcher]()
                self._start(key, future)
            self._known.move_to_end(key)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return future

    def _start(self, key: tuple[Grammar, frozenset[int]], future: "Future[LLMatcher]") -> None:
        """On a thread that ends the process does not wait for."""
        ordinary = threading.stack_size(_STACK)
        try:
            work = threading.Thread(
                target=self._work, args=(key, future), name="grammar", daemon=True
            )
            work.start()
        finally:
            threading.stack_size(ordinary)

    def _work(self, key: tuple[Grammar, frozenset[int]], future: "Future[LLMatcher]") -> None:
        grammar, stop_ids = key
        with self._slots:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(compiled(grammar, self._tokenizer(stop_ids)))
            except Refusal as refused:
                future.set_exception(refused)
            except BaseException as error:
                # not the grammar's fault, so it may work the next time
                with self._lock:
                    self._known.pop(key, None)
                future.set_exception(error)

    def _tokenizer(self, stop_ids: frozenset[int]) -> LLTokenizer:
        with self._making:
            if stop_ids not in self._tokenizers:
                self._tokenizers[stop_ids] = self._made(stop_ids)
            self._tokenizers.move_to_end(stop_ids)
            while len(self._tokenizers) > _KEPT_TOKENIZERS:
                self._tokenizers.popitem(last=False)
            return self._tokenizers[stop_ids]

    def _made(self, stop_ids: frozenset[int]) -> LLTokenizer:
        try:
            # llguidance cannot do without an end: where there is none it guesses one
            with PanicGuard():
                return LLTokenizer(
                    self.tokenizer.read_text("utf-8"),
                    n_vocab=self._vocab,
                    eos_token=sorted(stop_ids) or None,
                )
        except (LibraryPanic, OSError, ValueError) as error:
            message = f"{self.tokenizer} is not a tokenizer that grammars work with: {error}"
            raise AppError(Kind.MODEL_FILES, message) from error


def _invalid(refused: Refusal) -> AppError:
    name, start = _NAMES[type(refused.grammar)], refused.grammar.at
    at = f" at {'.'.join(refused.path)}" if refused.path else ""
    message = f"this {name} cannot be followed{at}: {refused.reason}"
    param = ".".join((start, *refused.path) if start else refused.path)
    return AppError(Kind.INVALID, message, param=param or None)


def _without(allowed: bytes, ids: frozenset[int]) -> bytes:
    bits = bytearray(allowed)
    for id in ids:
        bits[id // 8] &= ~(1 << id % 8)
    return bytes(bits)
