"""The halves of a decoder block, each one operation in a decode step.

Knows: the block with its norms in front (models/prenorm.py), grouped-query attention
(models/heads.py), the gated MLP, their twins, what `_kernels` offers. Must not know: architectures,
kinds of caches. What overrides one of their methods is computed as it says.

For a small model MLX takes as long to be told of an operation as the operation itself, and a block
is about 21 of them, told anew for each token.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import ref

import mlx.core as mx

from models.heads import GroupedAttention
from models.kernels import layers
from models.kernels.attending import written
from models.kv import AttentionCache
from models.layers import GatedMLP
from models.prenorm import PreNormBlock
from models.rope import Rope

# Sequences whose step is one operation: with more it makes no difference how many operations there
# are, and what is held on the way, which MLX does not count, grows.
MOST = 64

_PRODUCT, _WEIGHT = attrgetter("product"), itemgetter("weight")

Attended = Callable[[mx.array, AttentionCache], mx.array]
Fed = Callable[[mx.array], mx.array]


def attending(block: PreNormBlock, ops: Any) -> Attended | None:
    """What stands in the place of `block.attended`; None where there is no such thing."""
    attention: Any = block.self_attn
    if not _is(block, PreNormBlock, "attended") or not _is(attention, GroupedAttention, "__call__"):
        return None
    products = [attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    of_heads = (attention.q_norm, attention.k_norm)
    norms = [block.input_layernorm, *(norm for norm in of_heads if norm is not None)]
    if not _are_twins(products, norms):
        return None

    def make(*parts: Any) -> Any:
        """Of four products, the weights of the norms, and the sinks."""
        matrices, weights, sinks = parts[:4], parts[4:-1], parts[-1]
        norm, *of_each = zip(weights, (norm.eps for norm in norms), strict=True)
        more: Any = dict(zip(("q_norm", "k_norm"), of_each, strict=False))
        return ops.AttentionBlock(
            norm,
            *matrices,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            scale=attention.scale,
            sinks=sinks,
            **more,
            **_rotation(attention.rope),
        )

    fused = _Latest(lambda: [*_parts(products, norms), attention.get("sinks")], make)
    # of what `claim` makes room for; never evaluated
    heads = attention.kv_heads
    like = mx.zeros((1, heads, 1, products[1].weight.shape[0] // heads))
    # weakly: a model that is dropped goes at once, weights and all
    itself = ref(block)

    def attended(x: mx.array, kv: AttentionCache) -> mx.array:
        caches = kv.lenders
        rows, length, _ = x.shape
        if length > 1 or rows > MOST or rows != len(caches) or x.dtype != mx.float32:
            return PreNormBlock.attended(_there(itself), x, kv)
        return written(caches, like, like, partial(fused(), x))

    return attended


def feeding(block: PreNormBlock, ops: Any) -> Fed | None:
    """What stands in the place of `block.fed`; None where there is no such thing."""
    mlp: Any = block.mlp
    if not _is(block, PreNormBlock, "fed") or not _is(mlp, GatedMLP, "__call__", "gated"):
        return None
    products, norms = [mlp[name] for name in mlp.names], [block.post_attention_layernorm]
    kind = layers.kind_of(mlp.activation)
    if kind is None or not _are_twins(products, norms):
        return None
    if not products[0].product.alike(products[1].product):
        return None

    def make(gate: Any, up: Any, down: Any, weight: mx.array) -> Any:
        return ops.MlpBlock((weight, norms[0].eps), kind, gate, up, down)

    fused = _Latest(lambda: _parts(products, norms), make)
    itself = ref(block)

    def fed(x: mx.array) -> mx.array:
        rows, length, _ = x.shape
        if length > 1 or rows > MOST or x.dtype != mx.float32:
            return PreNormBlock.fed(_there(itself), x)
        return fused()(x)

    return fed


class _Latest:
    """What is made of parts: anew where one of them is another by now, as a weight may be that
    somebody replaced."""

    def __init__(self, parts: Callable[[], Sequence[Any]], make: Callable[..., Any]) -> None:
        self._parts, self._make = parts, make
        self._of: Sequence[Any] | None = None
        self._made: Any = None

    def __call__(self) -> Any:
        parts = self._parts()
        if self._of is None or not all(map(is_, parts, self._of)):
            self._made, self._of = self._make(*parts), parts
        return self._made


def _is(module: Any, kind: type, *methods: str) -> bool:
    """Whether these methods are what that kind has."""
    return isinstance(module, kind) and all(
        getattr(type(module), name) is getattr(kind, name) for name in methods
    )


def _are_twins(products: Sequence[Any], norms: Sequence[Any]) -> bool:
    linear = layers.Linear | layers.QuantizedLinear
    return all(isinstance(one, linear) for one in products) and all(
        isinstance(one, layers.RMSNorm) for one in norms
    )


def _parts(products: Sequence[Any], norms: Sequence[Any]) -> list[Any]:
    """What a twin is in a block."""
    return [*map(_PRODUCT, products), *map(_WEIGHT, norms)]


def _rotation(rope: Any) -> dict[str, Any]:
    if not isinstance(rope, Rope):
        return {}
    return {
        "periods": rope.periods,
        "dims": rope.dims,
        "traditional": rope.traditional,
        "magnitude": rope.magnitude,
    }


def _there(itself: ref[PreNormBlock]) -> PreNormBlock:
    """It is what asks."""
    found = itself()
    assert found is not None
    return found
