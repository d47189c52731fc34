"""Compiles the grammar of a request to an llguidance matcher, or reports why it is rejected.

Knows: llguidance's syntax for each kind of grammar, its limits. Must not know: threads, the cache
of compiled grammars, how masks are used.

Grammars are untrusted. Every cost that can grow faster than the size of the grammar is limited.
Where possible, limits are checked before llguidance parses the grammar (`check_schema`,
`prepare_lark`); otherwise, llguidance enforces them. A few tokens are consumed as a trial, because
some limits are detected only after the first token.

Schemas inside Lark and GBNF grammars are treated like standalone schemas. White space is bounded,
no keyword is ignored, and costs are limited. Multi-line JSON is allowed only in a client's own
grammar.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from app.core.errors import LibraryPanic, PanicGuard
from app.core.requests import ChoiceGrammar, Grammar, JsonSchema, LarkGrammar, Regex
from app.core.thread_pools import CancelToken
from app.grammar.schema import (
    MAX_ENTRIES,
    MAX_REPETITIONS,
    MAX_SCHEMA_LENGTH,
    Schema,
    UnsupportedGrammarError,
    check_schema,
    count_repetitions,
    parse_schema,
)
from app.grammar.schema_diagnosis import find_unsupported_keyword
from app.grammar.schema_rewrite import rewrite_schema

# The maximum number of characters of a grammar without its schemas. The recursion depth of the
# native code grows with the number of rules.
MAX_GRAMMAR_LENGTH = 1 << 16

# The maximum number of characters including schemas. The schemas may come from many tools.
_MAX_LENGTH_WITH_SCHEMAS = 4 * MAX_SCHEMA_LENGTH

# a token's name · a string · a comment · a regular expression · a schema · another structure. The
# search holds the GIL. Possessive quantifiers keep it fast for long strings.
_LARK_PARTS = re.compile(
    r"""<[^<>\s]+> | "(?:\\.|[^"\\]++)*+"? | (?://|\#)[^\n]* | /((?:\\.|[^/\\\n]++)++)/?"""
    r"""| (%json\b\s*) | (%regex\b\s*)""",
    re.DOTALL | re.VERBOSE,
)
# the only GBNF operator that Lark lacks
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# one escaped character; the groups are GBNF's numeric escapes
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_OPTIONS = re.compile(r"^[ \t]*[!?]?[\w-]+(?:\{[^}\n]*\})?\[([^\]\n]*)\]", re.MULTILINE)
# Rule options that are not supported. The temperature is a request parameter, and sampled tokens
# are never removed.
_UNSUPPORTED_OPTION = re.compile(r"\b(temperature|stop|stop_capture)\s*=")

_TOO_LONG = f"it is longer than {MAX_GRAMMAR_LENGTH} characters"

# the number of trial tokens to consume
_TRIAL_TOKENS = 8

# Limits on the number of parser items that llguidance may create, in one row and in all rows of one
# step. A step tries every token of the vocabulary. A schema needs a few items per row for each
# optional property that may come next. With 151,669 tokens, it needs only a few more per step. With
# unrestricted white space, however, it needs 230 items per property, or 460,000 for the maximum
# that `schema` accepts. These items are cheap. An ambiguous grammar has a similar number of items,
# but they are expensive: with 2000 items in a row, a step takes seconds, which delays all other
# outputs of the model.
_WIDE_ITEM_LIMITS = (30_000, 2_000_000)
_NARROW_ITEM_LIMITS = (500, 2_000)

# The maximum number of states of llguidance's lexer, in addition to one state per byte of the
# grammar. Property names take one state per byte. The additional states are for patterns, whose
# number of states is unbounded. A state takes up to 1 kB. All outputs of a grammar share its
# states.
_MAX_LEXER_STATES = 50_000

# the number of characters to keep at each end of an llguidance error message
_ERROR_EDGE_CHARS = 200

