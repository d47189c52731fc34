"""One grammar of a request → one matcher of llguidance's, or the reason why not.

Knows: how llguidance wants each kind of grammar spelled, what it may spend. Must not know: threads,
what was compiled before, how masks are used.

A grammar may come from anybody. Everything that grows faster than its text is limited: before
llguidance sees it where that can be seen (`schema`, `pattern`, `lark`), in llguidance where it can
not. A few ids are tried out, because some limits are only found behind the first.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from app.core.errors import LibraryPanic, PanicGuard
from app.core.requests import Choice, Grammar, JsonSchema, Lark, Regex
from app.core.workers import CancelToken
from app.engine import lark
from app.engine.pattern import MOST_REPETITIONS, repetitions
from app.engine.schema import MOST_ENTRIES, MOST_TEXT, Refused, Schema, read
from app.engine.schema_fault import fault
from app.engine.schema_union import followable

# ids that are tried out
_TRIED = 8

# Items that llguidance may look at: in one row of its parser, and in all rows of one step, which
# are those that any token of the vocabulary leads to. A schema needs a few in a row for each
# optional property that may come next. With 151,669 tokens it needs few more in a step, but 230
# for each property where white space is free: 460,000 for the most that `schema` accepts. They
# cost little. An ambiguous grammar has as many, and each costs: with 2000 in a row a step takes
# seconds, in which no other answer of the model goes on.
_ROOMY = (30_000, 2_000_000)
_TIGHT = (500, 2_000)

# States of llguidance's lexer, beside one for each byte of the grammar: the names of a schema's
# properties take one for each of their bytes, and patterns, whose number of states has no bound,
# take the others. A state takes up to 1 kB. All answers that follow a grammar share its states.
_LEXER_STATES = 50_000

# characters at either end of what llguidance says
_SHOWN = 200

_UNSUPPORTED = re.compile(r'Unimplemented keys: \["([^"]*)"')
# where what follows is for whoever sees the grammar as llguidance does
_DRAWING = re.compile(r"<non-verbose/>|\n +\d+ \| |\n *while processing")
_WORDS = {
    "NoExtensionBias": "no token of this model is allowed next",
    "oneOf constraints": "its branches must be mutually exclusive: give each a required"
    " property with a different const, or use anyOf",
    "Too many items": "it allows too many continuations at one point: make more properties"
    " required, or make the grammar less ambiguous",
    "too many states": "its patterns need too many states: simplify them",
    "panic": "it is too large",
    "Unable to determine if regex": "its patterns are too complex in combination: remove one",
}


class Refusal(Refused):
    """Refused, and known which: of a composed grammar, the part that cannot be followed."""

    def __init__(self, cause: Refused, grammar: Grammar) -> None:
        super().__init__(cause.reason, cause.path)
        self.grammar = grammar


def compiled(
    grammar: Grammar, tokenizer: LLTokenizer, token: CancelToken | None = None
) -> LLMatcher:
    """At its beginning, its first mask computed. Raises Refusal; Cancelled soon after `token` is
    cancelled."""
    compiler = _Compiler(tokenizer, token or CancelToken())
    try:
        match grammar:
            case JsonSchema(text=text):
                return compiler.schema(read(text))
            case Regex(pattern=pattern):
                return compiler.regex(pattern)
            case Choice(options=options):
                return compiler.choice(options)
            case Lark():
                return compiler.lark(grammar)
    except Refusal:
        raise
    except UnicodeEncodeError:
        raise Refusal(Refused("it contains an unpaired surrogate"), grammar) from None
    except Refused as refused:
        raise Refusal(refused, grammar) from refused


def reason_of(error: str) -> str:
    """llguidance's words as a clause on one line, without its drawings."""
    for sign, words in _WORDS.items():
        if sign in error:
            return words
    unsupported = _UNSUPPORTED.search(error)
    if unsupported is not None:
        return f"{unsupported[1]} is not supported: remove it"
    clause = _DRAWING.split(error.replace("/$defs/whole", "").replace("json-schema:///", ""))[0]
    # expressions are quoted in full
    return " ".join(_middle_cut(clause).split())


def _middle_cut(text: str) -> str:
    """What is wrong is said at the end, after what it is wrong with."""
    if len(text) <= 2 * _SHOWN:
        return text
    return f"{text[:_SHOWN]} … {text[-_SHOWN:]}"


