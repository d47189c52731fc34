"""Efforts and budgets, in the words of templates."""

from typing import Any

import pytest

from app.core.errors import AppError
from app.core.requests import ReasoningOptions
from app.text.prompt import build_thinking_kwargs, check_thinking_budget
from tests.text.families.rows import templates
from tests.text.templates import USER, conversations, written


def chosen(
    effort: str | None, *variables: str, budget: int | None = None, **known: bool
) -> dict[str, Any]:
    given = {"supports_reasoning": True, "supports_none": False, **known}
    thinking = ReasoningOptions(effort=effort, token_budget=budget)
    return dict(build_thinking_kwargs(thinking, frozenset(variables), **given))


@pytest.mark.parametrize(
    ("effort", "variables", "told"),
    [
        (None, ("enable_thinking", "reasoning_effort"), {}),
        ("none", ("enable_thinking",), {"enable_thinking": False}),
        ("low", ("enable_thinking",), {"enable_thinking": True}),
        ("none", ("thinking",), {"thinking": False}),
        ("none", ("thinking", "enable_thinking"), {"enable_thinking": False}),
        ("none", ("reasoning",), {"reasoning": False}),
        ("high", ("reasoning_effort",), {"reasoning_effort": "high"}),
        (
            "high",
            ("reasoning_effort", "enable_thinking"),
            {"reasoning_effort": "high", "enable_thinking": True},
        ),
        ("none", ("reasoning_effort", "enable_thinking"), {"enable_thinking": False}),
        ("none", ("thinking_budget",), {"thinking_budget": 0}),
        ("high", (), {}),  # it reasons anyway
    ],
)
def test_an_effort_becomes_the_templates_own_switch(
    effort: str | None, variables: tuple[str, ...], told: dict[str, Any]
) -> None:
    assert chosen(effort, *variables) == told


def test_none_is_an_effort_for_templates_that_know_it() -> None:
    assert chosen("none", "reasoning_effort", supports_none=True) == {"reasoning_effort": "none"}
    with pytest.raises(AppError, match="always reasons"):
        chosen("none", "reasoning_effort")


@pytest.mark.parametrize(("effort", "supports_reasoning"), [("none", True), ("high", False)])
def test_what_the_model_cannot_do_is_refused(effort: str, supports_reasoning: bool) -> None:
    with pytest.raises(AppError) as caught:
        chosen(effort, supports_reasoning=supports_reasoning)
    assert caught.value.param == "reasoning_effort"


def test_no_reasoning_is_what_a_model_that_does_not_reason_does() -> None:
    assert chosen("none", supports_reasoning=False) == {}


def test_a_budget_is_told_to_templates_that_ask_for_it() -> None:
    assert chosen(None, "thinking_budget", budget=512) == {"thinking_budget": 512}
    assert chosen(None, budget=512) == {}


def test_a_budget_needs_a_model_that_reasons() -> None:
    check_thinking_budget(ReasoningOptions(token_budget=0), supports_reasoning=True)
    check_thinking_budget(ReasoningOptions(), supports_reasoning=False)
    with pytest.raises(AppError, match="does not support reasoning") as caught:
        check_thinking_budget(ReasoningOptions(token_budget=0), supports_reasoning=False)
    assert caught.value.param == "thinking_budget"


# What three requests come to: without an effort, with none, with much. open: the prompt opens the
# block; closed: it closes it; free: the model says.
SWITCHED = {
    "Qwen-Qwen3-0.6B": ("free", "closed", "free"),
    "HuggingFaceTB-SmolLM3-3B": ("free", "closed", "free"),
    "ByteDance-Seed-OSS": ("free", "closed", "free"),
    "GLM-4.6": ("free", "closed", "free"),
    "GLM-4.7-Flash": ("open", "closed", "open"),
    "GLM-5.2": ("open", "closed", "open"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("open", "closed", "open"),
    "Qwen3.5-4B": ("open", "closed", "open"),
    "Cohere2MoE": ("open", "closed", "open"),
    "deepseek-ai-DeepSeek-V3.1": ("closed", "closed", "open"),
    "deepseek-ai-DeepSeek-V3.2": ("closed", "closed", "open"),
    "deepseek-ai-DeepSeek-V4": ("closed", "closed", "open"),
    "ibm-granite-granite-3.3-2B-Instruct": ("free", "free", "free"),
    "google-gemma-4-31B-it": ("closed", "closed", "free"),
    "openai-gpt-oss-120b": ("free", "refused", "free"),
    "Kimi-K2-Thinking": ("free", "refused", "free"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("free", "refused", "free"),
    "Qwen-Qwen2.5-7B-Instruct": ("closed", "closed", "refused"),
    "microsoft-Phi-3.5-mini-instruct": ("closed", "closed", "refused"),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_real_templates_are_switched(shared: Any, name: str) -> None:
    talk = conversations(templates(shared)[f"{name}.jinja"])

    def turn(effort: str | None) -> str:
        try:
            prompt = written(talk, USER, thinking=ReasoningOptions(effort=effort))
        except AppError as error:
            return {"reasoning_effort": "refused"}.get(error.param or "", error.message)
        return (
            "closed" if prompt.reasoning_tags is None else "open" if prompt.in_reasoning else "free"
        )

    assert (turn(None), turn("none"), turn("high")) == SWITCHED[name]


@pytest.mark.parametrize("name", ["ibm-granite-granite-3.3-2B-Instruct", "openai-gpt-oss-120b"])
def test_more_effort_is_another_prompt_where_the_model_says_when_it_reasons(
    shared: Any, name: str
) -> None:
    talk = conversations(templates(shared)[f"{name}.jinja"])
    plain, high = (
        written(talk, USER, thinking=ReasoningOptions(effort=effort)).text
        for effort in (None, "high")
    )
    assert plain != high
