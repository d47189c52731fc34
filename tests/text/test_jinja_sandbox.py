"""Jinja with the conventions of chat templates: real templates, and hostile ones."""

import json
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest

from app.core.errors import AppError, ErrorKind
from app.text.jinja_sandbox import SandboxedTemplate
from tests.rows import rows

NOON = datetime(2025, 7, 10, 12)

BREAK_AND_CONTINUE = """
{%- for i in range(9) -%}
  {%- if i == 1 %}{% continue %}{% endif -%}
  {%- if i == 4 %}{% break %}{% endif -%}
  {{ i }}
{%- endfor -%}
"""

NEIGHBOURS = """
{%- for c in s -%}
  {{ loop.index }}/{{ loop.length }}{{ ';' if not loop.last }}{{ loop.previtem }}{{ loop.nextitem }}
{%- endfor -%}
"""


def load_templates(folder: Path) -> Callable[[str], SandboxedTemplate]:
    """The templates in a folder, by name, each compiled once."""
    return cache(lambda name: SandboxedTemplate((folder / name).read_text(), location=name))


def render(source: str, seconds: float = 5.0, **context) -> str:
    return SandboxedTemplate(source, location="a file", seconds=seconds).render(
        context, now=lambda: NOON
    )


def refusal(source: str, seconds: float = 5.0, **context) -> str:
    with pytest.raises(AppError) as caught:
        render(source, seconds, **context)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")
    return caught.value.message


@pytest.mark.no_cover
class TestRealTemplates:
    def test_render_as_upstream_documents(self, shared):
        template = load_templates(shared / "chat_templates")
        rows = (shared / "chat_templates/renderings_upstream.jsonl").read_text().splitlines()
        failures: list[str] = []
        for row in map(json.loads, rows):
            now = datetime.fromisoformat(row.get("now", NOON.isoformat()))
            result = template(row["template"]).render(
                row["template_input"], now=lambda now=now: now
            )
            if result != row["expected"]:
                failures.append(row["id"])
        assert len(rows) == 252
        assert failures == []

    def test_render_as_transformers_does(self, shared):
        folder = shared / "chat_templates"
        template = load_templates(folder)
        scenarios = json.loads((folder / "scenarios.json").read_text())
        rows = (folder / "renderings_reference.jsonl").read_text().splitlines()
        failures: list[str] = []
        for row in map(json.loads, rows):
            scenario = scenarios[row["scenario"]]
            context = {
                "messages": scenario["messages"],
                "tools": scenario.get("tools"),
                "documents": None,
                "add_generation_prompt": row["add_generation_prompt"],
                **row["kwargs"],
            }
            try:
                result = ("expected", template(row["template"]).render(context, now=lambda: NOON))
            except AppError as error:
                result = ("raises", error.message)
            if result not in row.items():
                failures.append(row["id"])
        assert len(rows) == 701
        assert failures == []


class TestConventions:
    def test_blocks_leave_no_blank_lines(self):
        assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"

    def test_loops_support_break_and_continue(self):
        assert render(BREAK_AND_CONTINUE) == "023"

    def test_json_is_neither_escaped_nor_sorted(self):
        value = {"b": "<é> & '", "a": [1]}
        assert render("{{ v | tojson }}", v=value) == '{"b": "<é> & \'", "a": [1]}'
        assert render("{{ v | tojson(sort_keys=true, separators=(',', ':')) }}", v=value) == (
            '{"a":[1],"b":"<é> & \'"}'
        )
        assert render("{{ v | tojson(indent=1) }}", v={"a": 1}) == '{\n "a": 1\n}'
        assert render("{{ v | tojson(ensure_ascii=true) }}", v="é") == '"\\u00e9"'

    def test_the_date_comes_from_the_clock(self):
        assert render("{{ strftime_now('%Y-%m-%d') }}") == "2025-07-10"

    def test_generation_tags_render_nothing_and_are_a_scope(self):
        source = "{% set x = 1 %}[{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}]{{ x }}"
        assert render(source) == "[2]1"

    def test_undefined_values_are_empty(self):
        assert render("[{{ nothing }}]{% for x in nothing %}{% else %}none{% endfor %}") == "[]none"

    def test_loops_know_their_length_and_neighbours(self):
        assert render(NEIGHBOURS, s="ab") == "1/2;b2/2a"

    def test_loops_filter_unpack_and_recurse(self):
        source = "{% for k, v in d.items() if v > 1 %}{{ k }}{% endfor %}"
        assert render(source, d={"a": 1, "b": 2}) == "b"
        source = "{% for n in t recursive %}{{ n.v }}({{ loop(n.c) }}){% endfor %}"
        assert render(source, t=[{"v": 1, "c": [{"v": 2, "c": []}]}]) == "1(2())"


