"""Grammars of every kind, compiled: what they allow, what is refused, what hostile ones cost."""

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

ENDS = frozenset({tiny.END})
GBNF = r"""
# an answer, as llama.cpp's examples write it
root   ::= answer (", " answer){0,2} "\u002e"
answer ::= "yes" | "no" | [a-c]+ "\x21" | "é" | [\u0416]
"""


def follows(grammar: Grammar, text: str) -> bool:
    """Whether the whole text does."""
    matcher = grammar_compiler().compile(grammar, ENDS)
    try:
        for byte in text.encode():
            matcher.accept(byte)
    except GrammarError:
        return False
    return matcher.done or tiny.END in ids_of(matcher)


def refused(grammar: Grammar) -> AppError:
    with pytest.raises(AppError) as caught:
        grammar_compiler().compile(grammar, ENDS)
    assert caught.value.kind is ErrorKind.INVALID
    return caught.value


@pytest.mark.parametrize(
    ("grammar", "followed", "not_followed"),
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
def test_each_kind_allows_what_it_says_and_nothing_else(
    grammar: Grammar, followed: list[str], not_followed: list[str]
) -> None:
    for text in followed:
        assert follows(grammar, text), text
    for text in not_followed:
        assert not follows(grammar, text), text


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("time", "", "Z"), ("time", "", ".25+01:00"), ("date-time", "2026-11-22T", "Z")],
)
def test_no_time_has_a_leap_second(name: str, before: str, after: str) -> None:
    """Most are invalid by RFC 3339: the seconds of a minute are 60 except where one was added."""
    schema = JsonSchema(text=json.dumps({"type": "string", "format": name}))
    for seconds in ("00", "59"):
        assert follows(schema, f'"{before}07:30:{seconds}{after}"')
    assert not follows(schema, f'"{before}07:30:60{after}"')


def test_random_weights_follow_each_kind() -> None:
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
    ended = [one for one in jobs if outcomes[one.id].reason == "stop"]
    assert len(ended) > len(jobs) / 2
    for one in ended:
        assert one.grammar is not None
        assert follows(one.grammar, bytes(outcomes[one.id].ids).decode())
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
    ("grammar", "before", "lines"),
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
    grammar: Grammar, before: str, lines: bool
) -> None:
    for text in ON_ONE_LINE:
        assert follows(grammar, before + text), text
    for text in OVER_LINES:
        assert follows(grammar, before + text) is lines, text
    for text in LONG:
        assert not follows(grammar, before + text), text


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
            LarkGrammar(text="start: nobody", param="guided_grammar"),
            "guided_grammar",
            "unknown name",
        ),
        (LarkGrammar(text="x ::= y", param="guided_grammar"), "guided_grammar", "not valid GBNF"),
        (LarkGrammar(text="start: <|nobody|>", param="guided_grammar"), "guided_grammar", "nobody"),
        (JsonSchema(text="{", param="a.schema"), "a.schema", "not valid JSON"),
        (JsonSchema(text='{"not": {}}', param="a.schema"), "a.schema.not", "not is not supported"),
    ],
    ids=str,
)
def test_a_refusal_says_where_and_why(grammar: Grammar, param: str, reason: str) -> None:
    error = refused(grammar)
    assert (error.param, reason in error.message) == (param, True), error.message
    assert "\n" not in error.message


def test_a_refusal_is_short_however_long_the_expression_is() -> None:
    """llguidance quotes the whole of it, twice."""
    error = refused(Regex(pattern="(" * 5000 + "a" + ")" * 5000))
    assert len(error.message) < 500
    assert "nest" in error.message


def test_a_composed_grammar_is_refused_at_the_part_that_is_wrong() -> None:
    good = JsonSchema(text='{"type": "object"}', param="tools.0.function.parameters")
    wrong = JsonSchema(text='{"items": {"not": {}}}', param="tools.1.function.parameters")
    pattern = Regex(pattern="(", param="guided_regex")
    text = f"start: %json {good.text} %json {wrong.text}"
    error = refused(LarkGrammar(text=text, parts=(good, wrong)))
    assert error.param == "tools.1.function.parameters.items.not"
    error = refused(LarkGrammar(text="start: /(/", parts=(good, pattern)))
    assert error.param == "guided_regex"
    inner = LarkGrammar(text="start: nobody", param="guided_grammar")
    assert refused(LarkGrammar(text="start: @inner", inner=inner)).param == "guided_grammar"


def test_what_would_break_behind_the_first_token_is_found_before_it() -> None:
    """A row of the parser may be too long, or a lexer's state too large, only there."""
    large = JsonSchema(text='{"type": "string", "pattern": "^a*$", "minLength": 1000000}')
    assert "too many" in refused(large).message


