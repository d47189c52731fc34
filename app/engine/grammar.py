"""Grammars that an answer must follow: which ids may come next.

Knows: llguidance, the model's tokenizer.json, ids. Must not know: tensors, sequences, who asked.

Compiling needs no device and may take a second, so it is done before the engine hears of a job, on
whichever thread; from then on the `Matcher` is the engine's. Everything that can go wrong with it
goes wrong in `compile` or in `accept`, never while others are sampled beside it.
"""

import threading
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from app.core.errors import AppError, Kind
from app.core.requests import JsonSchema

# Between two parts of a JSON text: nothing, this, and nothing else. A model that has lost its way
# can write white space for ever otherwise. It is llama.cpp's rule (json-schema-to-grammar.cpp).
_SPACE = r" |\n{1,2}[ \t]{0,20}"

_NO_CHOICE = "no token of this model may come next"


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
        self._inner.consume_token(token)
        self._look()

    def _look(self) -> None:
        allowed = self._inner.compute_bitmask()
        # a broken matcher also allows something: the end
        if self._inner.is_error():
            error = _clause(self._inner.get_error())
            raise GrammarError(_NO_CHOICE if error == "NoExtensionBias" else error)
        self.done = self._inner.is_stopped()
        self.allowed = _without(allowed, self._hidden) if self._hidden else allowed
        if not self.done and not any(self.allowed):
            raise GrammarError(_NO_CHOICE)


class Grammars:
    """Compiles for one model. May be called on any thread.

    tokenizer: its tokenizer.json, read when the first grammar is. vocab: ids that may be sampled, 0
    to vocab-1; at least those of the tokenizer.
    """

    def __init__(self, tokenizer: Path, *, vocab: int) -> None:
        self._path = tokenizer
        self._vocab = vocab
        # by what ends a text, which is mostly the same for all; they take a second to make
        self._tokenizers: dict[frozenset[int], LLTokenizer] = {}
        self._making = threading.Lock()

    def compile(self, grammar: JsonSchema, stop_ids: frozenset[int]) -> Matcher:
        """stop_ids: those of the job. Raises AppError(INVALID) for what is no grammar, or none that
        can be followed, AppError(MODEL_FILES) when the tokenizer is of no use for any."""
        tokenizer = self._tokenizer(stop_ids)
        try:
            text = LLMatcher.grammar_from_json_schema(
                grammar.text, overrides={"whitespace_pattern": _SPACE, "lenient": False}
            )
            inner = LLMatcher(
                tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False)
            )
            return Matcher(inner, hidden=frozenset(tokenizer.eos_tokens) - stop_ids)
        except (ValueError, GrammarError) as error:
            message = f"this JSON schema cannot be followed: {_clause(str(error))}"
            raise AppError(Kind.INVALID, message) from error

    def _tokenizer(self, stop_ids: frozenset[int]) -> LLTokenizer:
        with self._making:
            if stop_ids not in self._tokenizers:
                self._tokenizers[stop_ids] = self._made(stop_ids)
            return self._tokenizers[stop_ids]

    def _made(self, stop_ids: frozenset[int]) -> LLTokenizer:
        try:
            # llguidance cannot do without an end: where there is none it guesses one
            return LLTokenizer(
                self._path.read_text("utf-8"),
                n_vocab=self._vocab,
                eos_token=sorted(stop_ids) or None,
            )
        except (OSError, ValueError) as error:
            message = f"{self._path} is not a tokenizer that grammars work with: {error}"
            raise AppError(Kind.MODEL_FILES, message) from error


def _without(allowed: bytes, ids: frozenset[int]) -> bytes:
    bits = bytearray(allowed)
    for id in ids:
        bits[id // 8] &= ~(1 << id % 8)
    return bytes(bits)


def _clause(error: str) -> str:
    """llguidance's words without its drawings, on one line."""
    return " ".join(error.split("<non-verbose/>")[0].split())
