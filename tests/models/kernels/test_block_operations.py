"""Block operations: which buffers they write in place, and invalid arguments."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import kernels
from models.kv import KVCache, LayerCache
from tests.models.kernels.block_specs import HEAD, HIDDEN, BlockSpec, draw_array

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")


@pytest.mark.parametrize("window", [None, 3])
def test_shared_arrays_of_a_cache_are_not_written(window: int | None) -> None:
    block = BlockSpec(window=window).block()
    kv: LayerCache = block.make_kv()
    mx.eval(block(draw_array(1, 5, HIDDEN), kv), kv.state())
    for step in range(8):
        mx.eval(block(draw_array(1, 1, HIDDEN, seed=step), kv), kv.state())
        looked_at = [np.array(array, copy=False) for array in kv.state()]
        before = [array.copy() for array in looked_at]
        mx.eval(block(draw_array(1, 1, HIDDEN, seed=step + 50), kv), kv.state())
        for array, was in zip(looked_at, before, strict=True):
            np.testing.assert_array_equal(array, was)


def test_steps_write_to_the_cache_in_place() -> None:
    block, kv = BlockSpec().block(), KVCache()
    kv.reserve(100)
    mx.eval(block(draw_array(1, 5, HIDDEN), kv), kv.state())
    places = set[int]()
    for step in range(20):
        mx.eval(block(draw_array(1, 1, HIDDEN, seed=step), kv), kv.state())
        places.add(np.array(kv.state()[0], copy=False).ctypes.data)
    # the buffer is copied if MLX releases the last reference late
    assert len(places) < 5


class TestInvalidArgumentsAreRefused:
    def product(self, outputs: int, inputs: int = HIDDEN) -> Any:
        return OPS.Matmul(mx.zeros((outputs, inputs)))

    def attention(self, **other: Any) -> Any:
        parts = {
            "norm": (mx.ones(HIDDEN), 1e-5),
            "q": self.product(4 * HEAD),
            "k": self.product(2 * HEAD),
            "v": self.product(2 * HEAD),
            "o": self.product(HIDDEN, 4 * HEAD),
            "heads": 4,
            "kv_heads": 2,
            "scale": 1.0,
        }
        return OPS.AttentionBlock(**{**parts, **other})

    def test_attention_block(self) -> None:
        for other in (
            {"norm": (mx.ones(HIDDEN + 1), 1e-5)},
            {"norm": (mx.ones(HIDDEN, mx.bfloat16), 1e-5)},
            {"q": self.product(4 * HEAD + 1)},
            {"k": self.product(HEAD)},
            {"v": self.product(2 * HEAD, HIDDEN + 1)},
            {"o": self.product(HIDDEN, 3 * HEAD)},
            {"o": self.product(HIDDEN + 1, 4 * HEAD)},
            {"o": OPS.Matmul(mx.zeros((2, HIDDEN, 4 * HEAD)))},
            {"heads": 3},
            {"kv_heads": 0},
            {"scale": 0.0},
            {"q_norm": (mx.ones(HEAD - 1), 1e-5)},
            {"periods": mx.ones(3), "dims": 8},
            {"sinks": mx.zeros(2)},
        ):
            with pytest.raises(ValueError, match=r"\w"):
                self.attention(**other)

    def test_attention_inputs(self) -> None:
        block, x, buffer = self.attention(), mx.zeros((1, 1, HIDDEN)), mx.zeros((1, 2, 8, HEAD))

        def attend(x: mx.array, buffer: mx.array, slot: int, length: int) -> None:
            mx.eval(block(x, [0], [buffer], [buffer + 0], [slot], [length], [0], [0], 0))

        attend(x, buffer, 0, 1)
        for wrong in (
            (mx.zeros((1, 2, HIDDEN)), buffer, 0, 1),
            (mx.zeros((2, 1, HIDDEN)), buffer, 0, 1),
            (x.astype(mx.bfloat16), buffer, 0, 1),
            (x, mx.zeros((1, 1, 8, HEAD)), 0, 1),
            (x, buffer, 1, 1),
            (x, buffer, 8, 9),
        ):
            with pytest.raises(ValueError, match=r"\w"):
                attend(*wrong)
        with pytest.raises(ValueError, match="each sequence needs buffers and a slot mapping"):
            block(x, [], [], [], [], [], [], [], 0)
        for deltas in ([], [0, 0], [-1]):
            with pytest.raises(ValueError, match="rope"):
                block(x, deltas, [buffer], [buffer + 0], [0], [1], [0], [0], 0)

    def test_mlp_block(self) -> None:
        norm, up, down = (mx.ones(HIDDEN), 1e-5), self.product(96), self.product(HIDDEN, 96)
        mlp = OPS.MlpBlock(norm, "silu", up, up, down)
        assert mlp(mx.zeros((0, HIDDEN))).shape == (0, HIDDEN)
        for wrong in (
            (norm, "sine", up, up, down),
            (norm, "silu", up, self.product(95), down),
            (norm, "silu", up, up, up),
            ((mx.ones(3), 1e-5), "silu", up, up, down),
        ):
            with pytest.raises(ValueError, match=r"\w"):
                OPS.MlpBlock(*wrong)
        for x in (mx.zeros((1, HIDDEN + 1)), mx.zeros((1, HIDDEN), mx.float16)):
            with pytest.raises(ValueError, match="hidden"):
                mlp(x)

    def test_decoder_layers(self) -> None:
        norm, up, down = (mx.ones(HIDDEN), 1e-5), self.product(96), self.product(HIDDEN, 96)
        block = self.attention(), OPS.MlpBlock(norm, "silu", up, up, down)
        shared = self.attention(k=None, v=None), block[1]
        narrow = (
            block[0],
            OPS.MlpBlock(
                (mx.ones(96), 1e-5), "silu", *[self.product(64, 96)] * 2, self.product(96)
            ),
        )
        for wrong in ([], [shared], [block, narrow]):
            with pytest.raises(ValueError, match=r"\w"):
                OPS.DecoderLayers(wrong)
        two, x = OPS.DecoderLayers([block] * 2), mx.zeros((1, 1, HIDDEN))
        buffers, slot = [mx.zeros((1, 2, 8, HEAD)) for _ in range(4)], (0, 1, 0, 0, 0)
        arguments = [0, 0], buffers[:2], buffers[2:], [slot] * 2
        mx.eval(two(x, *arguments))
        wrong_calls: Any = (
            (mx.zeros((2, 1, HIDDEN)), *arguments),
            (x, [0], *arguments[1:]),
            (x, [0, 0], buffers[:1], *arguments[2:]),
            (x, [0, 0], buffers[:2], buffers[:3], [slot] * 2),
            (x, *arguments[:3], [slot, (1, 1, 0, 0, 0)]),
            (x, *arguments[:3], [slot]),
        )
        for call in wrong_calls:
            with pytest.raises(ValueError, match=r"\w"):
                two(*call)