class TestBadTemplates:
    @pytest.mark.parametrize(
        ("source", "line"),
        [
            ("a\n{% if %}", " in line 2"),
            ("{{ x | nonsense }}", " in line 1"),
            ("{% for x in y %}", " in line 1"),
            ("{% for x in y %}" * 30 + "{% endfor %}" * 30, ""),
        ],
    )
    def test_invalid_templates_are_rejected_when_loaded(self, source, line):
        with pytest.raises(AppError, match=f"chat template in a file is invalid{line}:") as caught:
            SandboxedTemplate(source, location="a file")
        assert caught.value.kind is ErrorKind.MODEL_FILES

    def test_message_text_in_an_error_is_redacted(self):
        for source in (
            "{{ raise_exception('not ' ~ prompt) }}",
            "{{ {}[prompt].x }}",
        ):
            with pytest.raises(AppError) as caught:
                render(source, prompt="a prompt")
            assert "…" in caught.value.redact()
            assert "a prompt" not in caught.value.redact()

    def test_raise_exception_gives_the_error_message(self):
        assert refusal("{{ raise_exception('no system role') }}") == "no system role"

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages[0].content.x.y }}",
            "{{ 1 / 0 }}",
            "{{ messages + 1 }}",
            "{% include 'other' %}",
            "{{ nothing | tojson }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ],
    )
    def test_a_failing_template_is_an_invalid_conversation(self, source):
        assert "cannot render this conversation" in refusal(source, messages=[{"content": "x"}])

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ raise_exception.__globals__['json'] }}",
            "{{ cycler.__init__.__globals__.os.getcwd() }}",
            "{{ '{0.__class__.__mro__}'.format(1) }}",
            "{{ ('%s' | attr('__class__')).mro() }}",
            "{{ range(1000000) }}",
        ],
    )
    def test_templates_cannot_leave_the_sandbox(self, source):
        assert "cannot render this conversation" in refusal(source, messages=[])

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for i in m %}{% for j in m %}{% for k in m %}{% endfor %}{% endfor %}{% endfor %}",
            "{% macro f(n) %}{{ f(n - 1) + f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
            "{% for i in m[:60] recursive %}{{ loop(m[i+1:60]) }}{{ loop(m[i+1:60]) }}{% endfor %}",
        ],
    )
    def test_the_run_time_is_limited(self, source):
        assert "longer than 0.05 seconds" in refusal(source, 0.05, m=list(range(5000)))

    def test_oversized_templates_are_not_compiled(self):
        with pytest.raises(AppError, match="in a file has more than 262144 characters"):
            SandboxedTemplate("{{ a }}" * 100_000, location="a file")

    @pytest.mark.parametrize("source", ["(" * 9999, "[" * 9999, "not " * 9999, "1" + "+1" * 9999])
    def test_deeply_nested_templates_are_rejected(self, source):
        with pytest.raises(AppError, match="chat template in a file is invalid"):
            SandboxedTemplate("{{ " + source + " }}", location="a file")

    def test_error_messages_are_one_line_of_bounded_length(self):
        assert refusal("{{ raise_exception('a\nb' * 99999) }}").startswith("a ba ba b")
        assert len(refusal("{{ raise_exception('ab' * 99999) }}")) < 600
        assert len(refusal("{{ {}['ab' * 99999].x }}")) < 600


X = "{% set x = 'x' * 1000000 %}"
DOUBLED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"

BOMBS = [
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [1] * 10**10 }}",
    "{% set n = 99 %}{{ n ** n ** n }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%(a)s' * 100000 % {'a': 'x' * 100000} }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ 'a' | center(10000000000) }}",
    "{{ 'a' | indent(10000000000, first=true) }}",
    "{{ {'a': [1]} | tojson(indent=10**10) }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ 1.5 | round(10**9, 'ceil') }}",
    X + "{{ [x] * 100000 }}",
    X + "{{ ([x] * 100000) | join }}",
    X + "{{ ','.join([x] * 100000) }}",
    X + "{{ x.join(['a'] * 100000) }}",
    X + "{{ ([1] * 100000) | join(x) }}",
    X + "{{ ('a' * 100000).replace('a', x) }}",
    X + "{{ ('a' * 100000) | replace('a', x) }}",
    X + "{{ ('a' * 100000).translate({97: x}) }}",
    X + "{% for i in range(99999) %}{{ x }}{% endfor %}",
    X + "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [x ~ i] %}{% endfor %}",
    X + "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}",
    "{% set y %}{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
    "{% macro m() %}{% for i in range(99999) %}"
    + "y" * 9999
    + "{% endfor %}{% endmacro %}{{ m() }}",
    DOUBLED.replace("STEP", "ns.x + ns.x"),
    DOUBLED.replace("[1]", "'x'").replace("STEP", "ns.x + ns.x"),
    DOUBLED.replace("[1]", "'x'").replace("STEP", "ns.x ~ ns.x"),
    *(
        DOUBLED.replace("STEP", "[ns.x, ns.x]") + use
        for use in (
            "{{ ns.x }}",
            "{{ ns.x | tojson }}",
            "{{ ns.x | string }}",
            "{{ 'a' ~ ns.x }}",
            "{{ '%s' % ns.x }}",
            "{{ '{}'.format(ns.x) }}",
            "{{ [ns.x] | join }}",
        )
    ),
    *(
        DOUBLED.replace("namespace(x=[1])", "namespace(x=[1], y=[1])").replace(
            "{% set ns.x = STEP %}",
            "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}",
        )
        + use
        for use in (
            "{{ ns.x == ns.y }}",
            "{{ 1 if ns.x is eq(ns.y) }}",
            "{{ [ns.x] | select('eq', ns.y) | list }}",
            "{{ ns.x in [ns.y] }}",
            "{{ [ns.x].index(ns.y) }}",
            "{{ [ns.x, ns.y] | sort | length }}",
            "{{ [ns.x, ns.y] | max }}",
            "{{ ns }}",
        )
    ),
    DOUBLED.replace("[1]", "(1,)").replace("STEP", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    DOUBLED.replace("[1]", "(1,)").replace("STEP", "(ns.x, ns.x)") + "{{ [ns.x] | unique | list }}",
    "{{ ([[1]] * 100000) | sum(start=[]) }}",
]