class _Compiler:
    def __init__(self, tokenizer: LLTokenizer, token: CancelToken) -> None:
        self._tokenizer = tokenizer
        self._token = token

    def schema(self, document: Schema) -> LLMatcher:
        made = self._schema(document)
        if isinstance(made, LLMatcher):
            return made
        raise fault(document, self._refusal, made)

    def regex(self, pattern: str) -> LLMatcher:
        if len(pattern) > lark.MOST_TEXT:
            raise Refused(f"it is longer than {lark.MOST_TEXT} characters")
        if repetitions(pattern) > MOST_REPETITIONS:
            raise Refused(f"it has more than {MOST_REPETITIONS} repetitions")
        return self._made(LLMatcher.grammar_from_regex(pattern))

    def choice(self, options: Sequence[str]) -> LLMatcher:
        if len(options) > MOST_ENTRIES or sum(map(len, options)) > MOST_TEXT:
            raise Refused(f"it has more than {MOST_ENTRIES} options or {MOST_TEXT} characters")
        spelled = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
        # the one character that may stand in JSON's strings as it is, and not in Lark's
        spelled = spelled.replace("\x7f", "\\u007f")
        return self._made(_spec(f"start: OPTION\nOPTION: {spelled}"))

    def lark(self, grammar: Lark) -> LLMatcher:
        try:
            # its schemas came out of the request by themselves, or a client wrote all of it
            texts = [lark.followable(grammar.text, compact=bool(grammar.parts))]
            if grammar.inner is not None:
                texts.append(lark.followable(grammar.inner.text))
            # only what stands in a request as it is can mean one text in many ways
            composed = grammar.parts and grammar.inner is None
            return self._made(_spec(*texts), _ROOMY if composed else _TIGHT)
        except Refused:
            for part in (*grammar.parts, grammar.inner):
                if part is not None:
                    compiled(part, self._tokenizer, self._token)
            raise

    def _refusal(self, document: Schema) -> str | None:
        made = self._schema(document)
        return made if isinstance(made, str) else None

    def _schema(self, document: Schema) -> LLMatcher | str:
        return self._tried(_dumped({"json_schema": followable(document)}), _ROOMY)

    def _made(self, spec: str, items: tuple[int, int] = _ROOMY) -> LLMatcher:
        made = self._tried(spec, items)
        if isinstance(made, str):
            raise Refused(made)
        return made

    def _tried(self, spec: str, items: tuple[int, int]) -> LLMatcher | str:
        """The matcher, or why there is none."""
        self._token.check()
        # llguidance's complaint about half a surrogate pair would tell nobody anything
        size = len(spec.encode())
        in_row, in_step = items
        limits = LLParserLimits(
            max_items_in_row=in_row,
            step_max_items=in_step,
            max_lexer_states=_LEXER_STATES + size,
            verbose_errors=False,
        )
        try:
            with PanicGuard():
                return self._begun(spec, limits)
        except LibraryPanic as panic:  # llguidance catches its own, where it expects them
            return reason_of(f"panic: {panic}")

    def _begun(self, spec: str, limits: LLParserLimits) -> LLMatcher | str:
        matcher = LLMatcher(self._tokenizer, spec, log_level=0, limits=limits)
        mask = matcher.compute_bitmask()
        trial = matcher.deep_copy()
        for _ in range(_TRIED):
            # a broken matcher also allows something: the end
            if trial.is_error():
                return reason_of(trial.get_error())
            id = _first(mask, self._tokenizer.eos_tokens)
            if trial.is_stopped() or id is None:
                break
            trial.consume_token(id)
            mask = trial.compute_bitmask()
        return matcher


def _spec(*texts: str) -> str:
    """The first refers to the second as @inner."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": text} for text in texts]
    for inner in grammars[1:]:
        inner["name"] = "inner"
    return _dumped(*grammars)


def _dumped(*grammars: Mapping[str, Any]) -> str:
    # a half of a surrogate pair stays one, and is found when it is encoded
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _first(mask: bytes, but: Sequence[int]) -> int | None:
    """The lowest id that is allowed, ends left out."""
    bits = int.from_bytes(mask, "little")
    for id in but:
        bits &= ~(1 << id)
    return (bits & -bits).bit_length() - 1 if bits else None
