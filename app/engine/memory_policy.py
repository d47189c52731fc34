"""The memory policy: how much memory an engine may wire, keep as cached prefixes, and leave unused
in the allocator's pool.

Knows: bytes, counts, levels of memory pressure. Must not know: tensors, devices, requests. All
functions are pure.

On a Mac, the GPU and all programs share one memory. Wired memory is always resident in it, so
nothing else can use it:

    physical  [ weights | working space | KV of running sequences | prefixes | free ] [ reserve ]
    wired     [ ................................................. ]
    budget    [ .................................................................... ]

Without the wired part, the system pages out a large model between requests. With more of it, other
programs stop and the system swaps.
"""

from dataclasses import dataclass
from enum import IntEnum

_GIBIBYTE = 1 << 30

# The part of a shared memory that stays free of wired memory, and its minimum in bytes.
_RESERVE_SHARE, _MIN_RESERVE = 0.25, 4 * _GIBIBYTE

# The part of the recommended working set that the budget may use.
_WORKING_SET_SHARE = 0.9

# The part of the KV cache memory that cached prefixes may use, if other programs share the memory
# and no limit is set.
SHARED_PREFIX_SHARE = 0.25

# Under pressure, the limit of cached prefixes is halved in each check, but not below this part of
# the full limit. Without pressure, it grows by this part in each check.
_MIN_SHARE_UNDER_PRESSURE, _RECOVERY_SHARE = 1 / 8, 1 / 32

# The wired limit grows in steps of this many bytes, because MLX visits all of its buffers whenever
# the limit changes.
WIRED_STEP = 256 << 20

# The allocator's pool of unused buffers: a part of the budget, and its maximum in bytes.
_POOL_SHARE, _MAX_POOL_BYTES = 0.05, 2 * _GIBIBYTE

# The part of the device's buffers that weights, sequences and cached prefixes may use. The rest is
# for the temporary arrays of a step and for the pool, whose buffers count as well. A pool of 2 GiB
# has at most 131,072 buffers of one page (16 KiB).
_HELD_BUFFERS_SHARE = 0.6


class MemoryPressure(IntEnum):
    """The memory pressure of the system, with macOS's values."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of the device.

    physical: the memory that the device shares with all programs, in bytes; None for dedicated
    memory.
    recommended: the working set that Metal recommends, in bytes; 0 if the device cannot wire
        memory.
    max_buffers: the maximum number of buffers; None if it is not limited.
    """

    physical: int | None = None
    recommended: int = 0
    max_buffers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """What an engine may hold. The rules are fixed when the model is loaded.

    prefix_limit: the maximum number of bytes of cached prefixes; None for all free memory.
    max_cached_layers: the maximum number of layer caches of cached prefixes; None if it is not
        limited.
    wirable: the maximum number of wired bytes; 0 if the device cannot wire memory.
    shrinks_under_pressure: whether cached prefixes are evicted when the system is short of memory.
    """

    prefix_limit: int | None = None
    max_cached_layers: int | None = None
    wirable: int = 0
    shrinks_under_pressure: bool = False


def reserve_bytes(physical: int) -> int:
    """Returns the number of bytes that an engine leaves to the system and other programs."""
    return max(int(_RESERVE_SHARE * physical), _MIN_RESERVE)


def wirable_bytes(memory: DeviceMemory) -> int:
    """Returns the maximum number of wired bytes."""
    if memory.physical is None:
        return memory.recommended
    return max(0, min(memory.recommended, memory.physical - reserve_bytes(memory.physical)))


def unified_budget(memory: DeviceMemory) -> int:
    """Returns the default budget of a device that shares its memory and can wire it."""
    return min(int(_WORKING_SET_SHARE * memory.recommended), wirable_bytes(memory))


def choose_prefix_limit(kv_budget: int, conversation: int) -> int:
    """Returns the default limit of cached prefixes in bytes, for a memory that other programs
    share.

    kv_budget: the memory for running sequences and cached prefixes.
    conversation: the size of the longest sequence. One such conversation always stays cached.
    """
    return min(kv_budget, max(int(SHARED_PREFIX_SHARE * kv_budget), conversation))


def choose_pool_limit(budget: int, working: int) -> int:
    """Returns the maximum size of the allocator's pool of unused buffers. A pool that is as large
    as the working space serves a prefill from the buffers of the previous chunk. Beyond that, it
    keeps the buffers of ended sequences for the next ones."""
    return max(working, min(int(_POOL_SHARE * budget), _MAX_POOL_BYTES))


def choose_max_cached_layers(
    max_buffers: int, *, weights: int, running_layers: int, buffers_per_layer: int
) -> int:
    """Returns the maximum number of layer caches of cached prefixes.

    max_buffers: the number of buffers that the device allows.
    weights: the number of buffers of the weights.
    running_layers: the maximum number of layer caches of running sequences. While such a sequence
        starts, grows or ends, its layers are copied, so each counts twice.
    buffers_per_layer: the number of buffers of one layer cache.
    """
    left = int(_HELD_BUFFERS_SHARE * max_buffers) - weights
    return max(0, left // buffers_per_layer - 2 * running_layers)


def wired_target(needed: int, wirable: int) -> int:
    """Returns the wired limit for `needed` bytes of weights, working space and running sequences.
    It is rounded up, so that it does not change in each step."""
    return min(wirable, -(-needed // WIRED_STEP) * WIRED_STEP)


def adjust_prefix_limit(limit: int, *, used: int, full: int, pressure: MemoryPressure) -> int:
    """Returns the next limit of cached prefixes in bytes.

    limit: the current limit.
    used: the size of cached prefixes.
    full: the limit without memory pressure.

    Under pressure, the prefixes are halved in each check, and the most recently used ones stay. At
    the critical level, none stay. Afterwards, the limit grows slowly, because the pressure may have
    ended only because of the eviction.
    """
    match pressure:
        case MemoryPressure.CRITICAL:
            return 0
        case MemoryPressure.WARNING:
            floor = int(_MIN_SHARE_UNDER_PRESSURE * full)
            return min(limit, max(floor, min(limit, used) // 2))
        case MemoryPressure.NORMAL:
            return min(full, limit + int(_RECOVERY_SHARE * full) + 1)


def choose_rules(
    memory: DeviceMemory,
    *,
    kv_budget: int,
    conversation: int,
    has_limit: bool,
    may_shrink: bool,
    experimental_metal: bool,
    weight_buffers: int,
    running_layers: int,
    buffers_per_layer: int,
) -> MemoryRules:
    """Returns the rules for an engine.

    kv_budget, conversation: see `choose_prefix_limit`.
    has_limit: whether a memory limit was given. Cached prefixes may then use all of it.
    may_shrink: whether the engine may evict prefixes at any time. Ranks that run one model together
        may not, because all of them must evict the same prefixes in the same step.
    experimental_metal: whether a device that can wire memory does so, and evicts prefixes under
        memory pressure.
    weight_buffers, running_layers, buffers_per_layer: see `choose_max_cached_layers`.
    """
    is_shared = memory.physical is not None
    return MemoryRules(
        prefix_limit=choose_prefix_limit(kv_budget, conversation)
        if is_shared and not has_limit
        else None,
        max_cached_layers=None
        if memory.max_buffers is None
        else choose_max_cached_layers(
            memory.max_buffers,
            weights=weight_buffers,
            running_layers=running_layers,
            buffers_per_layer=buffers_per_layer,
        ),
        wirable=wirable_bytes(memory) if experimental_metal else 0,
        shrinks_under_pressure=is_shared
        and may_shrink
        and (experimental_metal or not memory.recommended),
    )
