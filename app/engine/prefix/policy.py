"""Prefix cache policies by name: `--cache` names a module of this package.

Knows: the arguments of every policy. Must not know: any policy, settings, the scheduler.

A policy is a module with a function `create_cache(config)` that returns a `PrefixCache`. The name
of the module must also be listed in `app.core.settings.CachePolicy`, which defines the values of
the option.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from app.engine.prefix.cache import PrefixCache
from models.kv import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheConfig:
    """The arguments of a prefix cache policy.

    make_kv: creates the empty caches of all layers.
    evaluate: evaluates lazy caches, and waits for them.
    dispatch: starts to evaluate lazy caches, and does not wait.
    alignment: prefix lengths are multiples of this number of tokens.
    num_slots: the maximum number of running sequences.
    context: the maximum number of positions in a sequence.
    multi_user: whether a prompt may reuse the prefix of a busy slot.
    """

    make_kv: Callable[..., Sequence[LayerCache]]
    evaluate: Callable[[Sequence[LayerCache]], None]
    dispatch: Callable[[Sequence[LayerCache]], None]
    alignment: int
    num_slots: int
    context: int
    multi_user: bool


def create_prefix_cache(policy: str, config: PrefixCacheConfig) -> PrefixCache[LayerCache]:
    return import_module(f"{__package__}.{policy}").create_cache(config)
