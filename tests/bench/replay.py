"""`make bench ARGS=traces`: what prefix cache policies skip of recorded traffic.

Policies alone, over layers that keep ids instead of tensors. The figure is the share: prompt ids
that the policy skipped, of those that a cache which forgets nothing would have skipped.
"""

import bisect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count
from pathlib import Path

from app.core.ports import Lease, PrefixCache
from app.engine.prefix.radix import RadixPrefixCache
from app.engine.prefix.single import SinglePrefixCache
from app.engine.prefix.slots import SlotPrefixCache
from tests.bench import traces
from tests.bench.traces import Ids, Turn
from tests.engine.prefix.layers import FakeLayer, layers

WINDOW = 512

Policy = PrefixCache[FakeLayer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Prompt ids in all; those that the policy skipped; those that could be skipped. held: the
    most bytes the policy held between turns."""

    prompt: int
    skipped: int
    possible: int
    held: int

    @property
    def share(self) -> float:
        return self.skipped / self.possible


class Unbounded:
    """The oracle: everything that was ever evaluated, in order, so that the nearest neighbours of
    a prompt are those that share most with it."""

    def __init__(self) -> None:
        self._seen: list[Ids] = []

    def longest(self, prompt: Ids) -> int:
        """Ids of the prompt that need not be evaluated: all but one at most."""
        place = bisect.bisect_left(self._seen, prompt)
        near = self._seen[max(0, place - 1) : place + 1]
        return min(max((_shared(prompt, ids) for ids in near), default=0), len(prompt) - 1)

    def add(self, ids: Ids) -> None:
        bisect.insort(self._seen, ids)


def replay(policy: Policy, turns: Sequence[Turn], *, budget: int | None = None) -> Replayed:
    """One turn at a time, through a lease as the engine does it. budget: bytes that the policy may
    hold between two turns."""
    oracle = Unbounded()
    prompt = skipped = possible = held = 0
    for turn in turns:
        lease = policy.begin(turn.prompt, marks=turn.marks)
        prompt += len(turn.prompt)
        skipped += lease.cached
        possible += oracle.longest(turn.prompt)
        evaluated = turn.prompt + turn.answer
        _evaluate(lease, turn.prompt, evaluated)
        oracle.add(evaluated)
        lease.commit(evaluated, keep=len(evaluated))
        if budget is not None and policy.nbytes > budget:
            policy.shrink(policy.nbytes - budget)
            assert policy.nbytes <= budget
        held = max(held, policy.nbytes)
    return Replayed(prompt=prompt, skipped=skipped, possible=possible, held=held)


def _evaluate(lease: Lease[FakeLayer], prompt: Ids, evaluated: Ids) -> None:
    """Prefill, stopping where the policy wants to, then decode."""
    done = lease.cached
    for layer in lease.kv:
        assert layer.ids == prompt[:done], "the caches stand for something else"
    for stop in (*lease.pauses, len(prompt), len(evaluated)):
        for layer in lease.kv:
            layer.feed(evaluated[done:stop])
        done = stop
        if done < len(evaluated):
            lease.reached(evaluated[:done])


# by name, the kinds of a model's layers -> a policy
POLICIES: dict[str, Callable[[str], Policy]] = {
    "single": lambda kinds: SinglePrefixCache(lambda: layers(kinds, WINDOW)),
    "slots": lambda kinds: SlotPrefixCache(
        lambda: layers(kinds, WINDOW), slots=traces.AT_ONCE, context=1 << 20, multi_user=True
    ),
    "radix": lambda kinds: RadixPrefixCache(lambda: layers(kinds, WINDOW)),
}

# layers (k: every position, w: a window, r: recurrent) and whether the ends of turns are told
CASES = (("k", False), ("kw", False), ("kw", True), ("kr", False), ("kr", True))


def report(shared: Path) -> str:
    """shared: the folder of the recordings."""
    lines = [
        "prompt ids that a policy serves from cache, of those that an unbounded cache would: with "
        "unlimited memory, and with a quarter of what radix then holds",
        "| traffic | layers | ends of turns | policy | prompt ids | could skip | share | quarter |",
        "|---|---|---|---|---|---|---|---|",
    ]
    agents = traces.interleaved(traces.conversations(shared))
    for kinds, told in CASES:
        turns = agents if told else [replace(turn, marks=()) for turn in agents]
        title = f"agents | {kinds} | {'known' if told else 'unknown'}"
        lines += _rows(title, kinds, turns, ("radix",) if told else tuple(POLICIES))
    for name in ("conversation", "synthetic"):
        title = f"Mooncake, {name} | k | unknown"
        lines += _rows(title, "k", traces.mooncake(shared, name), tuple(POLICIES))
    return "\n".join(lines)


def _rows(title: str, kinds: str, turns: Sequence[Turn], names: Sequence[str]) -> list[str]:
    budget = replay(POLICIES["radix"](kinds), turns).held // 4
    rows: list[str] = []
    for name in names:
        ample = replay(POLICIES[name](kinds), turns)
        scarce = replay(POLICIES[name](kinds), turns, budget=budget)
        rows.append(
            f"| {title} | {name} | {ample.prompt} | {ample.possible / ample.prompt:.3f} "
            f"| {ample.share:.3f} | {scarce.share:.3f} |"
        )
    return rows


def _shared(a: Ids, b: Ids) -> int:
    """Length of the common prefix, without a step of Python for each id."""
    return next(compress(count(), map(operator.ne, a, b)), min(len(a), len(b)))
