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
from app.core.requests import ChoiceGrammar, Grammar, JsonSchema, LarkGrammar, Regex
from app.core.workers import CancelToken
from app.engine import lark
from app.engine.pattern import MAX_REPETITIONS, count_repetitions
from app.engine.schema import (
    MAX_ENTRIES,
    MAX_SCHEMA_LENGTH,
    Schema,
    UnsupportedGrammarError,
    parse_schema,
)
from app.engine.schema_fault import find_unsupported_keyword
from app.engine.schema_union import rewrite_schema

# ids that are tried out
_TRIAL_TOKENS = 8

# Items that llguidance may look at: in one row of its parser, and in all rows of one step, which
# are those that any token of the vocabulary leads to. A schema needs a few in a row for each
# optional property that may come next. With 151,669 tokens it needs few more in a step, but 230
# for each property where white space is free: 460,000 for the most that `schema` accepts. They
# cost little. An ambiguous grammar has as many, and each costs: with 2000 in a row a step takes
# seconds, in which no other answer of the model goes on.
_WIDE_ITEM_LIMITS = (30_000, 2_000_000)
_NARROW_ITEM_LIMITS = (500, 2_000)

# States of llguidance's lexer, beside one for each byte of the grammar: the names of a schema's
# properties take one for each of their bytes, and patterns, whose number of states has no bound,
# take the others. A state takes up to 1 kB. All answers that follow a grammar share its states.
_MAX_LEXER_STATES = 50_000

# characters at either end of what llguidance says
_ERROR_EDGE_CHARS = 200

_UNIMPLEMENTED_KEYWORD = re.compile(r'Unimplemented keys: \["([^"]*)"')
# where what follows is for whoever sees the grammar as llguidance does
_VERBOSE_PART = re.compile(r"<non-verbose/>|\n +\d+ \| |\n *while processing")
_EXPLANATIONS = {
    "NoExtensionBias": "no token of this model is allowed next",
    "oneOf constraints": "its branches must be mutually exclusive: give each a required"
    " property with a different const, or use anyOf",
    "Too many items": "it allows too many continuations at one point: make more properties"
    " required, or make the grammar less ambiguous",
    "too many states": "its patterns need too many states: simplify them",
    "panic": "it is too large",
    "Unable to determine if regex": "its patterns are too complex in combination: remove one",
}


class GrammarCompileError(UnsupportedGrammarError):
    """Refused, and known which: of a composed grammar, the part that cannot be followed."""

    def __init__(self, cause: UnsupportedGrammarError, grammar: Grammar) -> None:
        super().__init__(cause.reason, cause.path)
        self.grammar = grammar


def compile_grammar(
    grammar: Grammar, tokenizer: LLTokenizer, token: CancelToken | None = None
) -> LLMatcher:
    """At its beginning, its first mask computed. Raises Refusal; Cancelled soon after `token` is
    cancelled."""
    compiler = _Compiler(tokenizer, token or CancelToken())
    try:
        match grammar:
            case JsonSchema(text=text):
                return compiler.compile_schema(parse_schema(text))
            case Regex(pattern=pattern):
                return compiler.compile_regex(pattern)
            case ChoiceGrammar(options=options):
                return compiler.compile_choice(options)
            case LarkGrammar():
                return compiler.compile_lark(grammar)
    except GrammarCompileError:
        raise
    except UnicodeEncodeError:
        raise GrammarCompileError(
            UnsupportedGrammarError("it contains an unpaired surrogate"), grammar
        ) from None
    except UnsupportedGrammarError as refused:
        raise GrammarCompileError(refused, grammar) from refused


def explain_error(error: str) -> str:
    """llguidance's words as a clause on one line, without its drawings."""
    for sign, words in _EXPLANATIONS.items():
        if sign in error:
            return words
    unsupported = _UNIMPLEMENTED_KEYWORD.search(error)
    if unsupported is not None:
        return f"{unsupported[1]} is not supported: remove it"
    clause = _VERBOSE_PART.split(error.replace("/$defs/whole", "").replace("json-schema:///", ""))[
        0
    ]
    # expressions are quoted in full
    return " ".join(_elide_middle(clause).split())


def _elide_middle(text: str) -> str:
    """What is wrong is said at the end, after what it is wrong with."""
    if len(text) <= 2 * _ERROR_EDGE_CHARS:
        return text
    return f"{text[:_ERROR_EDGE_CHARS]} … {text[-_ERROR_EDGE_CHARS:]}"


