"""Compiled grammars of every kind: their language, errors, and the cost of hostile ones."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from app.core.errors import AppError, ErrorKind
from app.core.requests import ChoiceGrammar, Grammar, JsonSchema, LarkGrammar, Regex
from app.grammar.compiler import GrammarCompiler, GrammarError
from app.grammar.schema import MAX_OPTIONAL_PROPERTIES
from tests import tiny
from tests.engine.harness import grammar_compiler, job, make_loop, run, tiny_model
from tests.grammar.test_compiler import ids_of
from tests.rows import rows

ENDS = frozenset({tiny.END})
GBNF = r"""
# an answer, as llama.cpp's examples write it
root   ::= answer (", " answer){0,2} "\u002e"
answer ::= "yes" | "no" | [a-c]+ "\x21" | "é" | [\u0416]
"""


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the grammar accepts the text as a complete answer."""
    matcher = grammar_compiler().compile(grammar, ENDS)
    try:
        for byte in text.encode():
            matcher.accept(byte)
    except GrammarError:
        return False
    return matcher.done or tiny.END in ids_of(matcher)


def compile_error(grammar: Grammar) -> AppError:
    with pytest.raises(AppError) as caught:
        grammar_compiler().compile(grammar, ENDS)
    assert caught.value.kind is ErrorKind.INVALID
    return caught.value


@rows(
    ("grammar", "accepted", "rejected"),
    [
        (Regex(pattern=r"\d{2}/[a-z]+"), ["12/a", "12/abc"], ["1/a", "12/", "12/a "]),
        (Regex(pattern="^(a|b)$"), ["a", "b"], ["", "ab", "^a$"]),
        (Regex(pattern="(?i)yes\n"), ["YES\n"], ["yes"]),
        (ChoiceGrammar(options=("a", "ab", "c")), ["a", "ab", "c"], ["", "b", "abc"]),
        (ChoiceGrammar(options=('q"\\/\n', "\u2028é🙂\x7f")), ['q"\\/\n', "\u2028é🙂\x7f"], ['q"']),
        (LarkGrammar(text='start: "(" start ")" | "x"'), ["x", "((x))"], ["((x)", ""]),
        (LarkGrammar(text='start: "a" %json {"const": 1}'), ["a1"], ["a2", "1"]),
        (
            LarkGrammar(text='start: "<" @inner ">"', inner=LarkGrammar(text=GBNF)),
            ["<yes.>"],
            ["yes.", "<yes>"],
        ),
        (
            LarkGrammar(text=GBNF),
            ["yes.", "no, abc!, é.", "Ж."],
            ["yes", "no, no, no, no.", "abc."],
        ),
        (JsonSchema(text="true"), ["1", "[null]"], ["x", ""]),
    ],
    ids=str,
)
def test_each_kind_of_grammar_allows_exactly_its_language(
    grammar: Grammar, accepted: list[str], rejected: list[str]
) -> None:
    for text in accepted:
        assert accepts(grammar, text), text
    for text in rejected:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("time", "", "Z"), ("time", "", ".25+01:00"), ("date-time", "2026-11-22T", "Z")],
)
def test_times_have_no_leap_seconds(name: str, before: str, after: str) -> None:
    """By RFC 3339, second 60 is invalid except where a leap second was inserted."""
    schema = JsonSchema(text=json.dumps({"type": "string", "format": name}))
    for seconds in ("00", "59"):
        assert accepts(schema, f'"{before}07:30:{seconds}{after}"')
    assert not accepts(schema, f'"{before}07:30:60{after}"')


def test_random_weights_follow_each_kind_of_grammar() -> None:
    kinds: dict[str, Grammar] = {
        "regex": Regex(pattern="[a-f]{3,9}-[0-9]{2}"),
        "choice": ChoiceGrammar(options=("left", "right", "straight on")),
        "lark": LarkGrammar(text='start: "(" start ")" | /[xyz]/\n'),
        "gbnf": LarkGrammar(text=GBNF),
        "free, then bound": LarkGrammar(
            text='start: thought "=" answer\nthought[max_tokens=9]: /(?s:.*)/\n'
            'answer: %json {"type": "boolean"}\n'
        ),
    }
    jobs = [
        job(f"{name} {seed}", name.encode(), grammar=kinds[name], temperature=1.2, seed=seed)
        for name in kinds
        for seed in range(4)
    ]
    loop = make_loop(tiny_model(), running=8, policy="radix")
    outcomes = run(loop, *jobs)
    stopped = [one for one in jobs if outcomes[one.id].reason == "stop"]
    assert len(stopped) > len(jobs) / 2
    for one in stopped:
        assert one.grammar is not None
        assert accepts(one.grammar, bytes(outcomes[one.id].ids).decode())
    for seed in range(4):
        assert b"=" in bytes(outcomes[f"free, then bound {seed}"].ids)[:10]


