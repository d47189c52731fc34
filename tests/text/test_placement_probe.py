"""Templates that drop, reject or move messages are recognized, and no text is lost with any."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.requests import Message
from app.text.message_folding import PlacementRules
from app.text.prompt import PromptBuilder
from app.text.prompt_boundaries import common_prefix_length
from tests.text.families.rows import templates
from tests.text.templates import (
    SYSTEM,
    USER,
    WEATHER,
    build_prompt,
    calls,
    make_prompt_builder,
    result,
)

MADE_FOR_OTHER_CONVERSATIONS = {
    "hfjinja-fireworks-ai_firefunction-v1.jinja": "wants a turn of a role named functions",
    "hfjinja-meta-llama_Llama-Guard-3-11B-Vision.jinja": "judges the last two turns",
    "MiroThinker.jinja": "assigns to what is no namespace, which Jinja allows nowhere",
}

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


@pytest.fixture(scope="module")
def builders(shared: Path) -> dict[str, PromptBuilder]:
    return {
        name: make_prompt_builder(source)
        for name, source in templates(shared).items()
        if name not in MADE_FOR_OTHER_CONVERSATIONS
    }


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


def agent_session(rounds: int) -> Iterator[tuple[list[Message], list[str]]]:
    """The requests of a tool loop with texts beside the results, and a new question; each with the
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
    assert changing == CHANGES_IN_A_LOOP


def test_text_beside_results_keeps_the_reasoning_of_the_loop(
    builders: dict[str, PromptBuilder],
) -> None:
    """As many thoughts as without that text, wherever the template keeps any."""
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
    assert keeping >= 20
