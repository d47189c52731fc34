"""The fused halves of a block give the same bits as its original methods.

Each test compares a fused block with one of the same weights that has its original methods, which
use kernel layers and caches separately.
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

from models import gemma4, gpt_oss, kernels, llama, ministral3, qwen2, qwen3
from models.batch_cache import BatchKVCache
from models.cpu_layout import apply_cpu_layout
from models.kernels import fused_blocks
from models.kv import KVCache
from models.mla import LatentCache
from tests.models import test_gemma4
from tests.models.kernels.block_specs import (
    BASE,
    HEAD,
    HIDDEN,
    KINDS,
    BlockSpec,
    draw_array,
    export_operations,
    is_fused,
    prepare_block,
    unfuse,
)

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")

WINDOW = 6
SPECS = st.builds(
    BlockSpec,
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
    """A block and its caches of each sequence."""

    block: Any
    rows: list[Any]

    def step(self, x: mx.array, rows: Sequence[int]) -> mx.array:
        """Evaluate one position of the rows; a single row without a batch, as in the engine."""
        caches = [self.rows[row] for row in rows]
        if len(caches) == 1:
            return self.block(x, caches[0])
        offsets = mx.array([cache.offset for cache in caches])
        return self.block(x, BatchKVCache(caches, offsets))


@given(
    spec=SPECS,
    lengths=st.lists(st.integers(1, 2 * WINDOW), min_size=1, max_size=5),
    seed=st.integers(0, 9),
    steps=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), min_size=9),
)
def test_fused_blocks_give_the_same_bits(
    spec: BlockSpec, lengths: list[int], seed: int, steps: list[list[int]]
) -> None:
    """Rows of different lengths, in batches and alone, past the ends of their windows."""
    sides = [Side(block=block, rows=[]) for block in (spec.block(), unfuse(spec.block()))]
    assert is_fused(sides[0].block) == (True, True)
    for row, length in enumerate(lengths):
        x = draw_array(1, length, HIDDEN, seed=seed + row)
        for side in sides:
            side.rows.append(side.block.make_kv())
            mx.eval(side.block(x, side.rows[row]))
    for number, selected in enumerate(steps):
        rows = [row for row in selected if row < len(lengths)] or [0]
        x = draw_array(len(rows), 1, HIDDEN, seed=100 * seed + number)
        ours, theirs = (side.step(x, rows) for side in sides)
        assert "AttentionBlock" in export_operations(ours)
        assert "MlpBlock" in export_operations(ours)
        assert "Block" not in export_operations(theirs)
        # some steps are synchronised, others start while the previous one is evaluated
        mx.async_eval(ours, theirs, [side.rows[0].state() for side in sides])
        if number % 3 == 0:
            assert mx.array_equal(ours, theirs)
    for ours, theirs in zip(*(side.rows for side in sides), strict=True):
        assert ours.offset == theirs.offset
        for one, other in zip(ours.state(), theirs.state(), strict=True):
            assert mx.array_equal(one[..., : ours.offset, :], other[..., : ours.offset, :])


@pytest.mark.parametrize("threads", [1, 2])
def test_large_fused_blocks_give_the_same_bits_with_threads(threads: int) -> None:
    """Matrices with many panels, in one format and in two, with many rows."""
    before = OPS.num_threads()
    OPS.set_num_threads(threads)
    try:
        config = llama.Config.from_dict(
            {**BASE, "hidden_size": 512, "intermediate_size": 704, "num_attention_heads": 16}
        )
        for kind in KINDS:
            pair = [prepare_block(llama.Block(config, 0), kind) for _ in range(2)]
            unfuse(pair[1])
            for count in (1, 3, fused_blocks.MAX_FUSED_ROWS):
                x = draw_array(count, 1, 512, seed=count)
                ours, theirs = (
                    block(x, BatchKVCache([KVCache() for _ in range(count)], mx.zeros(count)))
                    for block in pair
                )
                assert "AttentionBlock" in export_operations(ours)
                assert mx.array_equal(ours, theirs)
    finally:
        mx.synchronize()
        OPS.set_num_threads(before)


def test_query_key_and_value_projections_can_have_different_packings() -> None:
    def make_mixed_block() -> Any:
        config = llama.Config.from_dict({**BASE, "num_attention_heads": 2})
        block: Any = llama.Block(config, 0)
        for bits, name in ((4, "q_proj"), (8, "k_proj")):
            block.self_attn[name] = block.self_attn[name].to_quantized(32, bits)
        return block

    mx.random.seed(1)
    ours = make_mixed_block()
    mx.random.seed(1)
    theirs = make_mixed_block()
    apply_cpu_layout(ours)
    apply_cpu_layout(theirs)
    unfuse(theirs)
    x = draw_array(1, 1, HIDDEN)
    assert is_fused(ours) == (True, True)
    assert mx.array_equal(ours(x, KVCache()), theirs(x, KVCache()))


def test_a_replaced_weight_is_used() -> None:
    spec = BlockSpec(normed=True, sinks=True, bias=True)
    ours, theirs = spec.block(), unfuse(spec.block())
    x = draw_array(1, 1, HIDDEN)
    outputs = [np.array(ours(x, KVCache()))]
    names = [name for name, _ in parameters(ours)]
    assert len(names) == 19
    for name in names:
        for block in (ours, theirs):
            module, _, last = name.rpartition(".")
            holder = block
            for part in filter(None, module.split(".")):
                holder = holder[part]
            setattr(holder, last, draw_array(*holder[last].shape, seed=7))
        # two positions, because with one all queries see the same key
        pairs = [(ours, KVCache()), (theirs, KVCache())]
        for x in (draw_array(1, 1, HIDDEN), draw_array(1, 1, HIDDEN, seed=1)):
            found, expected = (np.array(block(x, kv)) for block, kv in pairs)
            np.testing.assert_array_equal(found, expected)
        assert not any(np.array_equal(found, one) for one in outputs), name
        outputs.append(found)


def parameters(block: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(block.parameters())
    return flat


GEMMA4: Any = {
    **test_gemma4.E2B,
    "num_hidden_layers": 4,
    "layer_types": [test_gemma4.S, test_gemma4.F] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
}
GEMMA4_CHANGES: Any = {
    "input-gate": {},
    "input-gate-with-biases": {"attention_bias": True},
    "values-are-keys": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", GEMMA4_CHANGES.values(), ids=GEMMA4_CHANGES)
def test_fused_gemma4_blocks_give_the_same_bits(change: Any, kind: Any) -> None:
    """Norms after each half, two widths of heads, keys of other layers, values that are keys, a
    gated input, and a factor. Rows of different lengths, in batches and alone."""
    config = gemma4.Config.from_dict({**GEMMA4, **change})
    ours, theirs = (prepare_block(gemma4.Model(config), kind) for _ in range(2))
    for block in theirs.model.layers:
        unfuse(block)
    for block in ours.model.layers:
        assert is_fused(block) == (True, True)
    sides = [
        (ours, [ours.make_kv() for _ in range(3)]),
        (theirs, [theirs.make_kv() for _ in range(3)]),
    ]
    for row, length in enumerate((1, 4, 9)):
        for model, kvs in sides:
            mx.eval(model(mx.array([[(row * i) % 101 for i in range(length)]]), kvs[row]))
    for number, rows in enumerate([(0, 1, 2), (2,), (0, 2), *[(0, 1, 2)] * 9]):
        outputs: list[mx.array] = []
        for model, kvs in sides:
            caches: list[Any] = [kvs[row] for row in rows]
            if len(rows) > 1:
                offsets = mx.array([kv[0].offset for kv in caches])
                layers = zip(*caches, strict=True)
                caches = [[layer[0].make_batch(layer, offsets) for layer in layers]]
            outputs.append(model(mx.array([[number + row] for row in rows]), caches[0]))
        names = [export_operations(output) for output in outputs]
        for name in ("::AttentionBlock", "SharedAttentionBlock", "MlpBlock"):
            assert name in names[0]
        assert ("InputGateBlock" in names[0]) == bool(config.hidden_size_per_layer_input)
        assert "Block" not in names[1]
        mx.async_eval(outputs)
        if number % 3 == 0:
            assert mx.array_equal(outputs[0], outputs[1])
    for one, other in zip(*(kvs for _, kvs in sides), strict=True):
        for left, right in zip(one, other, strict=True):
            for a, b in zip(left.written(), right.written(), strict=True):
                assert mx.array_equal(a, b)


STACK: Any = {
    **BASE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": fused_blocks.MAX_FUSED_BLOCKS + 2,
}


def make_stack(kind: Any = KINDS[0], **config: Any) -> Any:
    """A model whose layers are alternately of full and of sliding attention."""
    keys = {**STACK, **config}
    kinds = ("full_attention", "sliding_attention")
    keys["layer_types"] = [kinds[i % 2] for i in range(keys["num_hidden_layers"])]
    return prepare_block(
        qwen3.Model(qwen3.Config.from_dict({**keys, "sliding_window": WINDOW})), kind
    )


def unfuse_stack(model: Any) -> Any:
    del vars(model.model)["run_layers"]
    for block in model.model.layers:
        unfuse(block)
    return model


class TestConsecutiveBlocks:
    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_same_bits_alone_and_in_batches(self, kind: Any, threads: int) -> None:
        """Past the ends of windows, and of the first buffers."""
        before = OPS.num_threads()
        OPS.set_num_threads(threads)
        try:
            sides = [(model, model.make_kv()) for model in (make_stack(kind), make_stack(kind))]
            unfuse_stack(sides[1][0])
            for model, kv in sides:
                mx.eval(model(mx.array([[1, 2, 3]]), kv))
            for number in range(2 * WINDOW):
                is_batch = number % 5 == 4
                outputs: list[mx.array] = []
                for model, kv in sides:
                    offsets = mx.array([kv[0].offset])
                    rows = [one.make_batch([one], offsets) for one in kv] if is_batch else kv
                    outputs.append(model(mx.array([[number % 8]]), rows))
                assert export_operations(outputs[0]).count("::DecoderLayers") == 2
                assert "DecoderLayers" not in export_operations(outputs[1])
                mx.async_eval(outputs)
                if number % 3 == 0:
                    assert mx.array_equal(outputs[0], outputs[1])
            for one, other in zip(sides[0][1], sides[1][1], strict=True):
                for a, b in zip(one.state(), other.state(), strict=True):
                    assert mx.array_equal(a[..., : one.offset, :], b[..., : one.offset, :])
        finally:
            mx.synchronize()
            OPS.set_num_threads(before)

    def test_a_copied_cache_is_not_written(self) -> None:
        model = make_stack(num_hidden_layers=3)
        kv = model.make_kv()
        mx.eval(model(mx.array([[1]]), kv), model(mx.array([[2]]), kv))
        kept = [array for layer in kv for array in layer.state()]
        before = [np.array(array) for array in kept]
        first = model(mx.array([[3]]), kv)
        mx.eval(first)
        for array, values in zip(kept, before, strict=True):
            np.testing.assert_array_equal(np.array(array), values)

    def test_several_rows_and_prompts(self) -> None:
        model = make_stack(num_hidden_layers=2)
        kvs = [model.make_kv() for _ in range(2)]
        for kv in kvs:
            output = model(mx.array([[1, 2]]), kv)
            assert "DecoderLayers" not in export_operations(output)
        offsets = mx.array([2, 2])
        rows = [layer[0].make_batch(layer, offsets) for layer in zip(*kvs, strict=True)]
        output = model(mx.array([[1], [2]]), rows)
        assert "DecoderLayers" not in export_operations(output)
        assert "AttentionBlock" in export_operations(output)

    def test_a_replaced_weight_and_a_replaced_half_are_used(self) -> None:
        ours, theirs = (
            make_stack(num_hidden_layers=2),
            unfuse_stack(make_stack(num_hidden_layers=2)),
        )
        pairs = [(ours, ours.make_kv()), (theirs, theirs.make_kv())]

        def decode() -> str:
            """Returns the operations."""
            found, expected = (model(mx.array([[1]]), kv) for model, kv in pairs)
            operations = export_operations(found)
            assert mx.array_equal(found, expected)
            return operations

        decode()
        for number in range(3):
            for model in (ours, theirs):
                block = model.model.layers[1]
                part = (block.self_attn.k_proj, block.mlp.down_proj, block.input_layernorm)[number]
                part.weight = draw_array(*part["weight"].shape, seed=7)
            assert "DecoderLayers" in decode()
        halves = [block.mlp_residual for block in ours.model.layers]
        ours.model.layers[0].mlp_residual = lambda x: halves[0](x)
        found = decode()
        assert found.count("MlpBlock") == 1
        assert found.count("::DecoderLayers") == 1

    def test_caches_without_in_place_writes(self) -> None:
        class NotInPlace(KVCache):
            supports_in_place = False

        model, other = make_stack(num_hidden_layers=2), make_stack(num_hidden_layers=2)
        kv = [NotInPlace(), model.make_kv()[1]]
        output = model(mx.array([[1]]), kv)
        assert "DecoderLayers" not in export_operations(output)
        assert mx.array_equal(output, other(mx.array([[1]]), other.make_kv()))

    def test_a_dropped_stack_is_freed_at_once(self) -> None:
        model = make_stack(num_hidden_layers=2)
        mx.eval(model(mx.array([[1]]), model.make_kv()))
        alive = [weakref.ref(one) for one in (model.model, *model.model.layers)]
        gc.disable()
        try:
            del model
            assert [one() for one in alive] == [None] * 3
        finally:
            gc.enable()


class TestUnfusedCases:
    def test_too_many_rows_and_prompts(self) -> None:
        block = BlockSpec().block()
        rows = fused_blocks.MAX_FUSED_ROWS + 1
        kv = BatchKVCache([KVCache() for _ in range(rows)], mx.zeros(rows))
        assert "Block" not in export_operations(block(draw_array(rows, 1, HIDDEN), kv))
        assert "Block" not in export_operations(
            block.attention_residual(draw_array(1, 2, HIDDEN), KVCache())
        )
        assert "MlpBlock" in export_operations(
            block.mlp_residual(draw_array(fused_blocks.MAX_FUSED_ROWS, 1, HIDDEN))
        )
        assert "Block" not in export_operations(block.mlp_residual(draw_array(1, 2, HIDDEN)))

    def test_other_types(self) -> None:
        block, x = BlockSpec().block(), draw_array(1, 1, HIDDEN).astype(mx.bfloat16)
        assert "Block" not in export_operations(block.attention_residual(x, KVCache()))
        assert "Block" not in export_operations(block.mlp_residual(x))

    def test_shared_caches_and_caches_without_in_place_writes(self) -> None:
        class NotInPlace(KVCache):
            supports_in_place = False

        block = BlockSpec().block()
        assert "AttentionBlock" not in export_operations(block(draw_array(2, 1, HIDDEN), KVCache()))
        for kv in (NotInPlace(), BatchKVCache([NotInPlace()], mx.zeros(1))):
            assert "AttentionBlock" not in export_operations(block(draw_array(1, 1, HIDDEN), kv))
        assert LatentCache().in_place_caches == ()

    def test_layers_without_kernels_and_different_packings(self) -> None:
        class Named(nn.Linear):
            pass

        def block(**config: Any) -> Any:
            keys = {**BASE, "num_attention_heads": 2, **config}
            return llama.Block(llama.Config.from_dict(keys), 0)

        odd = block()
        odd.self_attn.v_proj = Named(HIDDEN, 2 * HEAD)
        odd.mlp.up_proj = odd.mlp.up_proj.to_quantized(32, 8)
        apply_cpu_layout(odd)
        assert is_fused(odd) == (False, False)
        unknown = block()
        unknown.mlp.activation = mx.tanh
        assert is_fused(prepare_block(unknown)) == (True, False)

    def test_overridden_methods(self) -> None:
        class Doubled(llama.Block):
            def attention_residual(self, x: mx.array, kv: Any) -> mx.array:
                return 2 * super().attention_residual(x, kv)

        class Twice(llama.Block):
            def __call__(self, x: mx.array, kv: Any) -> mx.array:
                return self.mlp_residual(self.mlp_residual(self.attention_residual(x, kv)))

        config = llama.Config.from_dict({**BASE, "num_attention_heads": 2})
        assert is_fused(prepare_block(Doubled(config, 0))) == (False, True)
        # its halves are not overridden
        assert is_fused(prepare_block(Twice(config, 0))) == (True, True)


ARCHITECTURES: Sequence[tuple[Any, Any, tuple[bool, bool]]] = (
    (llama, {}, (True, True)),
    (qwen2, {}, (True, True)),
    (qwen3, {}, (True, True)),
    # experts are not a gated MLP; scaled queries need their own attention
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
    ("architecture", "more", "expected"),
    [pytest.param(*row, id=row[0].__name__) for row in ARCHITECTURES],
)
def test_the_fused_halves_of_an_architecture(
    architecture: Any, more: Any, expected: tuple[bool, bool]
) -> None:
    config = architecture.Config.from_dict({**BASE, "num_attention_heads": 2, **more})
    model = architecture.Model(config)
    apply_cpu_layout(model)
    assert is_fused(model.model.layers[0]) == expected


def test_applying_the_layout_again_changes_nothing() -> None:
    block, x = BlockSpec().block(), draw_array(1, 3, HIDDEN)
    expected = unfuse(BlockSpec().block())(x, KVCache())
    apply_cpu_layout(block)
    assert is_fused(block) == (True, True)
    assert mx.array_equal(block(x, KVCache()), expected)
    assert mx.array_equal(block(x[:, :1], KVCache()), expected[:, :1])


def test_a_dropped_block_is_freed_at_once() -> None:
    """Weights that wait for garbage collection take memory from the next model."""
    block = BlockSpec().block()
    mx.eval(block(draw_array(1, 1, HIDDEN), KVCache()))
    alive = weakref.ref(block)
    gc.disable()
    try:
        del block
        assert alive() is None
    finally:
        gc.enable()
