"""How a request says how much the model should think, in the words of its template.

Knows: the variables by which templates switch reasoning on and off. Must not know: tokens, tags.
"""

from collections.abc import Mapping, Set
from typing import Any

from app.core.errors import AppError, Kind
from app.core.requests import Thinking

_SWITCHES = ("enable_thinking", "thinking")

_OFF = ("none",)


def options(thinking: Thinking, variables: Set[str], *, reasons: bool) -> Mapping[str, Any]:
    """Variables for the template. variables: those that it looks for. reasons: whether its models
    reason.

    Raises AppError(INVALID) for an effort that would change nothing.
    """
    effort = thinking.effort
    if effort is None:
        return {}
    switch = next((name for name in _SWITCHES if name in variables), None)
    if effort in _OFF and switch is not None:
        return {switch: False}
    if "reasoning_effort" in variables:
        told = {"reasoning_effort": effort}
        return told if switch is None else {switch: True, **told}
    if switch is not None:
        return {switch: True}
    if effort in _OFF and not reasons:
        return {}
    if effort in _OFF:
        message = "this model always reasons: use thinking_budget to limit it"
        raise AppError(Kind.INVALID, message, param="reasoning_effort")
    if not reasons:
        message = "this model does not reason before it answers: leave reasoning_effort out"
        raise AppError(Kind.INVALID, message, param="reasoning_effort")
    return {}


def check_budget(thinking: Thinking, *, reasons: bool) -> None:
    """Raises AppError(INVALID) for a budget of something that does not happen."""
    if thinking.budget is not None and not reasons:
        message = "this model does not reason before it answers: leave thinking_budget out"
        raise AppError(Kind.INVALID, message, param="thinking_budget")
