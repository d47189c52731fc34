"""Capabilities of chat templates, detected by trial renderings, and the adapted messages."""

import pytest

from app.text.capabilities import TemplateCapabilities, detect_capabilities
from app.text.chat_template import ChatTemplate
from tests.text.templates import (
    CLOCK,
    SYSTEM,
    USER,
    WEATHER,
    build_prompt,
    calls,
    make_prompt_builder,
    result,
)

# renders the tools, and each message with its calls
ALL = (
    "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }}:{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"
)
# the additional restriction of a template, by capability
RESTRICTIONS = {
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


def get_capabilities(template: str) -> TemplateCapabilities:
    return make_prompt_builder(template)._capabilities  # pyright: ignore[reportPrivateUsage]


def render_prompt(template: str, *messages: object) -> str:
    return build_prompt(make_prompt_builder(template), *messages, tools=(WEATHER, CLOCK)).text  # pyright: ignore[reportArgumentType]


def test_a_template_without_restrictions_is_not_adapted() -> None:
    assert get_capabilities(ALL) == TemplateCapabilities(
        supports_tools=True, supports_tool_calls=True, supports_tool_calls_without_tools=True
    )


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_each_restriction_is_detected_and_applied(name: str) -> None:
    template = RESTRICTIONS[name] + ALL
    assert getattr(get_capabilities(template), name)
    prompt = render_prompt(template, USER, calls("Rome", "Bonn"), result("Bonn"), result("Rome"))
    for word in ("get_time", "Rome", "Bonn", "sun over emoR", "sun over nnoB"):
        assert word in prompt


def test_all_restrictions_together_are_detected() -> None:
    template = "".join(RESTRICTIONS.values()) + ALL
    assert all(getattr(get_capabilities(template), name) for name in RESTRICTIONS)


def test_parallel_calls_are_rendered_one_after_the_other() -> None:
    history = (USER, calls("Rome", "Bonn", content="Both."), result("Bonn"), result("Rome"))
    prompt = render_prompt(RESTRICTIONS["requires_single_calls"] + ALL, *history)
    order = ("Both.", "Rome", "sun over emoR", "Bonn", "sun over nnoB")
    positions = [prompt.index(word) for word in order]
    assert positions == sorted(positions)


def test_parallel_calls_without_a_result_are_rendered_as_text() -> None:
    template = RESTRICTIONS["requires_single_calls"] + ALL
    prompt = render_prompt(template, USER, calls("Rome", "Bonn"), result("Rome"))
    assert '"arguments": {"city": "Bonn"}}' in prompt
    assert "sun over emoR" in prompt


def test_short_ids_are_kept() -> None:
    message = calls("Rome", content=None)
    short_id = (
        TemplateCapabilities(requires_short_call_ids=True)
        .adapt_messages([message])[0]
        .tool_calls[0]
        .id
    )
    assert (len(short_id), short_id.isalnum()) == (9, True)
    assert (
        TemplateCapabilities(requires_short_call_ids=True)
        .adapt_messages(
            TemplateCapabilities(requires_short_call_ids=True).adapt_messages([message])
        )[0]
        .tool_calls[0]
        .id
        == short_id
    )


def test_a_result_keeps_the_id_of_its_call() -> None:
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


def test_the_system_message_moves_to_the_user_message_without_a_system_role() -> None:
    assert not get_capabilities(NO_SYSTEM + ALL).supports_system_role
    prompt = build_prompt(make_prompt_builder(NO_SYSTEM + ALL), SYSTEM, USER).text
    assert prompt == "[user]Be brief.\n\nWeather in Oslo?"
    assert build_prompt(make_prompt_builder(NO_SYSTEM + ALL), SYSTEM).text == "[user]Be brief."


def test_a_template_that_ignores_tools_does_not_support_them() -> None:
    assert not get_capabilities(ALL.replace("t.function | tojson", "''")).supports_tools


def test_calls_that_the_template_ignores_are_rendered_as_text() -> None:
    template = ALL.replace("c.function.arguments | tojson", "''")
    assert not get_capabilities(template).supports_tool_calls
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in render_prompt(
        template, USER, calls("Rome"), result("Rome")
    )


def test_a_schema_that_breaks_the_template_is_rendered_as_text() -> None:
    """Command R's template reads additionalProperties of every object."""
    failing = "{% for t in tools or [] %}{{ '' + t.function.parameters.required[0] }}{% endfor %}"
    builder = make_prompt_builder(failing + ALL)
    assert "You can call these functions" not in build_prompt(builder, USER, tools=(WEATHER,)).text
    prompt = build_prompt(builder, USER, tools=(CLOCK,))
    assert "You can call these functions" in prompt.text
    assert '{"name": "get_time"' in prompt.text


def test_the_detection_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.text.capabilities._DETECTION_TIMEOUT", -1.0)
    calls_to_render: list[object] = []

    def render(messages: object, **_: object) -> str:
        calls_to_render.append(messages)
        return ""

    assert not detect_capabilities(render).supports_tools
    assert calls_to_render == []


def test_capabilities_of_a_chat_template_can_be_detected(files: object) -> None:
    """`detect_capabilities` takes `ChatTemplate.render`."""
    chat: ChatTemplate = ChatTemplate(files(chat_template=ALL))  # pyright: ignore[reportCallIssue, reportUnknownArgumentType]
    assert detect_capabilities(chat.render).supports_tools
