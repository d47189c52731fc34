"""A model divided among ranks says what the whole one says.

Ranks are threads here, which wait for each other wherever they add: what is cut how is the same as
between machines (tests/test_distributed.py has those as processes).
"""

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

import models
from models import sharding
from models.base import Model, ModelError
from models.multimodal import get_text_config
from tests import tiny
from tests.models import parity
from tests.models.architectures import Case, cases

PATIENCE = 30.0


class Meeting:
    """Where ranks bring their summands."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._brought: list[np.ndarray | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)

    def total(self, rank: int, x: mx.array) -> mx.array:
        self._brought[rank] = np.array(x.astype(mx.float32))
        self._barrier.wait()
        total = sum(array for array in self._brought if array is not None)
        # nobody brings the next before all have taken this one
        self._barrier.wait()
        return mx.array(total).astype(x.dtype)

    def leave(self) -> None:
        self._barrier.abort()


class Rank:
    """One that there are others beside."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, meeting.size

    def all_sum(self, x: mx.array) -> mx.array:
        return self._meeting.total(self.rank, x)


class Lone:
    """One that is asked for its part, but never to compute."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_sum(self, x: mx.array) -> mx.array:
        return x


def on_ranks(size: int, work: Callable[[Rank], np.ndarray]) -> list[np.ndarray]:
    meeting = Meeting(size)

    def one(rank: int) -> np.ndarray:
        try:
            return work(Rank(meeting, rank))
        except BaseException:
            meeting.leave()
            raise
        finally:
            mx.clear_streams()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def opened(folder: Path, case: Case, group: sharding.TensorParallelGroup) -> Model:
    model = parity.opened(folder)
    sharding.shard_model(model, group, case.config["model_type"])
    return model


def said(model: Model, case: Case) -> np.ndarray:
    """Logits of a prompt in two pieces, of steps behind it, and of a batch."""
    prompt = parity.ids(case, 23)
    alone = parity.our_prefilled(model, prompt, [11, 10, 1, 1])
    prompts = [parity.ids(case, length, seed=length) for length in (3, 9)]
    steps = [parity.ids(case, 3, seed=100 + length) for length in (3, 9)]
    batch = parity.our_batch(model, prompts, steps)
    return np.concatenate([alone, batch.reshape(-1, batch.shape[-1])])


def is_ours(case: Case) -> bool:
    kind = get_text_config(case.config)["model_type"]
    return find_spec(f"models.{models.ALIASES.get(kind, kind)}") is not None


OURS = [case for case in cases() if is_ours(case)]
FOREIGN = [case for case in cases() if not is_ours(case)]


@pytest.mark.parametrize("case", OURS, ids=lambda case: case.id)
def test_two_ranks_say_what_one_says(case: Case, tmp_path: Path) -> None:
    parity.saved(case, tmp_path)
    whole = said(parity.opened(tmp_path), case)
    for divided in on_ranks(2, lambda rank: said(opened(tmp_path, case, rank), case)):
        assert parity.largest(divided, whole) < parity.TOLERANCE


@pytest.mark.parametrize("kind", ["affine-4", "affine-8", "mxfp4", "nvfp4"])
def test_quantised_weights_are_divided_between_groups(kind: str, tmp_path: Path) -> None:
    case = Case(
        name="wide",
        config={**tiny.CONFIG, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 64},
    )
    parity.saved(case, tmp_path, kind=kind)
    whole = said(parity.opened(tmp_path), case)
    for divided in on_ranks(2, lambda rank: said(opened(tmp_path, case, rank), case)):
        assert parity.largest(divided, whole) < parity.TOLERANCE


def test_weights_that_are_quantised_while_they_are_read_are_those_of_one_rank() -> None:
    config = {**tiny.CONFIG, "hidden_size": 128, "intermediate_size": 128}
    drawn = tiny.weights(config)
    tokens = mx.array([[1, 2, 3]])

    def logits(group: sharding.TensorParallelGroup | None) -> np.ndarray:
        model = models.build(config, drawn, bits=8)
        if group is not None:
            sharding.shard_model(model, group, "llama")
        return np.array(model.logits(model(tokens, model.make_kv())))

    mx.eval(drawn)
    whole = logits(None)
    for divided in on_ranks(2, logits):
        assert parity.largest(divided, whole) < parity.TOLERANCE


def sizes(model: Model) -> dict[str, int]:
    assert isinstance(model, nn.Module)
    flat: Any = tree_flatten(model.parameters())
    return {name.replace(".part", ""): array.nbytes for name, array in flat}


def test_each_rank_has_its_part_of_each_matrix_and_nothing_was_read() -> None:
    whole = sizes(models.build(tiny.CONFIG, tiny.weights()))
    parts = list[dict[str, int]]()
    for rank in range(2):
        model = models.build(tiny.CONFIG, tiny.weights())
        sharding.shard_model(model, Lone(rank, 2), "llama")
        parts.append(sizes(model))
        assert model.make_kv()
    assert parts[0] == parts[1]
    for name, size in whole.items():
        divided = name.endswith("_proj.weight")
        assert parts[0][name] == (size // 2 if divided else size), name


def test_a_bias_behind_a_sum_is_added_once() -> None:
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
        made: Any = Whole(layer)
        sharding.shard_model(made, Lone(rank, 2), "toy")
    assert [layer.bias.tolist() for layer in layers] == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 4, r"layer 0\.self_attn: 2 kv_heads"),
        ({"num_key_value_heads": 4, "intermediate_size": 30}, 4, "mlp.gate_proj: 30 outputs"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}, 2, "3 heads"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    changes: dict[str, Any], size: int, words: str
) -> None:
    config = {**tiny.CONFIG, **changes}
    model = models.build(config, tiny.weights(config))
    with pytest.raises(ModelError, match=words) as refused:
        sharding.shard_model(model, Lone(0, size), "llama")
    assert "'llama'" in str(refused.value)
    assert f"over {size} ranks" in str(refused.value)


def test_groups_of_quantised_weights_are_not_torn() -> None:
    config = {
        **tiny.CONFIG,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_key_value_heads": 4,
        "head_dim": 32,
    }
    model = models.build(config, tiny.weights(config), bits=8)
    with pytest.raises(ModelError, match="down_proj takes 192 inputs, quantised in groups of 64"):
        sharding.shard_model(model, Lone(0, 2), "llama")


def parts_of(layers: Sequence[Any]) -> Any:
    made: Any = nn.Module()
    made.model = nn.Module()
    made.model.layers = list(layers)
    return made


def test_a_part_that_does_not_say_how_it_is_cut_is_refused() -> None:
    block: Any = nn.Module()
    block.memory = nn.LSTM(4, 4)
    with pytest.raises(ModelError, match=r"'strange': layer 0\.memory cannot be sharded"):
        sharding.shard_model(parts_of([block]), Lone(0, 2), "strange")


@pytest.mark.parametrize("case", FOREIGN, ids=lambda case: case.id)
def test_a_class_of_mlx_lm_is_refused(case: Case, tmp_path: Path) -> None:
    parity.saved(case, tmp_path)
    kind = case.config["model_type"]
    with pytest.raises(ModelError, match=f"'{kind}'.* cannot be sharded"):
        opened(tmp_path, case, Lone(0, 2))