CITY = json.dumps(
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "more": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city", "more"],
    }
)
ON_ONE_LINE = [
    '{"city": "Rome", "more": [1, 2]}',
    '{"city":"Rome","more":[1,2]}',
    '{"city": "Rome","more": []}',
]
OVER_LINES = [
    '{\n  "city": "Rome",\n  "more": [1,\n2]\n}',
    '{ "city": "Rome", "more": []}',
    '{"city" : "Rome", "more": []}',
    '{"city": "Rome" , "more": []}',
    '{"city": "Rome", "more": [ ]}',
]
LONG = ['{"city":  "Rome", "more": []}', '{"city": "Rome", "more": []} ']
COMPOSED = LarkGrammar(text=f'start: "<" call\ncall: %json {CITY}', parts=(JsonSchema(text=CITY),))


@pytest.mark.parametrize(
    ("grammar", "before", "multiline"),
    [
        (JsonSchema(text=CITY), "", False),
        (COMPOSED, "<", False),
        (LarkGrammar(text=f"start: %json {CITY}"), "", True),
        (
            LarkGrammar(text='start: "<" @inner', inner=LarkGrammar(text=f"start: %json {CITY}")),
            "<",
            True,
        ),
    ],
    ids=["schema", "schema in a composed grammar", "client's grammar", "client's, composed"],
)
def test_json_is_on_one_line_except_in_a_grammar_that_a_client_wrote(
    grammar: Grammar, before: str, multiline: bool
) -> None:
    for text in ON_ONE_LINE:
        assert accepts(grammar, before + text), text
    for text in OVER_LINES:
        assert accepts(grammar, before + text) is multiline, text
    for text in LONG:
        assert not accepts(grammar, before + text), text


def test_white_space_is_bounded_in_a_schema_that_is_part_of_a_grammar() -> None:
    matcher = grammar_compiler().compile(
        LarkGrammar(text='start: "a" %json {"type": "object"}'), ENDS
    )
    for token in b"a{\n\n" + b" " * 20:
        matcher.accept(token)
    assert ids_of(matcher) == {*b'"}'}


@pytest.mark.parametrize(
    ("grammar", "param", "reason"),
    [
        (Regex(pattern="(", param="guided_regex"), "guided_regex", "unclosed group"),
        (Regex(pattern="(?=a)b", param="guided_regex"), "guided_regex", "look-ahead"),
        (Regex(pattern="\ud800", param="guided_regex"), "guided_regex", "surrogate"),
        (ChoiceGrammar(options=("\ud800",), param="guided_choice"), "guided_choice", "surrogate"),
        (
            LarkGrammar(text="start: missing", param="guided_grammar"),
            "guided_grammar",
            "unknown name",
        ),
        (LarkGrammar(text="x ::= y", param="guided_grammar"), "guided_grammar", "not valid GBNF"),
        (
            LarkGrammar(text="start: <|missing|>", param="guided_grammar"),
            "guided_grammar",
            "missing",
        ),
        (JsonSchema(text="{", param="a.schema"), "a.schema", "not valid JSON"),
        (JsonSchema(text='{"not": {}}', param="a.schema"), "a.schema.not", "not is not supported"),
    ],
    ids=str,
)
def test_an_error_names_the_param_and_the_reason(grammar: Grammar, param: str, reason: str) -> None:
    error = compile_error(grammar)
    assert (error.param, reason in error.message) == (param, True), error.message
    assert "\n" not in error.message


def test_the_error_for_a_long_expression_is_short() -> None:
    """llguidance quotes the full expression twice."""
    error = compile_error(Regex(pattern="(" * 5000 + "a" + ")" * 5000))
    assert len(error.message) < 500
    assert "nest" in error.message


