"""Ends of messages in a prompt, and prompts that end within the last message."""

from dataclasses import replace

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.requests import Conversation, GenerateRequest, Message
from app.text.prompt import PromptBuilder, RenderedPrompt
from app.text.prompt_boundaries import common_prefix_length
from tests.text.templates import (
    SYSTEM,
    USER,
    WEATHER,
    calls,
    make_prompt_builder,
    result,
)

TAGGED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</m>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKS = TAGGED.replace(
    "{{ m.content }}", "<think>{{ m.reasoning_content }}</think>{{ m.content }}"
)


def build_text(
    builder: PromptBuilder, *messages: Message, tools: bool = False, continues: bool = False
) -> RenderedPrompt:
    request = GenerateRequest(model="made", prompt="", tools=(WEATHER,) if tools else ())
    conversation = Conversation(messages=messages, continue_final=continues)
    return builder.build(request, conversation, needs_message_ends=True)


def make_message(text: str | None, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


def texts_before(prompt: RenderedPrompt) -> list[str]:
    return [prompt.text[:at] for at in prompt.message_ends]


def test_messages_end_where_prompts_diverge() -> None:
    history = (SYSTEM, USER, make_message("Seven."), USER, calls("Oslo"), result("Oslo"))
    ends = texts_before(build_text(make_prompt_builder(TAGGED), *history))
    start = "[system]Be brief.</m>[user]"
    user = start + "Weather in Oslo?</m>[assistant]Seven.</m>"
    assert ends[0] == start
    assert ends[1].endswith("Seven.") or ends[1] == user
    assert ends[2] == user + "[user]Weather in Oslo?</m>"
    assert ends[3].endswith("sun over olsO</m>")
    assert len(ends) == 4


def test_a_temporary_message_follows_a_message_end() -> None:
    note = Message(role="system", content="9 tokens left", is_temporary=True)
    builder = make_prompt_builder(TAGGED)
    prompt = build_text(builder, USER, make_message("Seven."), USER, note)
    assert any(text.endswith("Oslo?</m>") for text in texts_before(prompt)[-2:])
    folding = make_prompt_builder(
        TAGGED.replace("{{ m.role }}", "{{ m.role | replace('system', 'user') }}")
    )
    prompt = build_text(folding, USER, make_message("Seven."), USER, note)
    assert prompt.text.endswith("Oslo?\n\n9 tokens left</m>[assistant]")
    assert any(text.endswith("Oslo?") for text in texts_before(prompt))


def test_the_next_prompt_of_a_loop_continues_after_a_message_end_with_every_template(
    builders: dict[str, PromptBuilder],
) -> None:
    """The last end that two prompts have in common is close to where they diverge, or to the end of
    the last message if that is earlier: a generation prompt at most."""
    far: set[str] = set()
    for name, builder in builders.items():
        first = (SYSTEM, USER, replace(calls("Oslo"), reasoning="Hm."), result("Oslo"))
        more = (*first, replace(calls("Rome"), reasoning="Hm?"), result("Rome"))
        earlier, later = (
            build_text(builder, *first, tools=True),
            build_text(builder, *more, tools=True),
        )
        common = common_prefix_length(earlier.text, later.text)
        reused = max((at for at in earlier.message_ends if at <= common), default=0)
        if common - reused > 80:
            far.add(name)
    assert far == set()


def test_a_system_prompt_before_the_last_question_does_not_hide_where_that_begins() -> None:
    """Mistral's templates render the tools and the system prompt there, so each new question
    diverges before them: behind the last answer. Models with recurrent layers computed the whole
    conversation again."""
    template = (
        "{% set n = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set n.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% if loop.index0 == n.last %}[tools]{% for t in tools or [] %}"
        "{{ t | tojson }}{% endfor %}[user]{% if messages[0].role == 'system' %}"
        "{{ messages[0].content }}\n\n{% endif %}{% else %}[user]{% endif %}{{ m.content }}[/user]"
        "{% elif m.role != 'system' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    builder = make_prompt_builder(template)
    first = (SYSTEM, USER, make_message("Seven."), replace(USER, content="And in Rome?"))
    earlier = build_text(builder, *first, tools=True)
    later = build_text(builder, *first, make_message("Nine."), USER, tools=True)
    common = common_prefix_length(earlier.text, later.text)
    assert earlier.text[:common] == "[user]Weather in Oslo?[/user]Seven.</s>["
    assert any(common - 1 <= at <= common for at in earlier.message_ends), texts_before(earlier)


@pytest.mark.parametrize("text", ["Seven deg", "Seven ", "  x", "a\n\n", ""])
def test_a_prompt_that_continues_a_message_ends_within_it(text: str) -> None:
    prompt = build_text(make_prompt_builder(TAGGED), USER, make_message(text), continues=True)
    assert prompt.text == f"[user]Weather in Oslo?</m>[assistant]{text}"


def test_reasoning_can_be_continued() -> None:
    builder = make_prompt_builder(THINKS)
    prompt = build_text(builder, USER, make_message(None, "Well"), continues=True)
    assert prompt.text.endswith("[assistant]<think>Well")
    assert prompt.in_reasoning
    prompt = build_text(builder, USER, make_message("It is", "Well"), continues=True)
    assert prompt.text.endswith("<think>Well</think>It is")
    assert (prompt.in_reasoning, prompt.reasoning_tags) == (False, None)


def test_the_final_message_is_continued_with_every_template(
    builders: dict[str, PromptBuilder],
) -> None:
    rejecting: set[str] = set()
    for name, builder in builders.items():
        try:
            prompt = build_text(builder, SYSTEM, USER, make_message("Seven deg"), continues=True)
        except AppError:
            rejecting.add(name)
        else:
            assert prompt.text.endswith("Seven deg"), name
            assert "Weather in Oslo?" in prompt.text, name
    assert rejecting == set()


@pytest.mark.parametrize(
    "last", [USER, calls("Oslo"), result("Oslo")], ids=["user", "calls", "result"]
)
def test_only_a_text_of_the_assistant_can_be_continued(last: Message) -> None:
    with pytest.raises(AppError, match="only an assistant message") as caught:
        build_text(make_prompt_builder(TAGGED), USER, last, continues=True)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")


@pytest.mark.parametrize(
    "content", ["{{ m.content | upper }}", "{{ m.content | length }}"], ids=["upper", "length"]
)
def test_a_template_that_rewrites_the_message_cannot_continue_it(content: str) -> None:
    builder = make_prompt_builder(TAGGED.replace("{{ m.content }}", content))
    with pytest.raises(AppError, match="does not render the content of the last message unchanged"):
        build_text(builder, USER, make_message("Seven"), continues=True)
