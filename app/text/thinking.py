"""How a request says how much the model should think, in the words of its template.

Knows: the variables by which templates switch reasoning on and off. Must not know: tokens, tags.
"""

from collections.abc import Mapping, Set
from typing import Any

from app.core.errors import AppError, ErrorKind
from app.core.requests import ReasoningOptions

# most used first; the last is Cohere's
_ENABLE_VARIABLES = ("enable_thinking", "thinking", "reasoning")

# Seed-OSS's: it was trained to keep to it, and thinks nothing where it is 0
_BUDGET_VARIABLE = "thinking_budget"

_OFF_EFFORTS = ("none",)


def build_thinking_kwargs(
    thinking: ReasoningOptions,
    variables: Set[str],
    *,
    supports_reasoning: bool,
    supports_none: bool,
) -> Mapping[str, Any]:
    """Variables for the template. variables: those that it looks for. supports_reasoning: whether
    its models reason. supports_none: whether it knows the effort "none".

    Raises AppError(INVALID) for an effort that cannot be made, or that nobody makes.
    """
    budget = {} if thinking.token_budget is None else {_BUDGET_VARIABLE: thinking.token_budget}
    told = budget if _BUDGET_VARIABLE in variables else {}
    return {
        **told,
        **_build_effort_kwargs(
            thinking.effort,
            variables,
            supports_reasoning=supports_reasoning,
            supports_none=supports_none,
        ),
    }


def _build_effort_kwargs(
    effort: str | None, variables: Set[str], *, supports_reasoning: bool, supports_none: bool
) -> Mapping[str, Any]:
    if effort is None:
        return {}
    switch = next((name for name in _ENABLE_VARIABLES if name in variables), None)
    if effort in _OFF_EFFORTS and switch is not None:
        return {switch: False}
    if effort in _OFF_EFFORTS and _BUDGET_VARIABLE in variables:
        return {_BUDGET_VARIABLE: 0}
    if "reasoning_effort" in variables and (supports_none or effort not in _OFF_EFFORTS):
        told = {"reasoning_effort": effort}
        return told if switch is None else {switch: True, **told}
    if switch is not None:
        return {switch: True}
    if effort in _OFF_EFFORTS and not supports_reasoning:
        return {}
    if effort in _OFF_EFFORTS:
        message = "this model always reasons: set thinking_budget to limit it"
        raise AppError(ErrorKind.INVALID, message, param="reasoning_effort")
    if not supports_reasoning:
        message = "this model does not support reasoning: omit reasoning_effort"
        raise AppError(ErrorKind.INVALID, message, param="reasoning_effort")
    return {}


def check_thinking_budget(thinking: ReasoningOptions, *, supports_reasoning: bool) -> None:
    """Raises AppError(INVALID) for a budget of something that does not happen."""
    if thinking.token_budget is not None and not supports_reasoning:
        message = "this model does not support reasoning: omit thinking_budget"
        raise AppError(ErrorKind.INVALID, message, param="thinking_budget")
