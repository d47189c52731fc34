"""Templates that drop, reject or move messages are recognized, and no text is lost with any."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.requests import Message
from app.text.message_folding import PlacementRules
from app.text.prompt import PromptBuilder
from app.text.prompt_boundaries import common_prefix_length
from models import builtin
from tests.text.templates import (
    SYSTEM,
    USER,
    WEATHER,
    build_prompt,
    calls,
    make_prompt_builder,
    result,
)

# These repeat their instructions after the last message, or keep the last turn's reasoning only.
CHANGES_IN_A_LOOP = {
    "CohereForAI-c4ai-command-r-plus-tool_use.jinja",
    "hfjinja-CohereForAI_c4ai-command-r-v01.jinja",
    "hfjinja-CohereForAI_c4ai-command-r-v01_JSON_Schema.jinja",
    "hfjinja-LiquidAI_LFM2.5-VL-450M.jinja",
}

# characters of the longest generation prompt
GENERATION_PROMPT = 60

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}{{ c.function.arguments | tojson }}>"
    "{% endfor %}{% endfor %}"
)
FIRST_ONLY = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"


def rules_of(template: str) -> PlacementRules:
    return make_prompt_builder(template)._capabilities.placement  # pyright: ignore[reportPrivateUsage]  # the result


def test_a_template_that_keeps_every_message_gets_all_rules() -> None:
    assert rules_of(PLAIN) == PlacementRules()


@pytest.mark.parametrize(
    "template",
    [
        PLAIN.replace("{% for m in messages %}", FIRST_ONLY + "{% continue %}{% endif %}"),
        FIRST_ONLY + "{{ raise_exception('no') }}{% endif %}{% endfor %}" + PLAIN,
        "{% for m in messages if m.role == 'system' %}[system]{{ m.content }}{% endfor %}"
        + PLAIN.replace("in messages", "in messages if m.role != 'system'"),
        PLAIN.replace("{{ m.role }}", "{{ 'user' if m.role == 'system' else m.role }}"),
        PLAIN.replace(
            "]{{", "]{% if m.role == 'system' %}" + "Instructions. " * 20 + "{% endif %}{{"
        ),
    ],
    ids=["drops", "rejects", "hoists", "takes it for the user's", "repeats its instructions"],
)
def test_a_template_that_would_lose_or_move_a_system_message_is_recognized(template: str) -> None:
    assert rules_of(template).keeps_system_after == frozenset()
    prompt = build_prompt(
        make_prompt_builder(template), SYSTEM, USER, replace(SYSTEM, content="Now.")
    ).text
    assert prompt.endswith("Weather in Oslo?\n\nNow.")


def test_a_template_that_drops_the_reasoning_after_a_users_text_is_recognized() -> None:
    template = (
        "{% for m in messages %}{% set n = namespace(last=0) %}{% for o in messages %}"
        "{% if o.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
        "[{{ m.role }}]{% if loop.index0 > n.last %}{{ m.reasoning_content }}{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"
    )
    assert rules_of(template) == PlacementRules(keeps_user_after_results=False)


ALTERNATING = (
    "{% set n = namespace(next='user') %}{% for m in messages if m.role != 'system' %}"
    "{% if m.role != n.next %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set n.next = {'user': 'assistant', 'assistant': 'user'}[m.role] %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_a_template_whose_roles_must_alternate_is_recognized() -> None:
    rules = rules_of(ALTERNATING)
    assert not rules.keeps_several_user
    assert not rules.keeps_several_assistant
    assert rules.requires_user_first
    hello, more = (Message(role="assistant", content=text) for text in ("Hello.", "Ask me."))
    prompt = build_prompt(make_prompt_builder(ALTERNATING), hello, more, USER, USER).text
    assert prompt == (
        "[user][assistant]Hello.\n\nAsk me.[user]Weather in Oslo?\n\nWeather in Oslo?"
    )


def test_calls_that_become_text_also_alternate() -> None:
    more = Message(role="assistant", content="I look again.")
    prompt = build_prompt(
        make_prompt_builder(ALTERNATING), calls("Oslo"), result("Oslo"), more, calls("Rome"),
        result("Rome"),
    ).text  # fmt: skip
    assert prompt.count("[assistant]") == prompt.count("[user]") - 1 == 2
    assert "I look again.\n{" in prompt


def test_a_template_that_drops_the_text_of_a_call_gets_it_in_a_message_of_its_own() -> None:
    template = PLAIN.replace(
        "{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    ) + "{{ tools | tojson }}"  # fmt: skip
    rules = rules_of(template)
    assert (rules.keeps_text_of_calls, rules.keeps_text_before_calls) == (False, True)
    prompt = build_prompt(
        make_prompt_builder(template), USER, calls("Oslo", content="Let me see."), result("Oslo"),
        tools=(WEATHER,),
    ).text  # fmt: skip
    assert "[assistant]Let me see.[assistant]<get_weather" in prompt


def agent_session(rounds: int) -> Iterator[tuple[list[Message], list[str]]]:
    """The requests of a tool loop with text next to the results, and a new question; each with the
    words that it contains."""
    messages = [Message(role="system", content="HEAD"), Message(role="user", content="FIRST")]
    words = ["HEAD", "FIRST"]
    for n in range(rounds):
        place, reminder, count = f"Oslo{n}", f"REMINDER{n}", f"COUNT{n}"
        messages += [
            replace(calls(place), reasoning=f"THOUGHT{n}."),
            result(place),
            Message(role="user", content=reminder),
            Message(role="system", content=count),
        ]
        words += [place, f"sun over {place[::-1]}", reminder, count]
        yield list(messages), list(words)
    texts = {"assistant": "ANSWER", "system": "MIDDLE", "user": "SECOND", "developer": "END"}
    messages += [Message(role=role, content=text) for role, text in texts.items()]
    yield messages, [*words, *texts.values()]


def test_no_text_of_an_agents_session_is_lost_with_any_template(
    builders: dict[str, PromptBuilder],
) -> None:
    for name, builder in builders.items():
        for messages, words in agent_session(2):
            prompt = build_prompt(builder, *messages, tools=(WEATHER,)).text
            assert [word for word in words if word not in prompt] == [], name


TURNS = ("system", "developer", "user", "assistant", "call", "text and call")


def make_turn(kind: str, number: int) -> tuple[list[Message], list[str]]:
    """The messages of a turn, and their texts."""
    text, place = f"TEXT{number}.", f"Place{number}"
    match kind:
        case "call":
            return [calls(place), result(place)], [place, f"sun over {place[::-1]}"]
        case "text and call":
            turn = [calls(place, content=text), result(place)]
            return turn, [text, place, f"sun over {place[::-1]}"]
        case _:
            return [Message(role=kind, content=text)], [text]


def check_texts(builder: PromptBuilder, kinds: tuple[str, ...], *, tools: bool) -> None:
    """Each text of the conversation is in the prompt, and the request is not rejected."""
    turns = [make_turn(kind, number) for number, kind in enumerate(kinds)]
    messages = [message for turn, _ in turns for message in turn]
    prompt = build_prompt(builder, *messages, tools=(WEATHER,) if tools else ()).text
    assert [text for _, texts in turns for text in texts if text not in prompt] == [], kinds


def test_no_text_is_lost_with_any_template(builders: dict[str, PromptBuilder]) -> None:
    """Also with a system message alone, and with a greeting first. No template rejects them. Half
    of the orders of two turns with each template."""
    pairs = [*itertools.product(TURNS, repeat=2)]
    for place, builder in enumerate(builders.values()):
        for number, kinds in enumerate([*((kind,) for kind in TURNS), *pairs[place % 2 :: 2]]):
            check_texts(builder, kinds, tools=number % 2 == 0)


@pytest.mark.exhaustive
def test_no_text_is_lost_with_any_template_and_any_order_of_turns(
    builders: dict[str, PromptBuilder],
) -> None:
    for builder in builders.values():
        for size, tools in itertools.product((2, 3), (False, True)):
            for kinds in itertools.product(TURNS, repeat=size):
                check_texts(builder, kinds, tools=tools)


@given(data=st.data(), kinds=st.lists(st.sampled_from(TURNS), min_size=3, max_size=7))
@settings(max_examples=60)
def test_no_text_is_lost_with_any_template_in_longer_conversations(
    builders: dict[str, PromptBuilder], data: st.DataObject, kinds: list[str]
) -> None:
    name = data.draw(st.sampled_from(sorted(builders)))
    check_texts(builders[name], tuple(kinds), tools=data.draw(st.booleans()))


def test_no_text_is_lost_with_the_template_of_the_built_in_model() -> None:
    folder = Path(builtin.__file__).parent
    source = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
    for size in (1, 2, 3):
        for kinds in itertools.product(TURNS, repeat=size):
            check_texts(make_prompt_builder(source), kinds, tools=size != 2)


def test_each_prompt_of_a_tool_loop_begins_with_the_one_before(
    builders: dict[str, PromptBuilder],
) -> None:
    changing: set[str] = set()
    for name, builder in builders.items():
        prompts = [build_prompt(builder, *m, tools=(WEATHER,)).text for m, _ in agent_session(3)][
            :3
        ]
        for earlier, later in itertools.pairwise(prompts):
            if common_prefix_length(earlier, later) < len(earlier) - GENERATION_PROMPT:
                changing.add(name)
    assert changing == CHANGES_IN_A_LOOP & builders.keys()


def test_text_beside_results_keeps_the_reasoning_of_the_loop(
    builders: dict[str, PromptBuilder],
) -> None:
    """A template that keeps reasoning keeps as much of it as without that text."""
    keeping = 0
    for name, builder in builders.items():
        messages = next(messages for messages, _ in agent_session(2))
        bare = [m for m in messages if (m.content or "")[:5] not in ("REMIN", "COUNT")]
        with_text, without = (
            build_prompt(builder, *given, tools=(WEATHER,)).text.count("THOUGHT")
            for given in (messages, bare)
        )
        assert with_text == without, name
        keeping += without > 0
    assert keeping > len(builders) // 8
