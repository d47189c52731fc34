"""Prefix cache policies by name: `--cache` names a module of this package.

Knows: what every policy is built from. Must not know: any policy, settings, the scheduler.

A policy is a module with a function `create_cache(config)` that returns a `PrefixCache`. Its name
must also be in `app.core.settings.CachePolicy`, which lists what the option accepts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from app.core.ports import PrefixCache
from models.kv import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheConfig:
    """make_kv: makes the empty caches of all layers. evaluate: evaluates lazy caches. alignment:
    prefixes are reused up to multiples of this many tokens. num_slots: sequences in memory at once.
    context: positions of one sequence. multi_user: prompts may reuse a prefix of a busy slot."""

    make_kv: Callable[..., Sequence[LayerCache]]
    evaluate: Callable[[Sequence[LayerCache]], None]
    alignment: int
    num_slots: int
    context: int
    multi_user: bool


def create_prefix_cache(policy: str, config: PrefixCacheConfig) -> PrefixCache[LayerCache]:
    return import_module(f"{__package__}.{policy}").create_cache(config)
