"""How a request says how much the model should think, in the words of its template.

Knows: the variables by which templates switch reasoning on and off. Must not know: tokens, tags.
"""

from collections.abc import Mapping, Set
from typing import Any

from app.core.errors import AppError, Kind
from app.core.requests import Thinking

# most used first; the last is Cohere's
_SWITCHES = ("enable_thinking", "thinking", "reasoning")

# Seed-OSS's: it was trained to keep to it, and thinks nothing where it is 0
_BUDGET = "thinking_budget"

_OFF = ("none",)


def options(
    thinking: Thinking, variables: Set[str], *, reasons: bool, knows_none: bool
) -> Mapping[str, Any]:
    """Variables for the template. variables: those that it looks for. reasons: whether its models
    reason. knows_none: whether it knows the effort "none".

    Raises AppError(INVALID) for an effort that cannot be made, or that nobody makes.
    """
    budget = {} if thinking.budget is None else {_BUDGET: thinking.budget}
    told = budget if _BUDGET in variables else {}
    return {**told, **_effort(thinking.effort, variables, reasons=reasons, knows_none=knows_none)}


def _effort(
    effort: str | None, variables: Set[str], *, reasons: bool, knows_none: bool
) -> Mapping[str, Any]:
    if effort is None:
        return {}
    switch = next((name for name in _SWITCHES if name in variables), None)
    if effort in _OFF and switch is not None:
        return {switch: False}
    if effort in _OFF and _BUDGET in variables:
        return {_BUDGET: 0}
    if "reasoning_effort" in variables and (knows_none or effort not in _OFF):
        told = {"reasoning_effort": effort}
        return told if switch is None else {switch: True, **told}
    if switch is not None:
        return {switch: True}
    if effort in _OFF and not reasons:
        return {}
    if effort in _OFF:
        message = "this model always reasons: set thinking_budget to limit it"
        raise AppError(Kind.INVALID, message, param="reasoning_effort")
    if not reasons:
        message = "this model does not support reasoning: omit reasoning_effort"
        raise AppError(Kind.INVALID, message, param="reasoning_effort")
    return {}


def check_budget(thinking: Thinking, *, reasons: bool) -> None:
    """Raises AppError(INVALID) for a budget of something that does not happen."""
    if thinking.budget is not None and not reasons:
        message = "this model does not support reasoning: omit thinking_budget"
        raise AppError(Kind.INVALID, message, param="thinking_budget")
