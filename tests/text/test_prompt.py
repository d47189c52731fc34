"""Prompts of all real templates: tools, calls, results and reasoning are in the prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

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
from app.text.prompt import PromptBuilder, RenderedPrompt
from app.text.tokenizer import Tokenizer
from tests import tiny
from tests.rows import rows
from tests.text.families.reading import collect_calls, join_content, join_reasoning
from tests.text.families.rows import templates
from tests.text.families.samples import SAMPLES
from tests.text.templates import (
    ANSWER,
    CLOCK,
    SYSTEM,
    USER,
    WEATHER,
    build_prompt,
    calls,
    make_files,
    make_prompt_builder,
    result,
)

# These templates support only special conversations.
STRANGE = {
    "hfjinja-fireworks-ai_firefunction-v1.jinja": "requires a message with the role functions",
    "hfjinja-meta-llama_Llama-Guard-3-11B-Vision.jinja": "classifies the last two turns",
    "MiroThinker.jinja": "assigns to a non-namespace, which Jinja rejects",
}

TOOLS_AS_TEXT = "You can call these functions"

# These open the reasoning block. The others leave it to the model, or close it.
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
def builders(shared: Path) -> dict[str, PromptBuilder]:
    """A prompt builder for each real template, by file name."""
    return {
        name: make_prompt_builder(source)
        for name, source in templates(shared).items()
        if name not in STRANGE
    }


def find_missing(prompts: dict[str, str], *words: str) -> Iterator[str]:
    """The templates with prompts that lack one of the words."""
    for name, text in prompts.items():
        if not all(word in text for word in words):
            yield name


def test_tools_reach_every_model(builders: dict[str, PromptBuilder]) -> None:
    """Also the tool without a description, which is optional in OpenAI's API."""
    prompts = {
        name: build_prompt(builder, SYSTEM, USER, tools=(WEATHER, CLOCK)).text
        for name, builder in builders.items()
    }
    assert list(find_missing(prompts, "get_weather", "city", "get_time", "Weather in Oslo?")) == []
    assert len(prompts) > 100


def test_tools_rendered_as_text_select_the_generic_family(
    builders: dict[str, PromptBuilder],
) -> None:
    num_as_text = 0
    for name, builder in builders.items():
        prompt = build_prompt(builder, USER, tools=(WEATHER,))
        as_text = TOOLS_AS_TEXT in prompt.text
        num_as_text += as_text
        assert isinstance(prompt.family, GenericFamily) == as_text, name
    assert 0 < num_as_text < len(builders)


@pytest.mark.parametrize("tools", [(WEATHER, CLOCK), ()], ids=["tools", "history only"])
def test_calls_and_results_reach_every_model(
    builders: dict[str, PromptBuilder], tools: tuple[object, ...]
) -> None:
    """Ids are long, a turn has two calls, and results do not name their functions."""
    tool_list = (WEATHER, CLOCK) if tools else ()
    history = (
        *(USER, calls("Oslo"), result("Oslo"), ANSWER),
        *(USER, calls("Rome", "Bonn"), result("Bonn"), result("Rome")),
    )
    prompts = {
        name: build_prompt(builder, *history, tools=tool_list).text
        for name, builder in builders.items()
    }
    words = ("get_weather", "Rome", "Bonn", "sun over olsO", "sun over emoR", "sun over nnoB")
    missing = set(find_missing(prompts, *words))
    assert missing == set()


def test_a_prompt_is_the_same_every_time(builders: dict[str, PromptBuilder]) -> None:
    """Otherwise the prefix cache never matches."""
    for name, builder in builders.items():
        first, second = (
            build_prompt(builder, USER, calls("Oslo"), result("Oslo"), tools=(WEATHER,)).text
            for _ in range(2)
        )
        assert first == second, name


def test_the_system_message_reaches_every_model(builders: dict[str, PromptBuilder]) -> None:
    prompts = {name: build_prompt(builder, SYSTEM, USER).text for name, builder in builders.items()}
    assert list(find_missing(prompts, "Be brief.", "Weather in Oslo?")) == []
    developer = Message(role="developer", content="Be brief.")
    prompts = {
        name: build_prompt(builder, developer, USER).text for name, builder in builders.items()
    }
    assert list(find_missing(prompts, "Be brief.", "Weather in Oslo?")) == []


