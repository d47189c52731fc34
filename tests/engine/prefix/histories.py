"""Long random histories of a prefix cache; everything is checked after each operation."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.engine.prefix.cache import Lease
from tests.engine.prefix.harness import GARBAGE, FakePrefixCache, assert_holds, begin, feed
from tests.engine.prefix.layers import FakeLayer

PARALLEL = 4
ALL = 1 << 40


@dataclass
class RunningSequence:
    """A sequence in a history: `ids` grow after the prompt, as if sampled."""

    lease: Lease[FakeLayer]
    ids: list[int]
    checkpoint_positions: list[int]
    fed: int = 0

    def feed(self, count: int) -> None:
        """Evaluate `count` more ids, but stop at the next checkpoint position."""
        end = self.fed + count
        if self.checkpoint_positions:
            end = min(end, self.checkpoint_positions[0])
        self.ids += [(7 * len(self.ids) + i) % 3 for i in range(end - len(self.ids))]
        feed(self.lease, self.ids[self.fed : end])
        self.fed = end
        if self.checkpoint_positions and end == self.checkpoint_positions[0]:
            self.checkpoint_positions.pop(0)
            self.lease.publish(self.ids[:end])


# the name of an operation, and three numbers for its parameters
Operation = tuple[str, int, int, int]
NAMES = ("begin", "feed", "feed", "publish", "commit", "cancel", "discard", "evict", "clear")
WEIGHTS = (8, 6, 6, 3, 5, 3, 1, 1, 0.2)


@dataclass
class History:
    """Any operations in any order; everything is checked after each of them."""

    cache: FakePrefixCache
    alignment: int
    also: Callable[[], None] = lambda: None  # a policy's own checks
    running: list[RunningSequence] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    def play(self, operations: Sequence[Operation]) -> None:
        for name, a, b, c in operations:
            if name == "begin" and len(self.running) == PARALLEL:
                continue
            if name in ("begin", "evict", "clear"):
                getattr(self, name)(a, b, c)
            elif self.running:
                getattr(self, name)(self.running[a % len(self.running)], b, c)
            self.check()
        for running in tuple(self.running):
            self.commit(running, 0, 0)
            self.check()
        self.evict(0, 0, 0)
        assert self.cache.nbytes == 0, "bytes are left without a lease"

    def check(self) -> None:
        self.cache.check()
        self.also()
        layer_ids = [id(layer) for running in self.running for layer in running.lease.kv]
        assert len(set(layer_ids)) == len(layer_ids), "two leases hold one layer"
        for running in self.running:
            assert_holds(running.lease, running.ids[: running.fed])

    def begin(self, a: int, b: int, c: int) -> None:
        # small alphabets and continued prompts, so that prefixes collide
        ids = [int(digit) for digit in _ternary(b * 1009 + c)]
        if self.prompts and a % 3:
            earlier = self.prompts[b % len(self.prompts)]
            ids = earlier[: len(earlier) - a % 4] + ids[: 1 + c % 6]
        turn_ends = sorted({1 + b % len(ids), 1 + c % len(ids)})
        lease = begin(
            self.cache, ids, alignment=self.alignment, turn_ends=turn_ends, reuse=a % 11 != 0
        )
        self.prompts.append(ids)
        self.running.append(
            RunningSequence(lease, list(ids), list(lease.checkpoint_positions), lease.cached)
        )

    def feed(self, running: RunningSequence, b: int, c: int) -> None:
        running.feed(1 + b % 5)

    def publish(self, running: RunningSequence, b: int, c: int) -> None:
        if running.fed:
            running.lease.publish(running.ids[: running.fed])

    def commit(self, running: RunningSequence, b: int, c: int) -> None:
        """b: whether one more id was evaluated than is known."""
        self.running.remove(running)
        known = running.ids[: running.fed]
        if b % 3 == 1:
            feed(running.lease, [GARBAGE])
        running.lease.commit(known, keep=len(known))
        self.prompts.append([*known, c % 3])

    def cancel(self, running: RunningSequence, b: int, c: int) -> None:
        """At any position; b: whether a step failed after its first layer."""
        self.running.remove(running)
        known = running.ids[: running.fed]
        if b % 3 == 1:
            known.append(c % 3)
            running.lease.kv[0].feed(known[-1:])
        running.lease.commit(known, keep=c % (len(known) + 1))

    def discard(self, running: RunningSequence, b: int, c: int) -> None:
        self.running.remove(running)
        for layer in running.lease.kv[: b % 3]:
            layer.feed([GARBAGE])
        running.lease.discard()

    def evict(self, a: int, b: int, c: int) -> None:
        before, evictions = self.cache.nbytes, self.cache.evictions
        requested = 1 + b % (2 * before + 1) if b else ALL
        freed = self.cache.evict(requested)
        assert freed == before - self.cache.nbytes
        assert freed >= min(requested, before) or self.running
        assert self.cache.evictions > evictions or freed == 0 or self.running

    def clear(self, a: int, b: int, c: int) -> None:
        self.cache.clear()
        assert self.cache.nbytes == 0


def _ternary(number: int) -> str:
    digits = ""
    while number:
        digits = str(number % 3) + digits
        number //= 3
    return digits or "0"


def random_operations(draw: random.Random) -> list[Operation]:
    """Many operations that fill the cache, and few that empty it."""
    return [
        (name, draw.randrange(9973), draw.randrange(9973), draw.randrange(9973))
        for name in draw.choices(NAMES, WEIGHTS, k=60)
    ]
