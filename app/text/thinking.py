"""How a request says how much the model should think, in the words of its template.

Knows: the variables by which templates switch reasoning on and off. Must not know: tokens, tags.
"""

import re
from collections.abc import Mapping
from typing import Any

from app.core.errors import AppError, Kind
from app.core.requests import Thinking

# Names of the switch, most used first. The second is a common word, so it must be asked for.
_SWITCHES = (
    ("enable_thinking", re.compile(r"\benable_thinking\b")),
    ("thinking", re.compile(r"(?<![.\w'\"])thinking\s+(is\s+(not\s+)?(un)?defined|%\}|and\b)")),
)

_OFF = ("none",)


def options(thinking: Thinking, template: str, *, reasons: bool) -> Mapping[str, Any]:
    """Variables for the template. reasons: whether its models reason.

    Raises AppError(INVALID) for an effort that would change nothing.
    """
    effort = thinking.effort
    if effort is None:
        return {}
    switch = next((name for name, found in _SWITCHES if found.search(template)), None)
    if effort in _OFF and switch is not None:
        return {switch: False}
    if re.search(r"\breasoning_effort\b", template):
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
