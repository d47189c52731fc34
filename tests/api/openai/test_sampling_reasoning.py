"""How much is to be thought, and what the chat template is told."""

from typing import Any

import pytest

from app.api.fields import Fields
from app.api.openai.sampling import (
    REASONING_EFFORTS,
    THINKING_BUDGET_FIELDS,
    read_template_options,
    read_thinking,
)
from app.core.errors import AppError, ErrorKind
from app.core.requests import ReasoningOptions


def read(**given: Any) -> tuple[ReasoningOptions, dict[str, Any]]:
    fields = Fields.from_value(given)
    thinking = read_thinking(fields)
    options = read_template_options(fields, thinking)
    fields.reject_unknown()
    return thinking, options


@pytest.mark.parametrize("effort", REASONING_EFFORTS)
def test_effort_is_a_word(effort: str):
    assert read(reasoning_effort=effort) == (ReasoningOptions(effort=effort), {})


@pytest.mark.parametrize("name", THINKING_BUDGET_FIELDS)
def test_a_budget_has_the_names_of_several_servers(name: str):
    assert read(**{name: 100})[0] == ReasoningOptions(token_budget=100)
    assert read(**{name: 0})[0] == ReasoningOptions(token_budget=0)
    assert read(**{name: -1})[0] == ReasoningOptions()


def test_words_for_the_template_pass_as_they_are():
    options = {"enable_thinking": False, "language": {"of": ["the", 5]}}
    assert read(chat_template_kwargs=options) == (ReasoningOptions(), options)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"thinking_token_budget": 0.5}, "thinking_token_budget"),
        ({"thinking_budget": 5, "thinking_budget_tokens": 5}, "thinking_budget_tokens"),
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
def test_a_wrong_wish_is_named(given: Any, param: str):
    with pytest.raises(AppError) as caught:
        read(**given)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)
