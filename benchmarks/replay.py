"""`make bench ARGS=traces`: prefix cache policies on recorded traffic.

The policies run without models, with layers that store ids instead of tensors. The result is the
share of cached prompt ids among those that an unbounded cache would serve.
"""

import bisect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count
from pathlib import Path

from app.engine.prefix.cache import Lease, PrefixCache
from app.engine.prefix.radix import RadixPrefixCache
from app.engine.prefix.single import SinglePrefixCache
from app.engine.prefix.slots import SlotPrefixCache
from benchmarks import traces
from benchmarks.traces import Ids, RecordedTurn
from tests.engine.prefix.layers import FakeLayer, layers

WINDOW = 512

Policy = PrefixCache[FakeLayer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """prompt: all prompt ids. cached: served by the policy. possible: served by an unbounded cache.
    peak_nbytes: peak size of the cache between turns."""

    prompt: int
    cached: int
    possible: int
    peak_nbytes: int

    @property
    def share(self) -> float:
        return self.cached / self.possible


class UnboundedCache:
    """All evaluated sequences in sorted order, so that the neighbours of a prompt have the longest
    common prefixes with it."""

    def __init__(self) -> None:
        self._seen: list[Ids] = []

    def longest_prefix(self, prompt: Ids) -> int:
        """Number of prompt ids that need no evaluation: at most all but one."""
        place = bisect.bisect_left(self._seen, prompt)
        near = self._seen[max(0, place - 1) : place + 1]
        return min(
            max((_common_prefix_length(prompt, ids) for ids in near), default=0), len(prompt) - 1
        )

    def add(self, ids: Ids) -> None:
        bisect.insort(self._seen, ids)


def replay(
    policy: Policy, turns: Sequence[RecordedTurn], *, budget: int | None = None
) -> ReplayResult:
    """Run one turn at a time through a lease, as the engine does. budget: maximum bytes of the
    cache between turns."""
    oracle = UnboundedCache()
    prompt = skipped = possible = peak = 0
    for turn in turns:
        lease = policy.begin(turn.prompt, turn_ends=turn.turn_ends)
        prompt += len(turn.prompt)
        skipped += lease.cached
        possible += oracle.longest_prefix(turn.prompt)
        evaluated = turn.prompt + turn.answer
        _evaluate(lease, turn.prompt, evaluated)
        oracle.add(evaluated)
        lease.commit(evaluated, keep=len(evaluated))
        if budget is not None and policy.nbytes > budget:
            policy.evict(policy.nbytes - budget)
            assert policy.nbytes <= budget
        peak = max(peak, policy.nbytes)
    return ReplayResult(prompt=prompt, cached=skipped, possible=possible, peak_nbytes=peak)


def _evaluate(lease: Lease[FakeLayer], prompt: Ids, evaluated: Ids) -> None:
    """Prefill with pauses at the checkpoint positions, then decode."""
    done = lease.cached
    for layer in lease.kv:
        assert layer.ids == prompt[:done], "the caches have other ids"
    for stop in (*lease.checkpoint_positions, len(prompt), len(evaluated)):
        for layer in lease.kv:
            layer.feed(evaluated[done:stop])
        done = stop
        if done < len(evaluated):
            lease.publish(evaluated[:done])


# name -> policy for a string of layer kinds
POLICIES: dict[str, Callable[[str], Policy]] = {
    "single": lambda kinds: SinglePrefixCache(lambda: layers(kinds, WINDOW)),
    "slots": lambda kinds: SlotPrefixCache(
        lambda: layers(kinds, WINDOW), slots=traces.CONCURRENCY, context=1 << 20, multi_user=True
    ),
    "radix": lambda kinds: RadixPrefixCache(lambda: layers(kinds, WINDOW)),
}

# layers (k: full attention, w: window, r: recurrent) and whether turn ends are known
CASES = (("k", False), ("kw", False), ("kw", True), ("kr", False), ("kr", True))


def report(shared: Path) -> str:
    """shared: the folder with recordings."""
    lines = [
        "prompt ids that a policy serves from cache, of those that an unbounded cache would: with "
        "unlimited memory, and with a quarter of what radix then holds",
        "| traffic | layers | ends of turns | policy | prompt ids | could skip | share | quarter |",
        "|---|---|---|---|---|---|---|---|",
    ]
    agents = traces.interleave(traces.load_conversations(shared))
    for kinds, turn_ends_known in CASES:
        turns = agents if turn_ends_known else [replace(turn, turn_ends=()) for turn in agents]
        title = f"agents | {kinds} | {'known' if turn_ends_known else 'unknown'}"
        lines += _rows(title, kinds, turns, ("radix",) if turn_ends_known else tuple(POLICIES))
    for name in ("conversation", "synthetic"):
        title = f"Mooncake, {name} | k | unknown"
        lines += _rows(title, "k", traces.load_mooncake(shared, name), tuple(POLICIES))
    return "\n".join(lines)


def _rows(title: str, kinds: str, turns: Sequence[RecordedTurn], names: Sequence[str]) -> list[str]:
    budget = replay(POLICIES["radix"](kinds), turns).peak_nbytes // 4
    rows: list[str] = []
    for name in names:
        ample = replay(POLICIES[name](kinds), turns)
        scarce = replay(POLICIES[name](kinds), turns, budget=budget)
        rows.append(
            f"| {title} | {name} | {ample.prompt} | {ample.possible / ample.prompt:.3f} "
            f"| {ample.share:.3f} | {scarce.share:.3f} |"
        )
    return rows


def _common_prefix_length(a: Ids, b: Ids) -> int:
    """Length of the common prefix, without a Python loop over ids."""
    return next(compress(count(), map(operator.ne, a, b)), min(len(a), len(b)))