def test_the_error_for_a_composed_grammar_names_the_invalid_part() -> None:
    good = JsonSchema(text='{"type": "object"}', param="tools.0.function.parameters")
    invalid = JsonSchema(text='{"items": {"not": {}}}', param="tools.1.function.parameters")
    pattern = Regex(pattern="(", param="guided_regex")
    text = f"start: %json {good.text} %json {invalid.text}"
    error = compile_error(LarkGrammar(text=text, parts=(good, invalid)))
    assert error.param == "tools.1.function.parameters.items.not"
    error = compile_error(LarkGrammar(text="start: /(/", parts=(good, pattern)))
    assert error.param == "guided_regex"
    inner = LarkGrammar(text="start: missing", param="guided_grammar")
    assert compile_error(LarkGrammar(text="start: @inner", inner=inner)).param == "guided_grammar"


def test_a_grammar_that_fails_after_the_first_token_is_rejected_when_compiled() -> None:
    """A parser row may be too long, or a lexer state too large, only after some tokens."""
    large = JsonSchema(text='{"type": "string", "pattern": "^a*$", "minLength": 1000000}')
    assert "too many" in compile_error(large).message


def test_many_optional_properties_are_supported() -> None:
    """By default llguidance allows some 500, and fails after the first brace."""
    properties = {f"p{i}": {"type": "null"} for i in range(2000)}
    wide = JsonSchema(text=json.dumps({"type": "object", "properties": properties}))
    assert accepts(wide, '{"p0":null,"p999":null,"p1998":null}')
    assert not accepts(wide, '{"p999":null,"p0":null}')


@pytest.mark.exhaustive
def test_the_documented_number_of_properties_works_with_a_large_vocabulary(
    shared: Path,
) -> None:
    """Property names used up all 50,000 lexer states in the middle of an answer."""
    file = shared / "tokenizers" / "qwen3" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    (end,) = tokenizer.encode("<|im_end|>").ids
    vocab = tokenizer.get_vocab_size()
    large = GrammarCompiler(file, vocab=vocab, eos_ids=[end])
    names = [f"property_number_{i}" for i in range(2500)]
    required = {"properties": {name: {"type": "null"} for name in names}, "required": names}
    optional = {"properties": {name: {"type": "null"} for name in names[:MAX_OPTIONAL_PROPERTIES]}}
    few = [names[0], *names[MAX_OPTIONAL_PROPERTIES // 2 : MAX_OPTIONAL_PROPERTIES : 300]]
    for schema, names_used in ((required, names), (optional, few)):
        grammar = JsonSchema(text=json.dumps({"type": "object", **schema}))
        for _ in range(2):
            matcher = large.compile(grammar, frozenset({end}))
            for token in tokenizer.encode(json.dumps(dict.fromkeys(names_used))).ids:
                matcher.accept(token)
            assert matcher.done or end in ids_of(matcher)


def test_more_optional_properties_than_documented_are_rejected_with_advice() -> None:
    properties = {f"p{i}": {"type": "null"} for i in range(MAX_OPTIONAL_PROPERTIES + 1)}
    error = compile_error(
        JsonSchema(text=json.dumps({"properties": properties}), param="guided_json")
    )
    assert error.param == "guided_json.properties"
    assert "make some required" in error.message


def test_a_large_schema_in_a_client_grammar_is_rejected_with_the_reason() -> None:
    properties = {f"p{i}": {"type": "null"} for i in range(1500)}
    text = f"start: %json {json.dumps({'type': 'object', 'properties': properties})}"
    assert "too many continuations" in compile_error(LarkGrammar(text=text)).message


LISTED = {"type": "object", "properties": {"a": {"type": "integer"}}}
MORE = '{"a":1,"b":2}'


@rows(
    ("schema", "is_open"),
    [
        (LISTED, False),
        ({**LISTED, "additionalProperties": True}, True),
        ({**LISTED, "additionalProperties": {"type": "integer"}}, True),
        ({**LISTED, "patternProperties": {"^b$": {}}}, True),
        ({**LISTED, "required": ["b"]}, True),
        ({"type": "object"}, True),
        ({"allOf": [LISTED, {"properties": {"b": {"type": "integer"}}}]}, True),
        ({**LISTED, "anyOf": [{"properties": {"b": {"const": 2}}}]}, True),
        ({"anyOf": [LISTED]}, False),
        ({"$ref": "#/$defs/x", "$defs": {"x": LISTED}}, False),
    ],
)
def test_an_object_has_only_the_properties_that_it_lists(
    schema: dict[str, Any], is_open: bool
) -> None:
    """Exceptions: the schema allows more, or lists properties in several subschemas."""
    assert accepts(JsonSchema(text=json.dumps(schema)), MORE) == is_open


def _chain(length: int) -> dict[str, Any]:
    links = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**links, f"{length}": {}}}


