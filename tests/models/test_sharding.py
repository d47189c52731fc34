"""A model sharded among ranks gives the logits of the unsharded model.

Ranks are threads, which synchronise in each all-reduce. The sharding is the same as with several
machines (tests/test_distributed.py runs ranks as processes).
"""

import importlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models import architectures, checkpoint_config, sharding
from models.base import Model, ModelError
from models.checkpoint_config import get_text_config
from tests import tiny
from tests.models import parity
from tests.models.architectures import Case, cases

pytestmark = pytest.mark.recorded

PATIENCE = 30.0


class ThreadAllReduce:
    """An all-reduce among threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._summands: list[np.ndarray | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)

    def total(self, rank: int, x: mx.array) -> mx.array:
        self._summands[rank] = np.array(x.astype(mx.float32))
        self._barrier.wait()
        total = sum(array for array in self._summands if array is not None)
        # all ranks read the sum before one can write the next summand
        self._barrier.wait()
        return mx.array(total).astype(x.dtype)

    def abort(self) -> None:
        self._barrier.abort()


class Rank:
    """A rank whose sums include those of the other ranks."""

    def __init__(self, reduction: ThreadAllReduce, rank: int) -> None:
        self._reduction = reduction
        self.rank, self.size = rank, reduction.size

    def all_sum(self, x: mx.array) -> mx.array:
        return self._reduction.total(self.rank, x)


class IdleRank:
    """A rank that is sharded but computes nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_sum(self, x: mx.array) -> mx.array:
        return x


def run_on_ranks(size: int, work: Callable[[Rank], np.ndarray]) -> list[np.ndarray]:
    reduction = ThreadAllReduce(size)

    def one(rank: int) -> np.ndarray:
        try:
            return work(Rank(reduction, rank))
        except BaseException:
            reduction.abort()
            raise
        finally:
            mx.clear_streams()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def load_shard(folder: Path, case: Case, group: sharding.TensorParallelGroup) -> Model:
    model = parity.load_model(folder)
    sharding.shard_model(model, group, case.config["model_type"])
    return model


def compute_logits(model: Model, case: Case) -> np.ndarray:
    """Logits of a prompt in two chunks, of decode steps after it, and of a batch."""
    prompt = parity.ids(case, 23)
    alone = parity.prefill(model, prompt, [11, 10, 1, 1])
    prompts = [parity.ids(case, length, seed=length) for length in (3, 9)]
    steps = [parity.ids(case, 3, seed=100 + length) for length in (3, 9)]
    batch = parity.decode_batch(model, prompts, steps)
    return np.concatenate([alone, batch.reshape(-1, batch.shape[-1])])


def is_ours(case: Case) -> bool:
    kind = checkpoint_config.architecture_name(get_text_config(case.config))
    # a module of this name may contain a layer only (mamba2)
    module = find_spec(f"models.{kind}") and importlib.import_module(f"models.{kind}")
    return hasattr(module, "Model")


OURS = [case for case in cases() if is_ours(case)]
FOREIGN = [case for case in cases() if not is_ours(case)]


@pytest.mark.product
@pytest.mark.parametrize("case", OURS, ids=lambda case: case.id)
def test_two_ranks_give_the_logits_of_one(case: Case, tmp_path: Path) -> None:
    parity.save_reference(case, tmp_path)
    unsharded = compute_logits(parity.load_model(tmp_path), case)
    for sharded in run_on_ranks(
        2, lambda rank: compute_logits(load_shard(tmp_path, case, rank), case)
    ):
        assert parity.max_difference(sharded, unsharded) < parity.TOLERANCE


@pytest.mark.parametrize("kind", ["affine-4", "affine-8", "mxfp4", "nvfp4"])
def test_quantized_weights_are_sharded_between_groups(kind: str, tmp_path: Path) -> None:
    case = Case(
        name="wide",
        config={**tiny.CONFIG, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 64},
    )
    parity.save_reference(case, tmp_path, kind=kind)
    unsharded = compute_logits(parity.load_model(tmp_path), case)
    for sharded in run_on_ranks(
        2, lambda rank: compute_logits(load_shard(tmp_path, case, rank), case)
    ):
        assert parity.max_difference(sharded, unsharded) < parity.TOLERANCE