def test_templates_that_open_the_reasoning_are_detected(builders: dict[str, PromptBuilder]) -> None:
    prompts = {name: build_prompt(builder, USER) for name, builder in builders.items()}
    assert {name for name, prompt in prompts.items() if prompt.in_reasoning} == OPENED


def test_reasoning_of_earlier_turns_is_in_the_prompt_where_the_template_keeps_it(
    builders: dict[str, PromptBuilder],
) -> None:
    """Most templates drop it after the next user message, and keep it between calls."""
    turn = Message(
        role="assistant", content=None, reasoning="MUSING", tool_calls=calls("Oslo").tool_calls
    )
    kept = {
        name
        for name, builder in builders.items()
        if "MUSING" in build_prompt(builder, USER, turn, result("Oslo"), tools=(WEATHER,)).text
    }
    assert {
        "Qwen-Qwen3-0.6B.jinja",
        "openai-gpt-oss-120b.jinja",
        "GLM-4.6.jinja",
        "hfjinja-moonshotai_Kimi-K2-Thinking.jinja",
        "ByteDance-Seed-OSS.jinja",
    } <= kept
    assert len(kept) >= 20


MINIMAL = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
THINKS = "{{ messages[-1].content }}{% if enable_thinking is false %}<think></think>{% endif %}"


def test_a_named_tool_must_be_in_tools() -> None:
    request = GenerateRequest(
        model="small", prompt="", tools=(WEATHER,), tool_choice=NamedToolChoice(name="paint")
    )
    with pytest.raises(AppError, match="which is not in tools") as caught:
        make_prompt_builder(MINIMAL).build(request, Conversation(messages=(USER,)))
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "tool_choice")


def test_tool_choice_none_omits_the_tools() -> None:
    request = GenerateRequest(model="small", prompt="", tools=(WEATHER,), tool_choice="none")
    prompt = make_prompt_builder(MINIMAL).build(request, Conversation(messages=(USER,)))
    assert prompt.text == "[user]Weather in Oslo?[assistant]"
    assert prompt.tools == ()


def test_reasoning_that_the_template_closed_is_not_parsed() -> None:
    builder = make_prompt_builder(THINKS)
    assert build_prompt(builder, USER).reasoning_tags is not None
    assert (
        build_prompt(builder, USER, reasoning=ReasoningOptions(effort="none")).reasoning_tags
        is None
    )


def parse_output(prompt: RenderedPrompt, output: str) -> tuple[str, str, list[str]]:
    """The reasoning, the content and the names of the calls in an output after a prompt."""
    parser = prompt.build_parser()
    if parser is None:
        return "", output, []
    pieces = [*parser.feed(output), *parser.flush()]
    names = [call.name for call in collect_calls(pieces)]
    return join_reasoning(pieces), join_content(pieces), names


@rows(
    ("name", "output"),
    [
        ("google-gemma-4-31B-it", "<|channel>thought\nHm.<channel|>Seven."),
        ("Qwen-Qwen3-0.6B", "<think>\nHm.\n</think>\n\nSeven."),
        ("Qwen3.5-4B", "<think>\nHm.\n</think>\n\nSeven."),
        ("GLM-4.6", "\n<think>Hm.</think>\nSeven."),
        ("deepseek-ai-DeepSeek-V3.1", "<think>Hm.</think>Seven."),
        ("HuggingFaceTB-SmolLM3-3B", "<think>\nHm.\n</think>\nSeven."),
    ],
)
def test_reasoning_of_a_model_that_reasons_although_it_is_off_is_not_content(
    shared: Path, name: str, output: str
) -> None:
    """Also without tools: the label of Gemma's channel was part of the content."""
    builder = make_prompt_builder(templates(shared)[f"{name}.jinja"])
    for tools in ((), (WEATHER,)):
        prompt = build_prompt(builder, USER, tools=tools, reasoning=ReasoningOptions(effort="none"))
        assert prompt.reasoning_tags is None  # for the grammar
        assert parse_output(prompt, output) == ("Hm.", "Seven.", []), prompt.text


