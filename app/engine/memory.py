"""Bytes: what the device has, what the engine may use, what a sequence takes.

Knows: the device, layer caches, arithmetic. Must not know: requests, what runs. Bytes of weights
and caches are counted, not asked of the allocator: the books must be right before the memory is
taken.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx

from models.base import Model
from models.kv import STEP, LayerCache

# of a device whose memory is its own; of a machine that has other things to do
_DEVICE_SHARE, _MACHINE_SHARE = 0.9, 0.7

# where Linux tells the limit of a container: cgroup v2, v1
_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """budget: bytes for everything. weights: of the model. working: kept free for what a step
    needs while it runs. footprint: positions -> bytes of one sequence's layer caches."""

    budget: int
    weights: int
    working: int
    footprint: Callable[[int], int]

    @property
    def kv_budget(self) -> int:
        """Bytes for layer caches of running sequences and for cached prefixes."""
        return max(0, self.budget - self.weights - self.working)

    def positions(self, most: int) -> int:
        """The longest sequence that fits alone, at most `most` positions."""
        if self.footprint(most) <= self.kv_budget:
            return most
        fits, too_many = 0, -(-most // STEP)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.footprint(middle * STEP) <= self.kv_budget:
                fits = middle
            else:
                too_many = middle
        return fits * STEP


class Footprint:
    """Bytes of one sequence's layer caches, measured on a sequence of one token."""

    def __init__(self, layers: Sequence[LayerCache], chunk: int) -> None:
        """layers: something has been evaluated into them. chunk: positions evaluated at a time."""
        # without their free room: these are kept
        self._layers = [layer.copy() for layer in layers]
        mx.eval([array for layer in self._layers for array in layer.state()])
        self._chunk = chunk

    def __call__(self, positions: int) -> int:
        return sum(layer.nbytes_at(positions, self._chunk) for layer in self._layers)


def device_budget() -> int:
    """Bytes that the engine may use when nobody says how many."""
    device = mx.device_info()
    if mx.metal.is_available():
        return int(_DEVICE_SHARE * cast(int, device["max_recommended_working_set_size"]))
    if mx.default_device().type == mx.DeviceType.gpu:
        total = device.get("total_memory", device.get("memory_size", 0))
        return int(_DEVICE_SHARE * cast(int, total)) or _machine_budget()
    return _machine_budget()


def _machine_budget() -> int:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_MACHINE_SHARE * min([physical, *_container_limits()]))


def _container_limits() -> list[int]:
    found = list[int]()
    for path in _CGROUPS:
        try:
            said = path.read_text().strip()
        except OSError:
            continue
        if said.isdecimal():  # else "max"
            found.append(int(said))
    return found


def measured(
    model: Model, *, budget: int, weights: int, chunk: int, rows: int, heads: int, context: int
) -> Memory:
    """Evaluate one token and draw conclusions.

    The working space is that of a prompt chunk, taken as `chunk` times that of one token, and of
    the logits of `rows` rows; on a CPU also that of the chunk's attention scores over the whole
    context, which other devices never hold in full.
    """
    kv = model.make_kv()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    hidden = model(mx.array([[0]]), kv)
    logits = model.logits(hidden[:, -1])
    mx.eval(logits, [layer.state() for layer in kv])
    held = sum(layer.nbytes for layer in kv)
    token = max(0, mx.get_peak_memory() - before - held)
    # float32 logits, and as much again three times over while they are sampled
    working = chunk * token + 16 * rows * logits.size
    if mx.default_device().type == mx.DeviceType.cpu:
        working += 2 * 4 * heads * chunk * context
    return Memory(budget=budget, weights=weights, working=working, footprint=Footprint(kv, chunk))