@pytest.mark.product
@pytest.mark.parametrize("source", BOMBS)
def test_the_size_of_values_is_limited(source):
    """Also during compilation, when Jinja computes constants."""
    tracemalloc.start()
    try:
        refusal(source, 0.5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 30


def test_filters_for_html_are_removed():
    for name in ("urlize", "wordwrap", "xmlattr", "pprint"):
        with pytest.raises(AppError, match=f"No filter named '{name}'"):
            SandboxedTemplate("{{ 'x' | " + name + " }}", location="a file")


@rows(
    ("source", "expected"),
    [
        ("{{ '%5.2f|%-3s|%%|%(a)s' % {'a': 1} if false else '%5.2f|%-3s|%%' % (1.5, 'x') }}",
         " 1.50|x  |%"),
        ("{{ '%s-%s' | format(1, 'b') }}", "1-b"),
        ("{{ '{:>5}|{a[0]}|{}'.format('x', 2, a=[3]) }}", "    x|3|2"),
        ("{{ '{a}'.format_map({'a': 1}) }}", "1"),
        ("{{ [1, 2] | join(', ') }}", "1, 2"),
        ("{{ [{'a': 1}, {'a': 2}] | join('+', attribute='a') }}", "1+2"),
        ("{{ ', '.join(['a', 'b']) }}{{ 'xyz' | join('-') }}", "a, bx-y-z"),
        ("{{ 1 ~ none ~ [2] ~ nothing }}", "1None[2]"),
        ("{{ 'abcdef'[1:4] }}{{ [1, 2, 3][::-1] }}", "bcd[3, 2, 1]"),
        ("{{ 'abc'[-1] }}{{ 'abcdef'[:-1:2] }}", "cace"),
        ("{{ 'ab' * 3 }}{{ [1] * 2 }}", "ababab[1, 1]"),
        ("{{ 2 ** 10 }}{{ 7 % 4 }}{{ 2 ** -1 }}", "102430.5"),
        ("{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 1 + 2.5 }}", "ab[1, 2]3.5"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ 'aXbX' | replace('X', '--', 1) }}{{ 'aa'.replace('a', 'b', 1) }}", "a--bXba"),
        ("{{ [1, 2, 3] | batch(2, 0) | list }}{{ 2.567 | round(1) }}", "[[1, 2], [3, 0]]2.6"),
        ("{{ [[1], [2]] | sum(start=[]) }}{{ [1, 2] | sum }}", "[1, 2]3"),
    ],
)  # fmt: skip
def test_limited_operations_work_as_usual(source, expected):
    assert render(source) == expected


def test_a_conversation_of_megabytes_is_rendered():
    messages = [{"role": "user", "content": "word " * 20_000} for _ in range(100)]
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = m.role + ': ' + m.content | trim + '\n' %}{{ ns.text }}{% endfor %}"
    )
    assert len(render(source, messages=messages)) > 9_000_000


def test_a_failed_render_does_not_reduce_the_limits_of_the_next_one():
    template = SandboxedTemplate(
        "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
        "{{ 'x' * 100000000 }}",
        location="a file",
        seconds=0.05,
    )

    def render_rows(count: int) -> int:
        return len(template.render({"n": count}, now=lambda: NOON))

    with pytest.raises(AppError, match="longer than"):
        render_rows(99_999)
    assert render_rows(1) == render_rows(1) == 100_000_000


def test_threads_render_one_template_at_once():
    template = SandboxedTemplate("{% for i in n %}{{ i }}{{ wait() }},{% endfor %}", location="x")
    both_render = threading.Barrier(2, timeout=60)

    def wait() -> str:
        both_render.wait()
        return ""

    def render_name(name: str) -> str:
        return template.render({"n": [name] * 5, "wait": wait}, now=lambda: NOON)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(render_name, "ab")) == ["a," * 5, "b," * 5]
