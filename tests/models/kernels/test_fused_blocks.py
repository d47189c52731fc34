"""A block's halves as one operation each compute what the block says, to the bit.

Beside each block that was suited stands one of the same weights whose methods were left in their
places: what mlx.nn's formulation makes of twins and caches.
"""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from models import gpt_oss, kernels, llama, ministral3, qwen2, qwen3
from models.batch_cache import BatchKVCache
from models.cpu_layout import apply_cpu_layout
from models.kernels import fused_blocks
from models.kv import KVCache
from models.mla import LatentCache
from tests.models.kernels.made_blocks import (
    BASE,
    HEAD,
    HIDDEN,
    KINDS,
    Made,
    apart,
    drawn,
    is_fused,
    operations,
    suited,
)

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")

WINDOW = 6
MADE = st.builds(
    Made,
    heads=st.sampled_from([(4, 2), (4, 1), (3, 3)]),
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    normed=st.booleans(),
    sinks=st.booleans(),
    dims=st.sampled_from([0, HEAD, HEAD, 10]),
    traditional=st.booleans(),
    magnitude=st.sampled_from([1.0, 1.3]),
    window=st.sampled_from([None, None, 1, WINDOW]),
    activation=st.sampled_from(["silu", "gelu", "gelu_new", "relu"]),
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """A block and what it has of each sequence."""

    block: Any
    rows: list[Any]

    def step(self, x: mx.array, rows: Sequence[int]) -> mx.array:
        """One more position of some of them; as the engine does it, of a single one alone."""
        caches = [self.rows[row] for row in rows]
        if len(caches) == 1:
            return self.block(x, caches[0])
        offsets = mx.array([cache.offset for cache in caches])
        return self.block(x, BatchKVCache(caches, offsets))


@given(
    made=MADE,
    lengths=st.lists(st.integers(1, 2 * WINDOW), min_size=1, max_size=5),
    seed=st.integers(0, 9),
    steps=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), min_size=9),
)
def test_one_operation_is_equal_to_the_bit(
    made: Made, lengths: list[int], seed: int, steps: list[list[int]]
) -> None:
    """Rows of different lengths, side by side and alone, past the ends of their windows."""
    sides = [Side(block=block, rows=[]) for block in (made.block(), apart(made.block()))]
    assert is_fused(sides[0].block) == (True, True)
    for row, length in enumerate(lengths):
        x = drawn(1, length, HIDDEN, seed=seed + row)
        for side in sides:
            side.rows.append(side.block.make_kv())
            mx.eval(side.block(x, side.rows[row]))
    for number, wanted in enumerate(steps):
        rows = [row for row in wanted if row < len(lengths)] or [0]
        x = drawn(len(rows), 1, HIDDEN, seed=100 * seed + number)
        ours, theirs = (side.step(x, rows) for side in sides)
        assert "AttentionBlock" in operations(ours)
        assert "MlpBlock" in operations(ours)
        assert "Block" not in operations(theirs)
        # some steps are waited for, others begin while the one ahead is worked on
        mx.async_eval(ours, theirs, [side.rows[0].state() for side in sides])
        if number % 3 == 0:
            assert mx.array_equal(ours, theirs)
    for ours, theirs in zip(*(side.rows for side in sides), strict=True):
        assert ours.offset == theirs.offset
        for one, other in zip(ours.state(), theirs.state(), strict=True):
            assert mx.array_equal(one[..., : ours.offset, :], other[..., : ours.offset, :])


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_worth_several_threads_is_equal_too(threads: int) -> None:
    """Matrices of many parts, in one format and in two, with many rows."""
    before = OPS.threads()
    OPS.use_threads(threads)
    try:
        config = llama.Config.from_dict(
            {**BASE, "hidden_size": 512, "intermediate_size": 704, "num_attention_heads": 16}
        )
        for kind in KINDS:
            pair = [suited(llama.Block(config, 0), kind) for _ in range(2)]
            apart(pair[1])
            for count in (1, 3, fused_blocks.MAX_FUSED_ROWS):
                x = drawn(count, 1, 512, seed=count)
                ours, theirs = (
                    block(x, BatchKVCache([KVCache() for _ in range(count)], mx.zeros(count)))
                    for block in pair
                )
                assert "AttentionBlock" in operations(ours)
                assert mx.array_equal(ours, theirs)
    finally:
        mx.synchronize()
        OPS.use_threads(before)


def test_queries_keys_and_values_may_be_packed_each_in_its_way() -> None:
    def mixed() -> Any:
        config = llama.Config.from_dict({**BASE, "num_attention_heads": 2})
        block: Any = llama.Block(config, 0)
        for bits, name in ((4, "q_proj"), (8, "k_proj")):
            block.self_attn[name] = block.self_attn[name].to_quantized(32, bits)
        return block

    mx.random.seed(1)
    ours = mixed()
    mx.random.seed(1)
    theirs = mixed()
    apply_cpu_layout(ours)
    apply_cpu_layout(theirs)
    apart(theirs)
    x = drawn(1, 1, HIDDEN)
    assert is_fused(ours) == (True, True)
    assert mx.array_equal(ours(x, KVCache()), theirs(x, KVCache()))


