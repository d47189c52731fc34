"""Reasoning efforts and thinking budgets, as variables of templates."""

from typing import Any

import pytest

from app.core.errors import AppError
from app.core.requests import ReasoningOptions, Verbosity
from app.text.prompt import (
    build_thinking_kwargs,
    build_verbosity_kwargs,
    check_thinking_budget,
    fit_reasoning,
)
from tests.rows import rows
from tests.text.families.rows import templates
from tests.text.templates import USER, build_prompt, make_prompt_builder


def build_kwargs(
    effort: str | None, *variables: str, budget: int | None = None, **capabilities: bool
) -> dict[str, Any]:
    options = {"supports_reasoning": True, "supports_none": False, **capabilities}
    reasoning = ReasoningOptions(effort=effort, token_budget=budget)
    return dict(build_thinking_kwargs(reasoning, frozenset(variables), **options))


@rows(
    ("effort", "variables", "expected"),
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
        ("high", (), {}),  # it reasons by default
    ],
)
def test_an_effort_sets_the_variable_of_the_template(
    effort: str | None, variables: tuple[str, ...], expected: dict[str, Any]
) -> None:
    assert build_kwargs(effort, *variables) == expected


def test_none_is_an_effort_for_templates_that_support_it() -> None:
    assert build_kwargs("none", "reasoning_effort", supports_none=True) == {
        "reasoning_effort": "none"
    }
    with pytest.raises(AppError, match="cannot disable reasoning"):
        build_kwargs("none", "reasoning_effort")


@pytest.mark.parametrize(("effort", "supports_reasoning"), [("none", True), ("high", False)])
def test_an_unsupported_effort_is_rejected(effort: str, supports_reasoning: bool) -> None:
    with pytest.raises(AppError) as caught:
        build_kwargs(effort, supports_reasoning=supports_reasoning)
    assert caught.value.param == "reasoning_effort"


def test_effort_none_is_accepted_for_a_model_without_reasoning() -> None:
    assert build_kwargs("none", supports_reasoning=False) == {}


def test_a_thinking_budget_is_passed_to_templates_that_use_it() -> None:
    assert build_kwargs(None, "thinking_budget", budget=512) == {"thinking_budget": 512}
    assert build_kwargs(None, budget=512) == {}


def test_a_thinking_budget_needs_a_model_that_reasons() -> None:
    check_thinking_budget(ReasoningOptions(token_budget=0), supports_reasoning=True)
    check_thinking_budget(ReasoningOptions(), supports_reasoning=False)
    with pytest.raises(AppError, match="does not support reasoning") as caught:
        check_thinking_budget(
            ReasoningOptions(token_budget=0, budget_param="thinking.budget_tokens"),
            supports_reasoning=False,
        )
    assert caught.value.param == "thinking.budget_tokens"