def test_reasoning_tags_are_text_where_an_answer_is_continued() -> None:
    request = GenerateRequest(model="small", prompt="")
    half = Message(role="assistant", content="The tag is ")
    conversation = Conversation(messages=(USER, half), continue_final=True)
    prompt = make_prompt_builder(THINKS).build(request, conversation)
    assert parse_output(prompt, "<think>.")[1] == "<think>."


@rows(
    ("name", "module"),
    [
        ("deepseek-ai-DeepSeek-V3.1", "deepseek_v31"),
        ("hfjinja-deepseek-ai_DeepSeek-R1", "deepseek_r1"),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek_r1"),
    ],
)
def test_a_model_whose_template_lists_no_tools_may_call_in_its_own_syntax(
    shared: Path, name: str, module: str
) -> None:
    prompt = build_prompt(
        make_prompt_builder(templates(shared)[f"{name}.jinja"]), USER, tools=(WEATHER,)
    )
    assert TOOLS_AS_TEXT in prompt.text
    close = "</think>" if prompt.in_reasoning else ""
    for call in (SAMPLES[module], '{"name": "get_weather", "arguments": {"city": "Oslo"}}'):
        found = parse_output(prompt, f"{close}Sure.\n{call}")
        assert found == ("", "Sure.", ["get_weather"])


def test_special_tokens_of_the_syntax_are_parsed_with_and_without_tools() -> None:
    inner = tiny.tokenizer()
    inner.add_special_tokens(["<think>", "</think>", "<tool_call>"])
    source = f'{THINKS}{{# <tool_call> {{"name": #}}'
    builder = PromptBuilder(make_files(source), Tokenizer(inner))
    for tools in ((), (WEATHER,)):
        prompt = build_prompt(builder, USER, tools=tools)
        assert prompt.special_tokens == {"<think>", "</think>", "<tool_call>"}
        assert len(prompt.visible_special_ids) == 3
        output = "a <tool_call> b </think> c <think>d</think> e"
        assert parse_output(prompt, output) == ("d", "a  b  c e", [])


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_in_the_reasoning_cannot_bypass_a_schema(
    choice: Literal["auto", "required"],
) -> None:
    source = f'{THINKS}{{# <tool_call> {{"name": #}}'
    request = GenerateRequest(model="small", prompt="", tools=(WEATHER,), tool_choice=choice)
    prompt = make_prompt_builder(source).build(request, Conversation(messages=(USER,)))
    names = parse_output(prompt, f"<think>Hm. {SAMPLES['hermes']}")[2]
    assert names == (["get_weather"] if choice == "auto" else [])


@pytest.mark.parametrize(
    ("template", "reason"),
    [(MINIMAL, "does not support reasoning"), (THINKS, "its tokenizer has no </think> token")],
)
def test_a_thinking_budget_that_cannot_be_enforced_is_rejected(template: str, reason: str) -> None:
    """The byte tokenizer has no token for the end of reasoning."""
    with pytest.raises(AppError, match=reason) as caught:
        build_prompt(
            make_prompt_builder(template), USER, reasoning=ReasoningOptions(token_budget=5)
        )
    assert caught.value.param == "thinking_budget"


def test_chat_template_kwargs_override_the_reasoning_options() -> None:
    request = GenerateRequest(
        model="small",
        prompt="",
        reasoning=ReasoningOptions(effort="high"),
        chat_template_kwargs={"enable_thinking": False},
    )
    prompt = make_prompt_builder(THINKS).build(request, Conversation(messages=(USER,)))
    assert prompt.text.endswith("<think></think>")


def test_a_template_error_is_reported_in_its_own_words() -> None:
    builder = make_prompt_builder("{{ raise_exception('only on Sundays') }}")
    for tools in ((), (WEATHER,)):
        with pytest.raises(AppError, match="only on Sundays"):
            build_prompt(builder, USER, tools=tools)