def test_a_weight_that_is_replaced_is_the_one_that_counts() -> None:
    made = Made(normed=True, sinks=True, bias=True)
    ours, theirs = made.block(), apart(made.block())
    x = drawn(1, 1, HIDDEN)
    seen = [np.array(ours(x, KVCache()))]
    names = [name for name, _ in parameters(ours)]
    assert len(names) == 19
    for name in names:
        for block in (ours, theirs):
            module, _, last = name.rpartition(".")
            holder = block
            for part in filter(None, module.split(".")):
                holder = holder[part]
            setattr(holder, last, drawn(*holder[last].shape, seed=7))
        # two positions, since of one all queries see the same
        pairs = [(ours, KVCache()), (theirs, KVCache())]
        for x in (drawn(1, 1, HIDDEN), drawn(1, 1, HIDDEN, seed=1)):
            found, wanted = (np.array(block(x, kv)) for block, kv in pairs)
            np.testing.assert_array_equal(found, wanted)
        assert not any(np.array_equal(found, one) for one in seen), name
        seen.append(found)


def parameters(block: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(block.parameters())
    return flat


class TestWhatStaysAsItIsWritten:
    def test_more_rows_than_are_worth_it_and_prompts(self) -> None:
        block = Made().block()
        rows = fused_blocks.MAX_FUSED_ROWS + 1
        kv = BatchKVCache([KVCache() for _ in range(rows)], mx.zeros(rows))
        assert "Block" not in operations(block(drawn(rows, 1, HIDDEN), kv))
        assert "Block" not in operations(block.attention_residual(drawn(1, 2, HIDDEN), KVCache()))
        assert "MlpBlock" in operations(
            block.mlp_residual(drawn(fused_blocks.MAX_FUSED_ROWS, 1, HIDDEN))
        )
        assert "Block" not in operations(block.mlp_residual(drawn(1, 2, HIDDEN)))

    def test_other_types(self) -> None:
        block, x = Made().block(), drawn(1, 1, HIDDEN).astype(mx.bfloat16)
        assert "Block" not in operations(block.attention_residual(x, KVCache()))
        assert "Block" not in operations(block.mlp_residual(x))

    def test_several_sequences_in_one_cache_and_caches_that_do_not_lend(self) -> None:
        class Own(KVCache):
            supports_in_place = False

        block = Made().block()
        assert "AttentionBlock" not in operations(block(drawn(2, 1, HIDDEN), KVCache()))
        for kv in (Own(), BatchKVCache([Own()], mx.zeros(1))):
            assert "AttentionBlock" not in operations(block(drawn(1, 1, HIDDEN), kv))
        assert LatentCache().in_place_caches == ()

    def test_parts_that_are_no_twins_or_of_other_kinds(self) -> None:
        class Named(nn.Linear):
            pass

        def block(**config: Any) -> Any:
            made = {**BASE, "num_attention_heads": 2, **config}
            return llama.Block(llama.Config.from_dict(made), 0)

        odd = block()
        odd.self_attn.v_proj = Named(HIDDEN, 2 * HEAD)
        odd.mlp.up_proj = odd.mlp.up_proj.to_quantized(32, 8)
        apply_cpu_layout(odd)
        assert is_fused(odd) == (False, False)
        unknown = block()
        unknown.mlp.activation = mx.tanh
        assert is_fused(suited(unknown)) == (True, False)

    def test_methods_that_are_overridden(self) -> None:
        class Doubled(llama.Block):
            def attention_residual(self, x: mx.array, kv: Any) -> mx.array:
                return 2 * super().attention_residual(x, kv)

        class Twice(llama.Block):
            def __call__(self, x: mx.array, kv: Any) -> mx.array:
                return self.mlp_residual(self.mlp_residual(self.attention_residual(x, kv)))

        config = llama.Config.from_dict({**BASE, "num_attention_heads": 2})
        assert is_fused(suited(Doubled(config, 0))) == (False, True)
        # whose halves are still what they are
        assert is_fused(suited(Twice(config, 0))) == (True, True)


ARCHITECTURES: Sequence[tuple[Any, Any, tuple[bool, bool]]] = (
    (llama, {}, (True, True)),
    (qwen2, {}, (True, True)),
    (qwen3, {}, (True, True)),
    # experts are no gated MLP; what grows queries is an attention of its own
    (gpt_oss, {"num_local_experts": 4, "num_experts_per_tok": 2}, (True, False)),
    (
        ministral3,
        {
            "rope_parameters": {
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
                "rope_theta": 100.0,
            }
        },
        (False, True),
    ),
)


@pytest.mark.parametrize(
    ("architecture", "more", "wanted"),
    [pytest.param(*row, id=row[0].__name__) for row in ARCHITECTURES],
)
def test_which_halves_of_an_architecture_are_one_operation(
    architecture: Any, more: Any, wanted: tuple[bool, bool]
) -> None:
    config = architecture.Config.from_dict({**BASE, "num_attention_heads": 2, **more})
    model = architecture.Model(config)
    apply_cpu_layout(model)
    assert is_fused(model.model.layers[0]) == wanted


def test_a_block_that_is_suited_again_is_the_same() -> None:
    block, x = Made().block(), drawn(1, 3, HIDDEN)
    wanted = apart(Made().block())(x, KVCache())
    apply_cpu_layout(block)
    assert is_fused(block) == (True, True)
    assert mx.array_equal(block(x, KVCache()), wanted)
    assert mx.array_equal(block(x[:, :1], KVCache()), wanted[:, :1])


def test_a_block_that_is_dropped_goes_at_once() -> None:
    """Weights that wait for a collection of garbage are memory that the next model lacks."""
    block = Made().block()
    mx.eval(block(drawn(1, 1, HIDDEN), KVCache()))
    alive = weakref.ref(block)
    gc.disable()
    try:
        del block
        assert alive() is None
    finally:
        gc.enable()
