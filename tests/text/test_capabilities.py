"""What templates mind, found out by trying them; and what is done about it."""

import pytest

from app.text.capabilities import TemplateCapabilities, detect_capabilities
from app.text.chat_template import ChatTemplate
from tests.text.templates import CLOCK, SYSTEM, USER, WEATHER, calls, conversations, result, written

# each turn, its calls and the tools; and then what the template minds
ALL = (
    "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }}:{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"
)
MINDS = {
    "requires_tool_list": "{% if tools is none %}{{ raise_exception('x') }}{% endif %}",
    "requires_tool_description": (
        "{% for t in tools or [] %}{{ '' + t.function.description }}{% endfor %}"
    ),
    "requires_string_arguments": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ '' + c.function.arguments }}{% endfor %}{% endfor %}"
    ),
    "requires_short_call_ids": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('x') }}{% endif %}{% endfor %}{% endfor %}"
    ),
    "requires_single_calls": (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
        "{{ raise_exception('x') }}{% endif %}{% endfor %}"
    ),
}
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('x') }}"
    "{% endif %}{% endfor %}"
)


def known(template: str) -> TemplateCapabilities:
    return conversations(template)._capabilities  # pyright: ignore[reportPrivateUsage]  # what it found


def told(template: str, *messages: object) -> str:
    return written(conversations(template), *messages, tools=(WEATHER, CLOCK)).text  # pyright: ignore[reportArgumentType]


def test_a_template_that_minds_nothing_is_left_alone() -> None:
    assert known(ALL) == TemplateCapabilities(
        supports_tools=True, supports_tool_calls=True, supports_tool_calls_without_tools=True
    )


@pytest.mark.parametrize("name", MINDS)
def test_what_it_minds_is_found_out_and_done(name: str) -> None:
    template = MINDS[name] + ALL
    assert getattr(known(template), name)
    prompt = told(template, USER, calls("Rome", "Bonn"), result("Bonn"), result("Rome"))
    for word in ("get_time", "Rome", "Bonn", "sun over emoR", "sun over nnoB"):
        assert word in prompt


def test_all_of_it_together_is_found_out_too() -> None:
    template = "".join(MINDS.values()) + ALL
    assert all(getattr(known(template), name) for name in MINDS)


def test_calls_of_a_turn_are_told_one_after_the_other() -> None:
    history = (USER, calls("Rome", "Bonn", content="Both."), result("Bonn"), result("Rome"))
    prompt = told(MINDS["requires_single_calls"] + ALL, *history)
    order = ("Both.", "Rome", "sun over emoR", "Bonn", "sun over nnoB")
    places = [prompt.index(word) for word in order]
    assert places == sorted(places)


def test_calls_that_lack_a_result_cannot_be_parted_and_are_told_in_words() -> None:
    template = MINDS["requires_single_calls"] + ALL
    prompt = told(template, USER, calls("Rome", "Bonn"), result("Rome"))
    assert '"arguments": {"city": "Bonn"}}' in prompt
    assert "sun over emoR" in prompt


def test_ids_that_are_brief_already_are_kept() -> None:
    short = calls("Rome", content=None)
    given = (
        TemplateCapabilities(requires_short_call_ids=True)
        .adapt_messages([short])[0]
        .tool_calls[0]
        .id
    )
    assert (len(given), given.isalnum()) == (9, True)
    assert (
        TemplateCapabilities(requires_short_call_ids=True)
        .adapt_messages(TemplateCapabilities(requires_short_call_ids=True).adapt_messages([short]))[
            0
        ]
        .tool_calls[0]
        .id
        == given
    )


def test_a_result_and_its_call_keep_one_id() -> None:
    call, answer = TemplateCapabilities(requires_short_call_ids=True).adapt_messages(
        [calls("Rome"), result("Rome")]
    )
    assert call.tool_calls[0].id == answer.tool_call_id


def test_results_are_named_after_their_calls() -> None:
    assert (
        TemplateCapabilities().adapt_messages([calls("Rome"), result("Rome")])[1].name
        == "get_weather"
    )
    assert TemplateCapabilities().adapt_messages([result("Rome")])[0].name is None


def test_what_the_system_says_is_said_by_the_user_where_there_is_no_system() -> None:
    assert not known(NO_SYSTEM + ALL).supports_system_role
    prompt = written(conversations(NO_SYSTEM + ALL), SYSTEM, USER).text
    assert prompt == "[user]Be brief.\n\nWeather in Oslo?"
    assert written(conversations(NO_SYSTEM + ALL), SYSTEM).text == "[user]Be brief."


def test_tools_that_are_not_shown_are_not_taken_for_offered() -> None:
    assert not known(ALL.replace("t.function | tojson", "''")).supports_tools


def test_calls_that_are_not_shown_are_told_in_words() -> None:
    silent = ALL.replace("c.function.arguments | tojson", "''")
    assert not known(silent).supports_tool_calls
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in told(
        silent, USER, calls("Rome"), result("Rome")
    )


def test_a_template_that_fails_on_one_schema_gets_this_one_in_words() -> None:
    """Command R's looks for additionalProperties in every object."""
    picky = "{% for t in tools or [] %}{{ '' + t.function.parameters.required[0] }}{% endfor %}"
    talk = conversations(picky + ALL)
    assert "You can call these functions" not in written(talk, USER, tools=(WEATHER,)).text
    prompt = written(talk, USER, tools=(CLOCK,))
    assert "You can call these functions" in prompt.text
    assert '{"name": "get_time"' in prompt.text


def test_a_template_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.text.capabilities._DETECTION_TIMEOUT", -1.0)
    rendered: list[object] = []

    def render(messages: object, **_: object) -> str:
        rendered.append(messages)
        return ""

    assert not detect_capabilities(render).supports_tools
    assert rendered == []


def test_the_template_itself_can_be_tried(files: object) -> None:
    """`ChatTemplate.render` is what `manners` wants."""
    made: ChatTemplate = ChatTemplate(files(chat_template=ALL))  # pyright: ignore[reportCallIssue, reportUnknownArgumentType]
    assert detect_capabilities(made.render).supports_tools
