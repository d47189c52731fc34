"""Conversations over all real templates: tools, calls, results and reasoning reach the prompt."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.requests import (
    Conversation,
    GenerateRequest,
    Message,
    NamedToolChoice,
    ReasoningOptions,
)
from app.text.generic_tool_calls import GenericFamily
from app.text.prompt import PromptBuilder
from tests.text.families.rows import templates
from tests.text.templates import (
    ANSWER,
    CLOCK,
    SYSTEM,
    USER,
    WEATHER,
    calls,
    conversations,
    result,
    written,
)

# Each is for its maker's own conversations only.
STRANGE = {
    "hfjinja-fireworks-ai_firefunction-v1.jinja": "wants a turn of a role named functions",
    "hfjinja-meta-llama_Llama-Guard-3-11B-Vision.jinja": "judges the last two turns",
    "MiroThinker.jinja": "assigns to what is no namespace, which Jinja allows nowhere",
}

IN_WORDS = "You can call these functions"

# Open the block for the model. The others let it open one, or have closed it.
OPENED = {
    "Apriel-1.6-15b-Thinker-fixed.jinja",
    "Cohere2MoE.jinja",
    "GLM-4.7-Flash.jinja",
    "GLM-5.2.jinja",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
    "Qwen3.5-4B.jinja",
    "StepFun3.5-Flash.jinja",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
    "hfjinja-Qwen_Qwen3.5-4B.jinja",
    "hfjinja-zai-org_GLM-5.1.jinja",
    "llama-cpp-deepseek-r1.jinja",
    "ollama-nemotron35_chat_template.jinja",
    "ollama-nemotron3nano_chat_template.jinja",
    "ollama-qwen38_chat_template.jinja",
    "stepfun-ai-Step-3.5-Flash.jinja",
}


@pytest.fixture(scope="module")
def talks(shared: Path) -> dict[str, PromptBuilder]:
    """What is said to models of each real template, by the name of its file."""
    return {
        name: conversations(source)
        for name, source in templates(shared).items()
        if name not in STRANGE
    }


def without(prompts: dict[str, str], *words: str) -> Iterator[str]:
    """Templates whose prompts lack one of the words."""
    for name, text in prompts.items():
        if not all(word in text for word in words):
            yield name


def test_tools_reach_every_model(talks: dict[str, PromptBuilder]) -> None:
    """Also the one without a description, which OpenAI does not ask for."""
    prompts = {
        name: written(talk, SYSTEM, USER, tools=(WEATHER, CLOCK)).text
        for name, talk in talks.items()
    }
    assert list(without(prompts, "get_weather", "city", "get_time", "Weather in Oslo?")) == []
    assert len(prompts) > 100


def test_whoever_is_told_of_tools_in_words_is_read_in_words(
    talks: dict[str, PromptBuilder],
) -> None:
    told = 0
    for name, talk in talks.items():
        prompt = written(talk, USER, tools=(WEATHER,))
        in_words = IN_WORDS in prompt.text
        told += in_words
        assert isinstance(prompt.family, GenericFamily) == in_words, name
    assert 0 < told < len(talks)


@pytest.mark.parametrize("tools", [(WEATHER, CLOCK), ()], ids=["tools", "history only"])
def test_calls_and_results_reach_every_model(
    talks: dict[str, PromptBuilder], tools: tuple[object, ...]
) -> None:
    """Ids are long, two calls stand in a turn, and results do not name their functions."""
    given = (WEATHER, CLOCK) if tools else ()
    history = (
        *(USER, calls("Oslo"), result("Oslo"), ANSWER),
        *(USER, calls("Rome", "Bonn"), result("Bonn"), result("Rome")),
    )
    prompts = {name: written(talk, *history, tools=given).text for name, talk in talks.items()}
    words = ("get_weather", "Rome", "Bonn", "sun over olsO", "sun over emoR", "sun over nnoB")
    missing = set(without(prompts, *words))
    assert missing == set()


def test_a_prompt_is_the_same_every_time(talks: dict[str, PromptBuilder]) -> None:
    """Else the prefix cache serves nothing of it."""
    for name, talk in talks.items():
        first, second = (
            written(talk, USER, calls("Oslo"), result("Oslo"), tools=(WEATHER,)).text
            for _ in range(2)
        )
        assert first == second, name


def test_what_the_system_says_reaches_every_model(talks: dict[str, PromptBuilder]) -> None:
    prompts = {name: written(talk, SYSTEM, USER).text for name, talk in talks.items()}
    assert list(without(prompts, "Be brief.", "Weather in Oslo?")) == []
    developer = Message(role="developer", content="Be brief.")
    prompts = {name: written(talk, developer, USER).text for name, talk in talks.items()}
    assert list(without(prompts, "Be brief.", "Weather in Oslo?")) == []


def test_templates_that_open_the_reasoning_are_known(talks: dict[str, PromptBuilder]) -> None:
    prompts = {name: written(talk, USER) for name, talk in talks.items()}
    assert {name for name, prompt in prompts.items() if prompt.in_reasoning} == OPENED


def test_reasoning_of_earlier_turns_goes_in_where_the_template_keeps_it(
    talks: dict[str, PromptBuilder],
) -> None:
    """Most drop it once the user has spoken again, and keep it while calls are made."""
    thought = Message(
        role="assistant", content=None, reasoning="MUSING", tool_calls=calls("Oslo").tool_calls
    )
    keeping = {
        name
        for name, talk in talks.items()
        if "MUSING" in written(talk, USER, thought, result("Oslo"), tools=(WEATHER,)).text
    }
    assert {
        "Qwen-Qwen3-0.6B.jinja",
        "openai-gpt-oss-120b.jinja",
        "GLM-4.6.jinja",
        "hfjinja-moonshotai_Kimi-K2-Thinking.jinja",
        "ByteDance-Seed-OSS.jinja",
    } <= keeping
    assert len(keeping) >= 20


MINIMAL = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
THINKS = "{{ messages[-1].content }}{% if enable_thinking is false %}<think></think>{% endif %}"


def test_a_tool_that_is_named_must_be_one_of_them() -> None:
    request = GenerateRequest(
        model="made", prompt="", tools=(WEATHER,), tool_choice=NamedToolChoice(name="paint")
    )
    with pytest.raises(AppError, match="which is not in tools") as caught:
        conversations(MINIMAL).build(request, Conversation(messages=(USER,)))
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "tool_choice")


def test_tools_that_must_not_be_called_are_not_told() -> None:
    request = GenerateRequest(model="made", prompt="", tools=(WEATHER,), tool_choice="none")
    prompt = conversations(MINIMAL).build(request, Conversation(messages=(USER,)))
    assert prompt.text == "[user]Weather in Oslo?[assistant]"
    assert prompt.tools == ()


def test_reasoning_that_the_template_has_closed_is_not_looked_for() -> None:
    talk = conversations(THINKS)
    assert written(talk, USER).reasoning_tags is not None
    assert written(talk, USER, thinking=ReasoningOptions(effort="none")).reasoning_tags is None


@pytest.mark.parametrize(
    ("template", "because"),
    [(MINIMAL, "does not support reasoning"), (THINKS, "its tokenizer has no </think> token")],
)
def test_a_budget_that_cannot_be_kept_is_refused(template: str, because: str) -> None:
    """The byte tokenizer has no token for the end of reasoning."""
    with pytest.raises(AppError, match=because) as caught:
        written(conversations(template), USER, thinking=ReasoningOptions(token_budget=5))
    assert caught.value.param == "thinking_budget"


def test_words_for_the_template_win_over_ours() -> None:
    request = GenerateRequest(
        model="made",
        prompt="",
        reasoning=ReasoningOptions(effort="high"),
        chat_template_kwargs={"enable_thinking": False},
    )
    prompt = conversations(THINKS).build(request, Conversation(messages=(USER,)))
    assert prompt.text.endswith("<think></think>")


def test_what_a_template_refuses_is_refused_in_its_own_words() -> None:
    talk = conversations("{{ raise_exception('only on Sundays') }}")
    for tools in ((), (WEATHER,)):
        with pytest.raises(AppError, match="only on Sundays"):
            written(talk, USER, tools=tools)