def test_weights_quantized_on_load_equal_those_of_one_rank() -> None:
    config = {**tiny.CONFIG, "hidden_size": 128, "intermediate_size": 128}
    weights = tiny.weights(config)
    tokens = mx.array([[1, 2, 3]])

    def logits(group: sharding.TensorParallelGroup | None) -> np.ndarray:
        model = architectures.build(config, weights, bits=8)
        if group is not None:
            sharding.shard_model(model, group, "llama")
        return np.array(model.logits(model(tokens, model.make_kv())))

    mx.eval(weights)
    unsharded = logits(None)
    for sharded in run_on_ranks(2, logits):
        assert parity.max_difference(sharded, unsharded) < parity.TOLERANCE


def sizes(model: Model) -> dict[str, int]:
    assert isinstance(model, nn.Module)
    flat: Any = tree_flatten(model.parameters())
    return {name.replace(".part", ""): array.nbytes for name, array in flat}


def test_each_rank_has_its_shard_of_each_matrix() -> None:
    unsharded = sizes(architectures.build(tiny.CONFIG, tiny.weights()))
    parts = list[dict[str, int]]()
    for rank in range(2):
        model = architectures.build(tiny.CONFIG, tiny.weights())
        sharding.shard_model(model, IdleRank(rank, 2), "llama")
        parts.append(sizes(model))
        assert model.make_kv()
    assert parts[0] == parts[1]
    for name, size in unsharded.items():
        is_sharded = name.endswith("_proj.weight")
        assert parts[0][name] == (size // 2 if is_sharded else size), name


def test_a_bias_after_an_all_reduce_is_added_once() -> None:
    layers = [nn.Linear(4, 3) for _ in range(2)]
    for layer in layers:
        layer.bias = mx.ones((3,))

    class Part(nn.Module):
        shard_spec = sharding.ShardSpec(row_parallel=("inner",))

        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.inner = layer

    class Block(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.part = Part(layer)

    class Whole(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.layers = [Block(layer)]

    for rank, layer in enumerate(layers):
        model: Any = Whole(layer)
        sharding.shard_model(model, IdleRank(rank, 2), "toy")
    assert [layer.bias.tolist() for layer in layers] == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 4, r"layer 0\.self_attn: 2 kv_heads"),
        ({"num_key_value_heads": 4, "intermediate_size": 30}, 4, "mlp.gate_proj: 30 outputs"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}, 2, "3 heads"),
    ],
)
def test_the_error_names_a_layer_that_cannot_be_sharded(
    changes: dict[str, Any], size: int, words: str
) -> None:
    config = {**tiny.CONFIG, **changes}
    model = architectures.build(config, tiny.weights(config))
    with pytest.raises(ModelError, match=words) as refused:
        sharding.shard_model(model, IdleRank(0, size), "llama")
    assert "'llama'" in str(refused.value)
    assert f"over {size} ranks" in str(refused.value)


def test_quantization_groups_are_not_split() -> None:
    config = {
        **tiny.CONFIG,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_key_value_heads": 4,
        "head_dim": 32,
    }
    model = architectures.build(config, tiny.weights(config), bits=8)
    with pytest.raises(ModelError, match="down_proj has 192 inputs, quantized in groups of 64"):
        sharding.shard_model(model, IdleRank(0, 2), "llama")


def parts_of(layers: Sequence[Any]) -> Any:
    model: Any = nn.Module()
    model.model = nn.Module()
    model.model.layers = list(layers)
    return model


def test_a_module_without_a_shard_spec_is_refused() -> None:
    block: Any = nn.Module()
    block.memory = nn.LSTM(4, 4)
    with pytest.raises(ModelError, match=r"'strange': layer 0\.memory cannot be sharded"):
        sharding.shard_model(parts_of([block]), IdleRank(0, 2), "strange")


@pytest.mark.parametrize("case", FOREIGN, ids=lambda case: case.id)
def test_a_class_of_mlx_lm_cannot_be_sharded(case: Case, tmp_path: Path) -> None:
    parity.save_reference(case, tmp_path)
    kind = case.config["model_type"]
    with pytest.raises(ModelError, match=f"'{kind}'.* cannot be sharded"):
        load_shard(tmp_path, case, IdleRank(0, 2))
