"""Every architecture's tiny configs, gathered from the tests that list them.

A test module of an architecture exports `CASES`. The suites that run for all architectures
(tests/models/test_parity.py, tests/engine/test_architectures.py) collect them with `cases`, so a
new architecture is one file in models/ and one in tests/models/.

The behavior of the engine with a model depends on its kind of cache and on little else. So its
suites run one case of each kind (`KINDS`), and only `make test-all` runs the others. The kind is
computed from the model (`find_cache_kind`). Building the models of all cases takes seconds, which
every worker would spend, so the kinds are listed, and tests/engine/test_architectures.py compares
the list with the models.
"""

import importlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from models import architectures
from models.checkpoint_config import get_text_config
from models.kv import LayerCache
from models.mlx_lm_cache import MlxLmLayerCache
from models.recurrent import RecurrentCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """name: the property that this case tests. config: the content of config.json, so small that
    the model is built in milliseconds; layers with a window have a small one. quantized: the
    quantized formats that are also tested, by their names in tests/models/parity.py.
    transformers: whether that library has the architecture and computes the same logits. why: if
    not, a sentence for the table of `make parity`."""

    name: str
    config: Mapping[str, Any]
    quantized: tuple[str, ...] = ("affine-8",)
    transformers: bool = True
    why: str = ""

    @property
    def id(self) -> str:
        return f"{self.config['model_type']}-{self.name}"

    @property
    def vocab(self) -> int:
        """Vocabulary size; for a multimodal model, that of its text part."""
        return self.config.get("text_config", self.config)["vocab_size"]


def cases() -> list[Case]:
    found: list[Case] = []
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        if re.search(r"^CASES\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            module = importlib.import_module(f"tests.models.{file.stem}")
            # a suite's list of this name has parameters
            found += [case for case in vars(module).get("CASES", []) if isinstance(case, Case)]
    return found


def build_untrained(case: Case) -> Any:
    """The model with the initial weights of its class. Nothing is evaluated, so it takes a few
    milliseconds."""
    config = get_text_config(case.config)
    architecture = architectures._find_architecture(config, case.config)
    return architecture.Model(architecture.Config.from_dict(config))


def find_cache_kind(model: Any) -> str:
    """The properties that the engine depends on: the types of the layers' caches, whether layers
    attend to the keys of others, and whether a batch gives the same bits. Experts do not count:
    they compute each position separately."""
    kind = " + ".join(sorted({_describe_cache(layer) for layer in model.make_kv()}))
    sources: list[int] = getattr(getattr(model, "model", None), "sources", [])
    if len(set(sources)) < len(sources):
        kind = f"{kind}, shared"
    return kind if model.batch_invariant else f"{kind}, not batch-invariant"


def _describe_cache(cache: LayerCache) -> str:
    name = type(cache).__name__
    if isinstance(cache, MlxLmLayerCache):
        return f"{name}({', '.join(map(_describe_cache, cache.caches))})"
    return f"{name}[{cache.num_slots}]" if isinstance(cache, RecurrentCache) else name


# Of each kind of cache the ID of the case that represents all.
KINDS = {
    "LatentCache, not batch-invariant": "deepseek_v2-lite",
    "KVCache + RotatingKVCache": "gemma2-plain",
    "KVCache + RotatingKVCache, shared": "gemma4_text-e2b",
    "KVCache, shared": "gemma4_text-windowless",
    "KVCache": "glm4_moe-plain",
    "KVCache + RecurrentCache[2]": "granitemoehybrid-plain",
    "KVCache + RecurrentCache[1]": "lfm2-plain",
    "MlxLmLayerCache(MlxLmKVCache), not batch-invariant": "starcoder2-plain",
    "MlxLmLayerCache(MlxLmKVCache) + MlxLmLayerCache(MlxLmRotatingKVCache), not batch-invariant": (
        "cohere2-windows"
    ),
    "MlxLmLayerCache(MlxLmArraysCache[2]), not batch-invariant": "mamba2-states",
    (
        "MlxLmLayerCache(MlxLmArraysCache[2]) + MlxLmLayerCache(MlxLmRotatingKVCache), "
        "not batch-invariant"
    ): "recurrent_gemma-states-or-windows",
    "MlxLmLayerCache(MlxLmArraysCache[2], MlxLmKVCache), not batch-invariant": (
        "falcon_h1-states-and-attention"
    ),
    "MlxLmLayerCache(MlxLmKVCache, MlxLmKVCache), not batch-invariant": (
        "deepseek_v32-latent-and-index"
    ),
    "MlxLmLayerCache(MlxLmChunkedKVCache) + MlxLmLayerCache(MlxLmKVCache), not batch-invariant": (
        "llama4-chunks"
    ),
    "KVCache + RecurrentCache[2], not batch-invariant": "qwen3_5-seeing",
}


def group_by_cache(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """The cases of each kind of cache. It builds all models."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[find_cache_kind(build_untrained(case))].append(case)
    return dict(groups)


def mark_by_cache(cases: Sequence[Case]) -> list[Any]:
    """The cases as parameters of a test. All but the one of each kind of cache are marked
    `exhaustive`."""
    chosen = set(KINDS.values())
    return [
        pytest.param(case, id=case.id, marks=() if case.id in chosen else pytest.mark.exhaustive)
        for case in cases
    ]
