"""Jinja as templates expect it; against real templates, and against bad ones."""

import json
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest

from app.core.errors import AppError, Kind
from app.text.template import Template

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


def compiled(folder: Path) -> Callable[[str], Template]:
    """The templates in a folder, by name, each compiled once."""
    return cache(lambda name: Template((folder / name).read_text(), model=name))


def render(source: str, seconds: float = 5.0, **context) -> str:
    return Template(source, model="test-model", seconds=seconds).render(context, now=lambda: NOON)


def refusal(source: str, seconds: float = 5.0, **context) -> str:
    with pytest.raises(AppError) as caught:
        render(source, seconds, **context)
    assert (caught.value.kind, caught.value.param) == (Kind.INVALID, "messages")
    return caught.value.message


class TestRealTemplates:
    def test_render_as_upstream_documents(self, shared):
        template = compiled(shared / "chat_templates")
        rows = (shared / "chat_templates/renderings_upstream.jsonl").read_text().splitlines()
        wrong: list[str] = []
        for row in map(json.loads, rows):
            now = datetime.fromisoformat(row.get("now", NOON.isoformat()))
            got = template(row["template"]).render(row["template_input"], now=lambda now=now: now)
            if got != row["expected"]:
                wrong.append(row["id"])
        assert len(rows) == 252
        assert wrong == []

    def test_render_as_transformers_does(self, shared):
        folder = shared / "chat_templates"
        template = compiled(folder)
        scenarios = json.loads((folder / "scenarios.json").read_text())
        rows = (folder / "renderings_reference.jsonl").read_text().splitlines()
        wrong: list[str] = []
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
                got = ("expected", template(row["template"]).render(context, now=lambda: NOON))
            except AppError as error:
                got = ("raises", error.message)
            if got not in row.items():
                wrong.append(row["id"])
        assert len(rows) == 701
        assert wrong == []


class TestConventions:
    def test_blocks_leave_no_blank_lines(self):
        assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"

    def test_loops_can_be_left_and_skipped(self):
        assert render(BREAK_AND_CONTINUE) == "023"

    def test_json_is_neither_escaped_nor_sorted(self):
        value = {"b": "<é> & '", "a": [1]}
        assert render("{{ v | tojson }}", v=value) == '{"b": "<é> & \'", "a": [1]}'
        assert render("{{ v | tojson(sort_keys=true, separators=(',', ':')) }}", v=value) == (
            '{"a":[1],"b":"<é> & \'"}'
        )
        assert render("{{ v | tojson(indent=1) }}", v={"a": 1}) == '{\n "a": 1\n}'
        assert render("{{ v | tojson(ensure_ascii=true) }}", v="é") == '"\\u00e9"'

    def test_the_date_is_the_given_clocks(self):
        assert render("{{ strftime_now('%Y-%m-%d') }}") == "2025-07-10"

    def test_generation_marks_show_nothing_and_are_a_scope(self):
        source = "{% set x = 1 %}[{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}]{{ x }}"
        assert render(source) == "[2]1"

    def test_what_is_not_there_is_empty(self):
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
    def test_are_refused_when_they_are_loaded(self, source, line):
        with pytest.raises(
            AppError, match=f"chat template of test-model is broken{line}:"
        ) as caught:
            Template(source, model="test-model")
        assert caught.value.kind is Kind.MODEL_FILES

    def test_speak_for_themselves(self):
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
    def test_fail_as_a_mistake_in_the_conversation(self, source):
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
    def test_do_not_leave_the_sandbox(self, source):
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
    def test_do_not_run_for_ever(self, source):
        assert "longer than 0.05 seconds" in refusal(source, 0.05, m=list(range(5000)))
