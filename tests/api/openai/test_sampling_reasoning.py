"""Reasoning options, and the variables that the chat template gets."""

import json
from typing import Any, get_args

import pytest

from app.api.openai.sampling import build_response_thinking, build_template_options, build_thinking
from app.api.schema.generation import THINKING_BUDGET_FIELDS, ReasoningEffort
from app.api.schema.openai import CHAT
from app.api.schema.responses import ResponseBody
from app.core.errors import AppError, ErrorKind
from app.core.requests import ReasoningOptions
from tests.rows import rows


def read(**given: Any) -> tuple[ReasoningOptions, dict[str, Any]]:
    body = CHAT.decode(json.dumps({"messages": [{"role": "user"}], **given}).encode())
    thinking = build_thinking(body)
    return thinking, build_template_options(body.chat_template_kwargs, thinking)


@pytest.mark.parametrize("effort", get_args(ReasoningEffort))
def test_effort_is_a_word(effort: str):
    assert read(reasoning_effort=effort) == (ReasoningOptions(effort=effort), {})


@pytest.mark.parametrize("name", THINKING_BUDGET_FIELDS)
def test_a_budget_has_the_names_of_several_servers(name: str):
    assert read(**{name: 100})[0] == ReasoningOptions(token_budget=100, budget_param=name)
    assert read(**{name: 0})[0] == ReasoningOptions(token_budget=0, budget_param=name)
    assert read(**{name: -1})[0] == ReasoningOptions()


def test_template_variables_are_passed_unchanged():
    options = {"enable_thinking": False, "language": {"of": ["the", 5]}}
    assert read(chat_template_kwargs=options) == (ReasoningOptions(), options)


@rows(
    ("given", "param"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"thinking_token_budget": 0.5}, "thinking_token_budget"),
        ({"thinking_budget": 5, "thinking_budget_tokens": 6}, "thinking_budget_tokens"),
        (
            {"thinking_budget": 5, "thinking": {"type": "auto", "budget_tokens": 6}},
            "thinking.budget_tokens",
        ),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort"),
        ({"reasoning": "low"}, "reasoning"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"enable_thinking": True, "thinking": False}, "thinking"),
        ({"enable_thinking": False, "reasoning_effort": "low"}, "enable_thinking"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"budget_tokens": 5}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_token": 5}}, "thinking.budget_token"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": None}}, "chat_template_kwargs.tools"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            "chat_template_kwargs.add_generation_prompt",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "chat_template_kwargs.reasoning_effort",
        ),
    ],
)
def test_an_invalid_reasoning_option_is_rejected_by_its_name(given: Any, param: str):
    with pytest.raises(AppError) as caught:
        read(**given)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)


OFF = ReasoningOptions(effort="none", param="enable_thinking")
ON = ReasoningOptions(enabled=True, param="enable_thinking")


@rows(
    ("given", "options"),
    [
        ({"enable_thinking": False}, OFF),
        ({"enable_thinking": True}, ON),
        ({"enable_thinking": True, "thinking": {"type": "enabled"}}, ON),
        ({"thinking": True}, ReasoningOptions(enabled=True, param="thinking")),
        ({"thinking": {"type": "disabled"}}, ReasoningOptions(effort="none", param="thinking")),
        ({"thinking": {"type": "adaptive"}}, ReasoningOptions()),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            ReasoningOptions(
                enabled=True,
                token_budget=9,
                param="thinking",
                budget_param="thinking.budget_tokens",
            ),
        ),
        (
            {"reasoning": {"effort": "low"}},
            ReasoningOptions(effort="low", param="reasoning.effort"),
        ),
        (
            {"reasoning": {"enabled": True, "max_tokens": 9, "exclude": False}},
            ReasoningOptions(
                enabled=True,
                token_budget=9,
                param="reasoning.enabled",
                budget_param="reasoning.max_tokens",
            ),
        ),
        ({"reasoning_effort": "low", "enable_thinking": True}, ReasoningOptions(effort="low")),
        ({"thinking_budget": 5, "thinking_budget_tokens": 5}, ReasoningOptions(token_budget=5)),
    ],
)
def test_other_servers_names_have_the_same_meaning(given: Any, options: ReasoningOptions):
    assert read(**given)[0] == options


def test_a_response_takes_the_same_switches():
    assert build_response_thinking(ResponseBody(input="hi", enable_thinking=True), "high") == (
        ReasoningOptions(effort="high", param="reasoning.effort")
    )