# The prompts of three requests: without an effort, with none, with high. open: the prompt opens the
# block; closed: it closes the block; free: the model decides.
REASONING_STATES = {
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


@rows("name", REASONING_STATES)
def test_an_effort_switches_real_templates(shared: Any, name: str) -> None:
    builder = make_prompt_builder(templates(shared)[f"{name}.jinja"])

    def describe_turn(effort: str | None) -> str:
        try:
            prompt = build_prompt(builder, USER, reasoning=ReasoningOptions(effort=effort))
        except AppError as error:
            return {"reasoning_effort": "refused"}.get(error.param or "", error.message)
        return (
            "closed" if prompt.reasoning_tags is None else "open" if prompt.in_reasoning else "free"
        )

    assert (describe_turn(None), describe_turn("none"), describe_turn("high")) == REASONING_STATES[
        name
    ]


@pytest.mark.parametrize("name", ["ibm-granite-granite-3.3-2B-Instruct", "openai-gpt-oss-120b"])
def test_an_effort_changes_the_prompt_of_models_that_decide_when_to_reason(
    shared: Any, name: str
) -> None:
    builder = make_prompt_builder(templates(shared)[f"{name}.jinja"])
    plain, high = (
        build_prompt(builder, USER, reasoning=ReasoningOptions(effort=effort)).text
        for effort in (None, "high")
    )
    assert plain != high


def fit(thinking: ReasoningOptions, *variables: str, source: str = "", **known: bool) -> Any:
    given = {"supports_reasoning": True, "supports_budget": True, **known}
    options = fit_reasoning(thinking, frozenset(variables), source, **given)
    # what is left is supported
    supports_none = "'none'" in source
    build_thinking_kwargs(
        options,
        frozenset(variables),
        supports_reasoning=given["supports_reasoning"],
        supports_none=supports_none,
    )
    return options.effort, options.token_budget


@rows(
    ("effort", "variables", "source", "expected"),
    [
        ("none", (), "", None),
        ("none", ("enable_thinking",), "", "none"),
        ("none", ("thinking_budget",), "", "none"),
        ("none", ("reasoning_effort",), "", None),
        ("none", ("reasoning_effort",), "== 'none'", "none"),
        ("low", (), "", None),
        ("low", ("thinking",), "", "low"),
        ("max", ("reasoning_effort",), "", "high"),
        ("xhigh", ("reasoning_effort",), "['xhigh', 'max']", "xhigh"),
        ("max", ("reasoning_effort",), '["max"]', "max"),
        (None, ("reasoning_effort",), "", None),
    ],
)
def test_lenient_options_keep_what_a_template_supports(
    effort: str | None, variables: tuple[str, ...], source: str, expected: str | None
) -> None:
    thinking = ReasoningOptions(effort=effort, lenient=True)
    assert fit(thinking, *variables, source=source)[0] == expected


@pytest.mark.parametrize("known", ["supports_reasoning", "supports_budget", ""])
def test_a_lenient_budget_is_omitted_if_it_cannot_be_enforced(known: str) -> None:
    thinking = ReasoningOptions(token_budget=5, lenient=True)
    options: dict[str, Any] = {known: False} if known else {}
    assert fit(thinking, **options)[1] == (None if known else 5)


def test_reasoning_is_switched_on_at_its_default_effort() -> None:
    thinking = ReasoningOptions(enabled=True)
    for variables, expected in (
        ({"enable_thinking"}, {"enable_thinking": True}),
        ({"thinking", "reasoning_effort"}, {"thinking": True}),
        ({"reasoning_effort"}, {}),
    ):
        assert (
            build_thinking_kwargs(thinking, variables, supports_reasoning=True, supports_none=False)
            == expected
        )


def switched_on(*variables: str, supports_reasoning: bool = True) -> dict[str, Any]:
    thinking = ReasoningOptions(enabled=True, token_budget=5, param="enable_thinking")
    return dict(
        build_thinking_kwargs(
            thinking,
            frozenset(variables),
            supports_reasoning=supports_reasoning,
            supports_none=False,
        )
    )


def test_reasoning_is_turned_on_without_an_effort() -> None:
    assert switched_on("thinking", "reasoning_effort") == {"thinking": True}
    assert switched_on("reasoning_effort") == {}
    assert switched_on("thinking_budget") == {"thinking_budget": 5}
    assert switched_on() == {}


def test_a_model_that_does_not_reason_rejects_the_field_that_turns_it_on() -> None:
    with pytest.raises(AppError, match="omit enable_thinking") as raised:
        switched_on(supports_reasoning=False)
    assert raised.value.param == "enable_thinking"


def test_verbosity_goes_to_a_template_that_reads_it() -> None:
    low = Verbosity(level="low", param="text.verbosity")
    assert build_verbosity_kwargs(low, {"verbosity"}) == {"verbosity": "low"}
    assert build_verbosity_kwargs(None, {"verbosity"}) == {}
    assert build_verbosity_kwargs(Verbosity(level="medium"), set()) == {}
    with pytest.raises(AppError, match="does not read verbosity") as raised:
        build_verbosity_kwargs(low, set())
    assert raised.value.param == "text.verbosity"
