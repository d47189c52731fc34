"""Macs of any size: a device that counts bytes, buffers and wired memory as MLX's Metal allocator
does, and layer caches and a model that hold such buffers instead of arrays.

Loop, scheduler, memory budget and prefix cache are the real ones. The rules of the allocator follow
mlx/backend/metal/allocator.cpp and resident.cpp (MLX 0.32): a buffer is wired when it is allocated,
if the limit allows; unused buffers stay in a pool, and count like used ones.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from app.engine.loop import Loop
from app.engine.memory_policy import (
    WIRED_STEP,
    DeviceMemory,
    MemoryPressure,
    choose_pool_limit,
    choose_rules,
    unified_budget,
)
from app.engine.memory_profile import MemoryProfile
from app.engine.policy import SchedulerLimits
from app.engine.prefix.radix import RadixPrefixCache
from models.base import SelectPositions, select_all
from models.image_inputs import ImageInputs
from models.kv import round_up_to_step
from tests import tiny

GIB = 1 << 30
PAGE = 16 << 10
RESOURCE_LIMIT = 499_000


class Buffer:
    """A buffer, which returns to the pool when its last reference is gone."""

    def __init__(self, metal: "FakeMetal", nbytes: int) -> None:
        self.metal, self.nbytes = metal, 0
        self.nbytes = metal.malloc(nbytes)
        metal.insert(id(self), self.nbytes)

    def __del__(self) -> None:
        if self.nbytes:  # 0 if the allocation failed
            self.metal.free(id(self), self.nbytes)


@dataclass
class FakeMetal:
    """The device. Implements `MemoryDevice`.

    limits: all wired limits that were set. peak_buffers, peak_wired: the most that it ever had.
    """

    memory: DeviceMemory
    pressure: MemoryPressure = MemoryPressure.NORMAL
    pool_limit: int = 0
    active: int = 0
    buffers: int = 0
    wired: int = 0
    wired_limit: int = 0
    peak_buffers: int = 0
    peak_wired: int = 0
    trims: int = 0
    limits: list[int] = field(default_factory=list)
    pool_bytes: int = 0
    pool_buffers: int = 0
    _pool: Counter[int] = field(default_factory=Counter[int])  # buffers by size
    _wired: dict[int, int] = field(default_factory=dict)
    _unwired: dict[int, int] = field(default_factory=dict)
    _born: dict[int, int] = field(default_factory=dict)
    _births: Iterator[int] = field(default_factory=itertools.count)

    def malloc(self, nbytes: int) -> int:
        nbytes = -(-nbytes // PAGE) * PAGE
        if self._pool[nbytes]:
            self._pool_out(nbytes)
        else:
            while self.pool_bytes > self.pool_limit:
                self._pool_out(next(size for size, count in self._pool.items() if count))
            most = self.memory.max_buffers
            if most is not None and self.buffers + self.pool_buffers >= most:
                raise RuntimeError(f"[metal::malloc] Resource limit ({most}) exceeded.")
        self.active += nbytes
        self.buffers += 1
        self.peak_buffers = max(self.peak_buffers, self.buffers + self.pool_buffers)
        return nbytes

    def _pool_out(self, nbytes: int) -> None:
        self._pool[nbytes] -= 1
        if not self._pool[nbytes]:
            del self._pool[nbytes]
        self.pool_bytes -= nbytes
        self.pool_buffers -= 1

    def _age(self, item: tuple[int, int]) -> int:
        return self._born[item[0]]

    def free(self, key: int, nbytes: int) -> None:
        self.active -= nbytes
        self.buffers -= 1
        del self._born[key]
        if self._wired.pop(key, None) is None:
            del self._unwired[key]
        else:
            self.wired -= nbytes
        self._pool[nbytes] += 1
        self.pool_bytes += nbytes
        self.pool_buffers += 1

    def insert(self, key: int, nbytes: int) -> None:
        self._born.setdefault(key, next(self._births))
        if self.wired + nbytes <= self.wired_limit:
            self._wired[key] = nbytes
            self.wired += nbytes
            self.peak_wired = max(self.peak_wired, self.wired)
        else:
            self._unwired[key] = nbytes

    def set_wired_limit(self, num_bytes: int) -> None:
        if num_bytes > self.memory.recommended:
            raise ValueError("a wired limit above the recommended working set")
        self.limits.append(num_bytes)
        if num_bytes == self.wired_limit:
            return
        self.wired_limit = num_bytes
        # MLX's order is the order of a hash table. Here it is the worst one: the weights are the
        # oldest.
        for key in list(self._wired):
            if self.wired <= num_bytes:
                break
            self._unwired[key] = self._wired.pop(key)
            self.wired -= self._unwired[key]
        for key, nbytes in sorted(self._unwired.items(), key=self._age)[::-1]:
            if self.wired + nbytes <= num_bytes:
                del self._unwired[key]
                self.insert(key, nbytes)

    def clear_cache(self) -> None:
        self._pool.clear()
        self.pool_bytes = self.pool_buffers = 0

    def trim(self) -> None:
        self.trims += 1
        self.clear_cache()

    def read_pressure(self) -> MemoryPressure:
        return self.pressure


class SimulatedLayer:
    """Keys and values of one layer in two buffers. Implements `LayerCache`, as `KVCache` does."""

    sliceable = True

    def __init__(self, metal: FakeMetal, position_bytes: int) -> None:
        self._metal, self._position_bytes = metal, position_bytes
        self.offset = self._capacity = self._reserved = 0
        self._buffers: tuple[Buffer, ...] = ()

    @property
    def nbytes(self) -> int:
        return self._capacity * self._position_bytes

    def advance(self, count: int) -> None:
        self.offset += count
        if self.offset > self._capacity:
            more = round_up_to_step(max(self.offset, self._capacity * 3 // 2))
            self._allocate(self._reserved if self._reserved >= self.offset else more)

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        half = capacity * self._position_bytes // 2
        self._buffers = (Buffer(self._metal, half), Buffer(self._metal, half)) if capacity else ()

    def can_trim(self, count: int) -> bool:
        return count <= self.offset

    def trim(self, count: int) -> None:
        self.offset -= count

    def copy(self) -> "SimulatedLayer":
        return self.slice(0, self.offset)

    def slice(self, start: int, end: int) -> "SimulatedLayer":
        assert 0 <= start <= end <= self.offset
        twin = SimulatedLayer(self._metal, self._position_bytes)
        twin.offset = end - start
        twin._allocate(end - start)
        return twin

    def append(self, other: "SimulatedLayer", start: int, end: int) -> None:
        assert 0 <= start <= end <= other.offset
        self.advance(end - start)

    def reserve(self, length: int) -> None:
        self._reserved = max(self._reserved, round_up_to_step(length))

    def estimate_nbytes(self, length: int, chunk: int) -> int:
        return self._position_bytes * round_up_to_step(length)

    def state(self) -> list[mx.array]:
        return [mx.zeros(1)]  # what a prompt chunk waits for; the bytes are those of the buffers

    def make_batch(self, rows: "Sequence[SimulatedLayer]", offsets: mx.array) -> "SimulatedBatch":
        return SimulatedBatch(rows)


class SimulatedBatch:
    def __init__(self, rows: Sequence[SimulatedLayer]) -> None:
        self._rows = rows

    def advance(self, count: int) -> None:
        for row in self._rows:
            row.advance(count)


class SimulatedModel(nn.Module):
    """Extends the caches, and always predicts token 0."""

    batch_invariant: ClassVar[bool] = False
    selects_logits: ClassVar[bool] = False
    image_rules: ClassVar[None] = None

    def __init__(self, metal: FakeMetal, *, weights: int, layers: int, position_bytes: int) -> None:
        super().__init__()
        count = 7 * layers
        self.weights = [Buffer(metal, weights // count) for _ in range(count)]
        self._make_layer: Callable[[], SimulatedLayer] = lambda: SimulatedLayer(
            metal, position_bytes // layers
        )
        self._num_layers = layers

    def __call__(
        self,
        tokens: mx.array,
        kv: Sequence[Any],
        select: SelectPositions = select_all,
        images: ImageInputs | None = None,
    ) -> mx.array:
        assert images is None
        for layer in kv:
            layer.advance(tokens.shape[1])
        return select(mx.zeros((*tokens.shape, 1)))

    def logits(self, hidden: mx.array) -> mx.array:
        return mx.zeros((*hidden.shape[:-1], tiny.VOCAB))

    def make_kv(self) -> list[Any]:
        return [self._make_layer() for _ in range(self._num_layers)]


@dataclass(frozen=True, kw_only=True)
class Mac:
    """A Mac and the model that it runs. Sizes in GiB. position_kib: KV bytes of a token, in KiB."""

    installed: float
    recommended: float
    weights: float
    position_kib: int
    layers: int
    context: int
    parallel: int = 8
    max_buffers: int = RESOURCE_LIMIT

    @property
    def memory(self) -> DeviceMemory:
        return DeviceMemory(
            physical=int(self.installed * GIB),
            recommended=int(self.recommended * GIB),
            max_buffers=self.max_buffers,
        )


# Recommended sizes as macOS reports them without `iogpu.wired_limit_mb`: two thirds of the memory,
# three quarters from 64 GB on.
MACS = {
    8: Mac(installed=8, recommended=5.3, weights=2.1, position_kib=144, layers=36, context=40_960),
    16: Mac(
        installed=16, recommended=10.7, weights=0.6, position_kib=112, layers=28, context=40_960
    ),
    32: Mac(installed=32, recommended=21.3, weights=16, position_kib=96, layers=48, context=40_960),
    128: Mac(
        installed=128, recommended=96, weights=42, position_kib=24, layers=48, context=131_072
    ),
    512: Mac(
        installed=512, recommended=384, weights=16, position_kib=53, layers=47, context=131_072
    ),
}


class Simulation:
    """A loop on a simulated Mac, loaded as app/engine/loader.py does."""

    def __init__(self, mac: Mac, *, memory: int | None = None, chunk: int = 2048) -> None:
        self.mac = mac
        self.metal = metal = FakeMetal(mac.memory)
        budget = unified_budget(mac.memory) if memory is None else memory
        weights, working = int(mac.weights * GIB), GIB // 4
        position_bytes = mac.position_kib * 1024 // mac.layers * mac.layers
        model: Any = SimulatedModel(
            metal, weights=weights, layers=mac.layers, position_bytes=position_bytes
        )
        profile = MemoryProfile(
            budget=budget,
            weights=weights,
            working=working,
            max_length=mac.context,
            kv_footprint=lambda length: position_bytes * round_up_to_step(length),
            num_layers=mac.layers,
            buffers_per_layer=2,
        )
        context = profile.max_context(mac.context)
        self.rules = choose_rules(
            mac.memory,
            kv_budget=profile.kv_budget,
            conversation=profile.kv_footprint(context),
            has_limit=memory is not None,
            may_shrink=True,
            experimental_metal=True,
            weight_buffers=len(model.weights),
            running_layers=mac.parallel * mac.layers,
            buffers_per_layer=2,
        )
        metal.pool_limit = choose_pool_limit(budget, working)
        self.prefix: RadixPrefixCache[Any] = RadixPrefixCache(model.make_kv)
        self.loop = Loop(
            model,
            self.prefix,
            vocab=tiny.VOCAB,
            limits=SchedulerLimits(max_running=mac.parallel, max_prefill_tokens=chunk),
            memory=profile,
            context=context,
            rules=self.rules,
            device=metal,
        )
        self.peak_in_use = 0  # since the memory was last unwired
        self.check()

    def step(self) -> None:
        self.loop.step()
        self.check()

    def maintain(self, idle_seconds: float = 0.0) -> bool:
        changed = self.loop.maintain_memory(idle_seconds)
        if self.metal.wired_limit == 0:
            self.peak_in_use = 0
        self.check()
        return changed

    def check(self) -> None:
        """The rules that hold at all times."""
        ledger = self.loop.stats().ledger
        self.peak_in_use = max(self.peak_in_use, ledger.in_use)
        installed = self.mac.installed * GIB
        assert self.metal.wired <= self.metal.wired_limit == ledger.wired
        assert ledger.wired <= installed - max(installed / 4, 4 * GIB)
        assert ledger.wired <= self.mac.recommended * GIB
        assert ledger.wired < self.peak_in_use + WIRED_STEP
        assert ledger.prefix <= ledger.prefix_limit
        assert ledger.free >= 0
