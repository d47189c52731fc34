"""Grammars in Lark or GBNF, before they are compiled.

Knows: where JSON Schemas stand in llguidance's variant of Lark (its docs/syntax.md), and GBNF.
Must not know: tokens, who wrote the grammar.

A schema in a grammar is held to what a schema by itself is held to: its white space is bounded,
nothing that it says is ignored, and its costs are limited. JSON may stand over several lines only
in a grammar that a client wrote.
"""

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from app.engine.pattern import MAX_REPETITIONS, count_repetitions
from app.engine.schema import MAX_SCHEMA_LENGTH as MOST_SCHEMA_TEXT
from app.engine.schema import UnsupportedGrammarError, check_schema
from app.engine.schema_union import rewrite_schema as followable_schema

# characters of a grammar, the schemas in it left out: native code goes as deep as rules are many
MAX_GRAMMAR_LENGTH = 1 << 16

# with the schemas in it, which may be those of many tools
_MAX_LENGTH_WITH_SCHEMAS = 4 * MOST_SCHEMA_TEXT

# a token's name · a string · a comment · a regular expression · a schema · another structure.
# Possessive, so that a long string is a few steps: a search holds the interpreter until it is done
_LARK_PARTS = re.compile(
    r"""<[^<>\s]+> | "(?:\\.|[^"\\]++)*+"? | (?://|\#)[^\n]* | /((?:\\.|[^/\\\n]++)++)/?"""
    r"""| (%json\b\s*) | (%regex\b\s*)""",
    re.DOTALL | re.VERBOSE,
)
# GBNF's one sign that Lark does not have
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# one escaped character; of GBNF's kinds, those that name one by its number
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_OPTIONS = re.compile(r"^[ \t]*[!?]?[\w-]+(?:\{[^}\n]*\})?\[([^\]\n]*)\]", re.MULTILINE)
# what a rule may ask for, but not here: a temperature is the request's, ids are never taken back
_UNSUPPORTED_OPTION = re.compile(r"\b(temperature|stop|stop_capture)\s*=")

_TOO_LONG = f"it is longer than {MAX_GRAMMAR_LENGTH} characters"


def prepare_lark(text: str, *, compact: bool = False) -> str:
    """The grammar in Lark, as llguidance takes it. compact: the JSON of its schemas is on one
    line. Raises Refused."""
    if len(text) > _MAX_LENGTH_WITH_SCHEMAS:
        raise UnsupportedGrammarError(
            f"it is longer than {_MAX_LENGTH_WITH_SCHEMAS} characters, schemas included"
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
    # the converter's own kind, and a bare Exception for what it cannot resolve
    except Exception as error:
        raise UnsupportedGrammarError(f"it is not valid GBNF: {error}") from error


def _unescape(escape: re.Match[str]) -> str:
    """The character that the converter spells wrongly otherwise."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if not code < 0x110000 or 0xD800 <= code < 0xE000:
        raise UnsupportedGrammarError(f"{escape[0]} is not a character")
    # what has a meaning of its own in strings and classes is ASCII
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _rewrite_schemas(text: str, *, compact: bool) -> str:
    """With every schema in it in the engine's words."""
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
            value = followable_schema(check_schema(value), compact=compact)
        pieces.append(f"{part[0]}{json.dumps(value)}")
    pieces.append(text[end:])
    plain.append(pieces[-1])
    if size + len(pieces[-1]) > MAX_GRAMMAR_LENGTH:
        raise UnsupportedGrammarError(_TOO_LONG)
    _check_options("".join(plain))
    return "".join(pieces)


def _parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON that stands there, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except RecursionError:
        raise UnsupportedGrammarError("a schema in it is nested too deeply") from None
    except ValueError as error:
        raise UnsupportedGrammarError(f"a schema in it is not valid JSON: {error}") from error


def _check_options(plain: str) -> None:
    """plain: the grammar without strings, regular expressions and schemas."""
    for options in _OPTIONS.finditer(plain):
        found = _UNSUPPORTED_OPTION.search(options[1])
        if found is not None:
            raise UnsupportedGrammarError(f"the rule option {found[1]} is not supported: remove it")