def test_many_optional_properties_are_followed() -> None:
    """llguidance allows some 500 by itself, and says so behind the first brace."""
    properties = {f"p{i}": {"type": "null"} for i in range(2000)}
    wide = JsonSchema(text=json.dumps({"type": "object", "properties": properties}))
    assert follows(wide, '{"p0":null,"p999":null,"p1998":null}')
    assert not follows(wide, '{"p999":null,"p0":null}')


def test_as_many_properties_as_documented_are_followed_with_a_large_vocabulary(
    shared: Path,
) -> None:
    """Names of properties took all 50,000 states of the lexer in the middle of an answer."""
    file = shared / "tokenizers" / "qwen3" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    (end,) = tokenizer.encode("<|im_end|>").ids
    vocab = tokenizer.get_vocab_size()
    large = GrammarCompiler(file, vocab=vocab, eos_ids=[end])
    names = [f"property_number_{i}" for i in range(2500)]
    required = {"properties": {name: {"type": "null"} for name in names}, "required": names}
    optional = {"properties": {name: {"type": "null"} for name in names[:MAX_OPTIONAL_PROPERTIES]}}
    few = [names[0], *names[MAX_OPTIONAL_PROPERTIES // 2 : MAX_OPTIONAL_PROPERTIES : 300]]
    for schema, chosen in ((required, names), (optional, few)):
        grammar = JsonSchema(text=json.dumps({"type": "object", **schema}))
        for _ in range(2):
            matcher = large.compile(grammar, frozenset({end}))
            for token in tokenizer.encode(json.dumps(dict.fromkeys(chosen))).ids:
                matcher.accept(token)
            assert matcher.done or end in ids_of(matcher)


def test_more_optional_properties_than_documented_are_refused_with_advice() -> None:
    properties = {f"p{i}": {"type": "null"} for i in range(MAX_OPTIONAL_PROPERTIES + 1)}
    error = refused(JsonSchema(text=json.dumps({"properties": properties}), param="guided_json"))
    assert error.param == "guided_json.properties"
    assert "make some required" in error.message


def test_a_schema_in_a_clients_grammar_is_followed_or_refused_with_advice() -> None:
    properties = {f"p{i}": {"type": "null"} for i in range(1500)}
    text = f"start: %json {json.dumps({'type': 'object', 'properties': properties})}"
    assert "too many continuations" in refused(LarkGrammar(text=text)).message


LISTED = {"type": "object", "properties": {"a": {"type": "integer"}}}
MORE = '{"a":1,"b":2}'


@pytest.mark.parametrize(
    ("schema", "open_"),
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
def test_an_object_has_the_properties_that_it_lists(schema: dict[str, Any], open_: bool) -> None:
    """Unless it says that it has more, or is not told all of itself in one place."""
    assert follows(JsonSchema(text=json.dumps(schema)), MORE) == open_


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


def hostile() -> Iterator[tuple[str, Grammar]]:
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


# Each of them ends a process, or takes it minutes or gigabytes, without one limit or other. So they
# are tried in a process of their own, on a thread as small as a server's.
_SCRIPT = """
import resource, sys, threading, time
from app.core.errors import AppError
from tests.engine.harness import grammar_compiler
from tests.grammar.test_llguidance_backend import ENDS, hostile

def attempt():
    for name, grammar in hostile():
        begun = time.process_time()
        try:
            grammar_compiler().compile(grammar, ENDS)
            said = "compiled"
        except AppError as error:
            said = error.kind.value
        print(f"{name}: {said}, {time.process_time() - begun:.2f}", flush=True)
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

thread = threading.Thread(target=attempt)
thread.start()
thread.join()
"""


def test_hostile_grammars_are_compiled_or_refused_in_time_and_memory() -> None:
    """Seconds of the processor, for all cores together; and kB, or on macOS bytes."""
    script = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    lines = script.stdout.splitlines()
    names = [name for name, _ in hostile()]
    assert [line.split(":")[0] for line in lines] == [*names, lines[-1]], script.stderr
    for line in lines[:-1]:
        assert float(line.split(", ")[1]) < 10, line
    assert int(lines[-1].split()[1]) >> (10 if sys.platform == "darwin" else 0) < 2 << 20


def test_a_grammar_that_means_one_text_in_many_ways_cannot_hold_up_a_step() -> None:
    """Nobody else's answer goes on while a mask is computed."""
    matcher = grammar_compiler().compile(
        LarkGrammar(text="start: e\ne: e e | e e e | /[a-z]/ | \n"), ENDS
    )
    times = list[float]()
    with contextlib.suppress(GrammarError):
        while len(times) < 300:
            begun = time.thread_time()
            matcher.accept(ord("a"))
            times.append(time.thread_time() - begun)
    assert 8 < len(times) < 300
    assert max(times) < 0.5
