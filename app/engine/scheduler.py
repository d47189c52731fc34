"""Who runs, and how many prompt tokens each gets, in the next step.

Knows: counts. Must not know: tensors, ids, requests. Pure: asks nothing, changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """running: sequences that may be in memory at once. prefill: prompt tokens a step may
    evaluate, which bounds how long a step takes, and so how late a cancellation is seen."""

    running: int = 1
    prefill: int = 512


def admissions(*, waiting: int, running: int, limits: Limits) -> int:
    """How many of those who wait may start now, first come first."""
    return max(0, min(waiting, limits.running - running))


def prefill_shares(remaining: Sequence[int], limits: Limits) -> list[int]:
    """Prompt tokens to evaluate for each prefilling sequence, oldest first.

    The oldest takes what it needs, the next gets what is left of the budget.
    """
    budget, shares = limits.prefill, list[int]()
    for wanted in remaining:
        share = min(wanted, budget)
        shares.append(share)
        budget -= share
    return shares