def _merged_chain(length: int) -> dict[str, Any]:
    links = {
        f"{i}": {
            "properties": {"x": {"$ref": f"#/$defs/{i + 1}"}},
            "allOf": [{"properties": {"x": {"type": "object"}}}],
        }
        for i in range(length)
    }
    return {"$ref": "#/$defs/0", "$defs": {**links, f"{length}": {}}}


def hostile_grammars() -> Iterator[tuple[str, Grammar]]:
    schemas: dict[str, Any] = {
        "most properties": {"properties": {f"p{i}": {} for i in range(3000)}},
        "values": {"enum": [{"a": [i, {"b": i}]} for i in range(2000)]},
        "items": {"type": "array", "minItems": 10**9, "items": {"minItems": 10**9}},
        "lengths": {"type": "string", "maxLength": 10**9, "minLength": 10**9},
        "branches": {
            "allOf": [
                {"anyOf": [{"properties": {f"{i} {j}": {"type": "null"}}} for i in range(9)]}
                for j in range(9)
            ]
        },
        "patterns": {"allOf": [{"pattern": f"a.{{{10 * i}}}b"} for i in range(9)]},
        "references": _chain(4990),
        "merged references": _merged_chain(900),
        "a table": {"allOf": [{"multipleOf": each} for each in (9973, 9967)]},
    }
    for name, schema in schemas.items():
        yield name, JsonSchema(text=json.dumps(schema))
    yield "levels", JsonSchema(text='{"allOf":[' * 10**5)
    yield "repetitions", Regex(pattern="((((a{100}){100}){100}){100}){100}")
    yield "backtracking", Regex(pattern="((a+)+)+b|(a|b)*a(a|b){200}|(.*)*c")
    yield "groups", Regex(pattern="(" * 60_000)
    yield (
        "rules",
        LarkGrammar(
            text="start: a0\n" + "".join(f"a{i}:a{i + 1}\n" for i in range(4000)) + "a4000:/b/"
        ),
    )
    yield (
        "terms",
        LarkGrammar(
            text="start: A0\n"
            + "".join(f'A{i}:A{i + 1} "b"\n' for i in range(3900))
            + 'A3900: "c"\n'
        ),
    )
    yield "parentheses", LarkGrammar(text="start: " + "(" * 60_000)
    yield (
        "doubling",
        LarkGrammar(
            text="start: A0\n"
            + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(60))
            + 'A60: "b"'
        ),
    )


# Without one of the limits, each of these crashes the process or takes minutes or gigabytes. So the
# test compiles them in another process, on a thread with the stack size of the server's threads.
_SCRIPT = """
import resource, sys, threading, time
from app.core.errors import AppError
from tests.engine.harness import grammar_compiler
from tests.grammar.test_llguidance_backend import ENDS, hostile_grammars

def attempt():
    for name, grammar in hostile_grammars():
        start = time.process_time()
        try:
            grammar_compiler().compile(grammar, ENDS)
            result = "compiled"
        except AppError as error:
            result = error.kind.value
        print(f"{name}: {result}, {time.process_time() - start:.2f}", flush=True)
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

thread = threading.Thread(target=attempt)
thread.start()
thread.join()
"""


@pytest.mark.timing
def test_hostile_grammars_stay_within_time_and_memory_limits() -> None:
    """CPU seconds of all cores; peak memory is in kB, or on macOS in bytes."""
    script = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    lines = script.stdout.splitlines()
    names = [name for name, _ in hostile_grammars()]
    assert [line.split(":")[0] for line in lines] == [*names, lines[-1]], script.stderr
    print(script.stdout)
    for line in lines[:-1]:
        assert float(line.split(", ")[1]) < 10, line
    assert int(lines[-1].split()[1]) >> (10 if sys.platform == "darwin" else 0) < 2 << 20


@pytest.mark.timing
def test_an_ambiguous_grammar_cannot_stall_a_step() -> None:
    """No other sequence makes progress while a mask is computed."""
    matcher = grammar_compiler().compile(
        LarkGrammar(text="start: e\ne: e e | e e e | /[a-z]/ | \n"), ENDS
    )
    times = list[float]()
    with contextlib.suppress(GrammarError):
        while len(times) < 300:
            start = time.thread_time()
            matcher.accept(ord("a"))
            times.append(time.thread_time() - start)
    assert 8 < len(times) < 300
    print(f"longest step {1000 * max(times):.0f} ms")
    assert max(times) < 0.5