_UNIMPLEMENTED_KEYWORD = re.compile(r'Unimplemented keys: \["([^"]*)"')
# the start of the verbose part of an error message, which quotes llguidance's form of the grammar
_VERBOSE_PART = re.compile(r"<non-verbose/>|\n +\d+ \| |\n *while processing")
_EXPLANATIONS = {
    "NoExtensionBias": "no token of this model is allowed next",
    "oneOf constraints": "its branches must be mutually exclusive: give each a required"
    " property with a different const, or use anyOf",
    "Too many items": "it allows too many continuations at one point: make more properties"
    " required, or make the grammar less ambiguous",
    "too many states": "its patterns need too many states: simplify them",
    "panic": "it is too large",
    "Unable to determine if regex": "the combination of its patterns is too complex: remove one",
}


def prepare_lark(text: str, *, compact: bool = False) -> str:
    """Converts the grammar to llguidance's Lark. compact: whether JSON that matches its schemas is
    on one line. Raises UnsupportedGrammarError."""
    if len(text) > _MAX_LENGTH_WITH_SCHEMAS:
        raise UnsupportedGrammarError(
            f"it is longer than {_MAX_LENGTH_WITH_SCHEMAS} characters, including schemas"
        )
    return _rewrite_schemas(_convert_gbnf(text), compact=compact)


def _convert_gbnf(text: str) -> str:
    if not _GBNF.search(text):
        return text
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise UnsupportedGrammarError(_TOO_LONG)
    try:
        return gbnf_to_lark(_ESCAPED.sub(_unescape, text))
    except RecursionError:
        raise UnsupportedGrammarError("it is nested too deeply") from None
    # the converter raises its own exception type, or a bare Exception for undefined names
    except Exception as error:
        raise UnsupportedGrammarError(f"it is not valid GBNF: {error}") from error


def _unescape(escape: re.Match[str]) -> str:
    """Returns the character of a numeric escape. The converter would translate it incorrectly."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if not code < 0x110000 or 0xD800 <= code < 0xE000:
        raise UnsupportedGrammarError(f"{escape[0]} is not a character")
    # all characters with a special meaning in strings and classes are ASCII
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _rewrite_schemas(text: str, *, compact: bool) -> str:
    """Returns the grammar with every schema rewritten for llguidance."""
    pieces, end, size, plain = list[str](), 0, 0, list[str]()
    while (part := _LARK_PARTS.search(text, end)) is not None:
        regex, schema, structure = part.group(1, 2, 3)
        if regex is not None and count_repetitions(regex) > MAX_REPETITIONS:
            reason = f"a regular expression has more than {MAX_REPETITIONS} repetitions"
            raise UnsupportedGrammarError(reason)
        pieces.append(text[end : part.start()])
        plain.append(pieces[-1])
        size += part.end() - end
        end = part.end()
        if schema is None and structure is None:
            pieces.append(part[0])
            continue
        value, end = _parse_json_at(text, end)
        if schema is not None:
            value = rewrite_schema(check_schema(value), compact=compact)
        pieces.append(f"{part[0]}{json.dumps(value)}")
    pieces.append(text[end:])
    plain.append(pieces[-1])
    if size + len(pieces[-1]) > MAX_GRAMMAR_LENGTH:
        raise UnsupportedGrammarError(_TOO_LONG)
    _check_options("".join(plain))
    return "".join(pieces)


def _parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Returns the JSON value at `start`, and the position of its end."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except RecursionError:
        raise UnsupportedGrammarError("a schema in it is nested too deeply") from None
    except ValueError as error:
        raise UnsupportedGrammarError(f"a schema in it is not valid JSON: {error}") from error


def _check_options(plain: str) -> None:
    """Raises UnsupportedGrammarError for an unsupported rule option. plain: the grammar without
    strings, regular expressions and schemas."""
    for options in _OPTIONS.finditer(plain):
        match = _UNSUPPORTED_OPTION.search(options[1])
        if match is not None:
            raise UnsupportedGrammarError(f"the rule option {match[1]} is not supported: remove it")


class GrammarCompileError(UnsupportedGrammarError):
    """A rejected grammar. For a composed grammar, it refers to the unsupported part."""

    def __init__(self, cause: UnsupportedGrammarError, grammar: Grammar) -> None:
        super().__init__(cause.reason, cause.path)
        self.grammar = grammar


def compile_grammar(
    grammar: Grammar, tokenizer: LLTokenizer, token: CancelToken | None = None
) -> LLMatcher:
    """Returns the matcher in its initial state, with the first mask computed. Raises
    GrammarCompileError if the grammar is rejected. Raises WorkCancelled soon after `token` is
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
    """Converts an llguidance error message to a clause on one line, without source excerpts."""
    for sign, explanation in _EXPLANATIONS.items():
        if sign in error:
            return explanation
    unsupported = _UNIMPLEMENTED_KEYWORD.search(error)
    if unsupported is not None:
        return f"{unsupported[1]} is not supported: remove it"
    clause = _VERBOSE_PART.split(error.replace("/$defs/whole", "").replace("json-schema:///", ""))[
        0
    ]
    # llguidance quotes complete expressions
    return " ".join(_elide_middle(clause).split())


