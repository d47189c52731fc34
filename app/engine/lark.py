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

from app.engine.pattern import MOST_REPETITIONS, repetitions
from app.engine.schema import MOST_TEXT as MOST_SCHEMA_TEXT
from app.engine.schema import Refused, checked
from app.engine.schema_union import followable as followable_schema

# characters of a grammar, the schemas in it left out: native code goes as deep as rules are many
MOST_TEXT = 1 << 16

# with the schemas in it, which may be those of many tools
_MOST_IN_ALL = 4 * MOST_SCHEMA_TEXT

# a token's name · a string · a comment · a regular expression · a schema · another structure.
# Possessive, so that a long string is a few steps: a search holds the interpreter until it is done
_PARTS = re.compile(
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
_UNSUPPORTED = re.compile(r"\b(temperature|stop|stop_capture)\s*=")

_TOO_LONG = f"it is longer than {MOST_TEXT} characters"


def followable(text: str, *, compact: bool = False) -> str:
    """The grammar in Lark, as llguidance takes it. compact: the JSON of its schemas is on one
    line. Raises Refused."""
    if len(text) > _MOST_IN_ALL:
        raise Refused(f"it is longer than {_MOST_IN_ALL} characters, schemas included")
    return _with_schemas(_lark(text), compact=compact)


def _lark(text: str) -> str:
    if not _GBNF.search(text):
        return text
    if len(text) > MOST_TEXT:
        raise Refused(_TOO_LONG)
    try:
        return gbnf_to_lark(_ESCAPED.sub(_unescaped, text))
    except RecursionError:
        raise Refused("it is nested too deeply") from None
    # the converter's own kind, and a bare Exception for what it cannot resolve
    except Exception as error:
        raise Refused(f"it is not valid GBNF: {error}") from error


def _unescaped(escape: re.Match[str]) -> str:
    """The character that the converter spells wrongly otherwise."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if not code < 0x110000 or 0xD800 <= code < 0xE000:
        raise Refused(f"{escape[0]} is not a character")
    # what has a meaning of its own in strings and classes is ASCII
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _with_schemas(text: str, *, compact: bool) -> str:
    """With every schema in it in the engine's words."""
    pieces, end, size, plain = list[str](), 0, 0, list[str]()
    while (part := _PARTS.search(text, end)) is not None:
        regex, schema, structure = part.group(1, 2, 3)
        if regex is not None and repetitions(regex) > MOST_REPETITIONS:
            reason = f"a regular expression has more than {MOST_REPETITIONS} repetitions"
            raise Refused(reason)
        pieces.append(text[end : part.start()])
        plain.append(pieces[-1])
        size += part.end() - end
        end = part.end()
        if schema is None and structure is None:
            pieces.append(part[0])
            continue
        value, end = _json(text, end)
        if schema is not None:
            value = followable_schema(checked(value), compact=compact)
        pieces.append(f"{part[0]}{json.dumps(value)}")
    pieces.append(text[end:])
    plain.append(pieces[-1])
    if size + len(pieces[-1]) > MOST_TEXT:
        raise Refused(_TOO_LONG)
    _check_options("".join(plain))
    return "".join(pieces)


def _json(text: str, start: int) -> tuple[Any, int]:
    """The JSON that stands there, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except RecursionError:
        raise Refused("a schema in it is nested too deeply") from None
    except ValueError as error:
        raise Refused(f"a schema in it is not valid JSON: {error}") from error


def _check_options(plain: str) -> None:
    """plain: the grammar without strings, regular expressions and schemas."""
    for options in _OPTIONS.finditer(plain):
        found = _UNSUPPORTED.search(options[1])
        if found is not None:
            raise Refused(f"the rule option {found[1]} is not supported: remove it")