class _Compiler:
    def __init__(self, tokenizer: LLTokenizer, token: CancelToken) -> None:
        self._tokenizer = tokenizer
        self._token = token

    def compile_schema(self, document: Schema) -> LLMatcher:
        made = self._try_schema(document)
        if isinstance(made, LLMatcher):
            return made
        raise find_unsupported_keyword(document, self._schema_error, made)

    def compile_regex(self, pattern: str) -> LLMatcher:
        if len(pattern) > lark.MAX_GRAMMAR_LENGTH:
            raise UnsupportedGrammarError(f"it is longer than {lark.MAX_GRAMMAR_LENGTH} characters")
        if count_repetitions(pattern) > MAX_REPETITIONS:
            raise UnsupportedGrammarError(f"it has more than {MAX_REPETITIONS} repetitions")
        return self._compile_spec(LLMatcher.grammar_from_regex(pattern))

    def compile_choice(self, options: Sequence[str]) -> LLMatcher:
        if len(options) > MAX_ENTRIES or sum(map(len, options)) > MAX_SCHEMA_LENGTH:
            raise UnsupportedGrammarError(
                f"it has more than {MAX_ENTRIES} options or {MAX_SCHEMA_LENGTH} characters"
            )
        spelled = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
        # the one character that may stand in JSON's strings as it is, and not in Lark's
        spelled = spelled.replace("\x7f", "\\u007f")
        return self._compile_spec(_lark_spec(f"start: OPTION\nOPTION: {spelled}"))

    def compile_lark(self, grammar: LarkGrammar) -> LLMatcher:
        try:
            # its schemas came out of the request by themselves, or a client wrote all of it
            texts = [lark.prepare_lark(grammar.text, compact=bool(grammar.parts))]
            if grammar.inner is not None:
                texts.append(lark.prepare_lark(grammar.inner.text))
            # only what stands in a request as it is can mean one text in many ways
            composed = grammar.parts and grammar.inner is None
            return self._compile_spec(
                _lark_spec(*texts), _WIDE_ITEM_LIMITS if composed else _NARROW_ITEM_LIMITS
            )
        except UnsupportedGrammarError:
            for part in (*grammar.parts, grammar.inner):
                if part is not None:
                    compile_grammar(part, self._tokenizer, self._token)
            raise

    def _schema_error(self, document: Schema) -> str | None:
        made = self._try_schema(document)
        return made if isinstance(made, str) else None

    def _try_schema(self, document: Schema) -> LLMatcher | str:
        return self._try_spec(
            _dump_grammars({"json_schema": rewrite_schema(document)}), _WIDE_ITEM_LIMITS
        )

    def _compile_spec(
        self, spec: str, item_limits: tuple[int, int] = _WIDE_ITEM_LIMITS
    ) -> LLMatcher:
        made = self._try_spec(spec, item_limits)
        if isinstance(made, str):
            raise UnsupportedGrammarError(made)
        return made

    def _try_spec(self, spec: str, item_limits: tuple[int, int]) -> LLMatcher | str:
        """The matcher, or why there is none."""
        self._token.check()
        # llguidance's complaint about half a surrogate pair would tell nobody anything
        size = len(spec.encode())
        in_row, in_step = item_limits
        limits = LLParserLimits(
            max_items_in_row=in_row,
            step_max_items=in_step,
            max_lexer_states=_MAX_LEXER_STATES + size,
            verbose_errors=False,
        )
        try:
            with PanicGuard():
                return self._create_matcher(spec, limits)
        except LibraryPanic as panic:  # llguidance catches its own, where it expects them
            return explain_error(f"panic: {panic}")

    def _create_matcher(self, spec: str, limits: LLParserLimits) -> LLMatcher | str:
        matcher = LLMatcher(self._tokenizer, spec, log_level=0, limits=limits)
        mask = matcher.compute_bitmask()
        trial = matcher.deep_copy()
        for _ in range(_TRIAL_TOKENS):
            # a broken matcher also allows something: the end
            if trial.is_error():
                return explain_error(trial.get_error())
            id = _lowest_allowed_id(mask, self._tokenizer.eos_tokens)
            if trial.is_stopped() or id is None:
                break
            trial.consume_token(id)
            mask = trial.compute_bitmask()
        return matcher


def _lark_spec(*texts: str) -> str:
    """The first refers to the second as @inner."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": text} for text in texts]
    for inner in grammars[1:]:
        inner["name"] = "inner"
    return _dump_grammars(*grammars)


def _dump_grammars(*grammars: Mapping[str, Any]) -> str:
    # a half of a surrogate pair stays one, and is found when it is encoded
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _lowest_allowed_id(mask: bytes, excluded: Sequence[int]) -> int | None:
    """The lowest id that is allowed, ends left out."""
    bits = int.from_bytes(mask, "little")
    for id in excluded:
        bits &= ~(1 << id)
    return (bits & -bits).bit_length() - 1 if bits else None