def _elide_middle(text: str) -> str:
    """Keeps both ends of a long message. The reason comes at the end, after the rejected
    expression."""
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
        if len(pattern) > MAX_GRAMMAR_LENGTH:
            raise UnsupportedGrammarError(f"it is longer than {MAX_GRAMMAR_LENGTH} characters")
        if count_repetitions(pattern) > MAX_REPETITIONS:
            raise UnsupportedGrammarError(f"it has more than {MAX_REPETITIONS} repetitions")
        return self._compile_spec(LLMatcher.grammar_from_regex(pattern))

    def compile_choice(self, options: Sequence[str]) -> LLMatcher:
        if len(options) > MAX_ENTRIES or sum(map(len, options)) > MAX_SCHEMA_LENGTH:
            raise UnsupportedGrammarError(
                f"it has more than {MAX_ENTRIES} options or {MAX_SCHEMA_LENGTH} characters"
            )
        spelled = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
        # the only character that is allowed unescaped in JSON strings but not in Lark strings
        spelled = spelled.replace("\x7f", "\\u007f")
        return self._compile_spec(_lark_spec(f"start: OPTION\nOPTION: {spelled}"))

    def compile_lark(self, grammar: LarkGrammar) -> LLMatcher:
        try:
            # With `parts`, the schemas come from the request. Otherwise, the client wrote the whole
            # grammar.
            texts = [prepare_lark(grammar.text, compact=bool(grammar.parts))]
            if grammar.inner is not None:
                texts.append(prepare_lark(grammar.inner.text))
            # only a client's own grammar can be ambiguous
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
        """Returns the matcher, or the reason for its rejection."""
        self._token.check()
        # reject unpaired surrogates here, because llguidance's error message for them is unclear
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
        except LibraryPanic as panic:  # llguidance catches only the panics that it expects
            return explain_error(f"panic: {panic}")

    def _create_matcher(self, spec: str, limits: LLParserLimits) -> LLMatcher | str:
        matcher = LLMatcher(self._tokenizer, spec, log_level=0, limits=limits)
        mask = matcher.compute_bitmask()
        trial = matcher.deep_copy()
        for _ in range(_TRIAL_TOKENS):
            # a matcher in an error state still allows the end of the output
            if trial.is_error():
                return explain_error(trial.get_error())
            id = _lowest_allowed_id(mask, self._tokenizer.eos_tokens)
            if trial.is_stopped() or id is None:
                break
            trial.consume_token(id)
            mask = trial.compute_bitmask()
        return matcher


def _lark_spec(*texts: str) -> str:
    """Returns llguidance's specification of the grammars. The first grammar refers to the second
    grammar as @inner."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": text} for text in texts]
    for inner in grammars[1:]:
        inner["name"] = "inner"
    return _dump_grammars(*grammars)


def _dump_grammars(*grammars: Mapping[str, Any]) -> str:
    # an unpaired surrogate is kept here, and detected when the text is encoded
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _lowest_allowed_id(mask: bytes, excluded: Sequence[int]) -> int | None:
    """Returns the lowest allowed token ID that is not excluded."""
    bits = int.from_bytes(mask, "little")
    for id in excluded:
        bits &= ~(1 << id)
    return (bits & -bits).bit_length() - 1 if bits else None
