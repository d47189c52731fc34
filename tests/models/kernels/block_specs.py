"""Small decoder blocks of all kinds, fused for the CPU or with their original methods."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from models import llama
from models.attention import GroupedQueryAttention
from models.cpu_layout import apply_cpu_layout
from models.layers import GatedMLP
from models.prenorm import PreNormBlock
from models.quant import replace_leaves
from models.rope import NoRope, Rope

HIDDEN, HEAD = 64, 32
KINDS: Sequence[tuple[mx.Dtype, int | None]] = (
    (mx.float32, None),
    (mx.bfloat16, None),
    (mx.bfloat16, 4),
    (mx.float16, 8),
)
BASE: Any = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "intermediate_size": 96,
    "vocab_size": 8,
    "max_position_embeddings": 512,
    "head_dim": HEAD,
}


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """heads: numbers of query and key heads. dims: rotated dimensions of a head, 0 for none."""

    heads: tuple[int, int] = (4, 2)
    kind: tuple[mx.Dtype, int | None] = (mx.float32, None)
    bias: bool = False
    normed: bool = False
    sinks: bool = False
    dims: int = HEAD
    traditional: bool = False
    magnitude: float = 1.0
    window: int | None = None
    activation: str = "silu"

    def block(self) -> Any:
        """A block with the CPU layout; its weights are equal in each call."""
        heads, kv_heads = self.heads
        config = llama.Config.from_dict(
            {
                **BASE,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "hidden_act": self.activation,
            }
        )
        rope = NoRope() if not self.dims else self.rope()
        attention = GroupedQueryAttention(
            config,
            rope,
            bias=self.bias,
            o_bias=self.bias,
            qk_norm=self.normed,
            sinks=self.sinks,
        )
        mlp = GatedMLP(
            HIDDEN, config.intermediate_size, bias=self.bias, activation=config.activation()
        )
        return prepare_block(PreNormBlock(config, attention, mlp, window=self.window), self.kind)

    def rope(self) -> Rope:
        periods = mx.array([100.0 ** (i / self.dims) for i in range(0, self.dims, 2)])
        return Rope(
            dims=self.dims,
            periods=periods,
            magnitude=self.magnitude,
            traditional=self.traditional,
        )


def prepare_block(block: Any, kind: tuple[mx.Dtype, int | None] = (mx.float32, None)) -> Any:
    dtype, bits = kind
    flat: Any = tree_flatten(block.parameters())
    block.update(
        tree_unflatten(
            [
                (name, (draw_array(*array.shape, seed=i) / 4 + ("norm" in name)).astype(dtype))
                for i, (name, array) in enumerate(flat)
            ]
        )
    )
    if bits is not None:
        replace_leaves(
            block,
            lambda _, layer: (
                layer.to_quantized(32, bits) if hasattr(layer, "to_quantized") else layer
            ),
        )
    apply_cpu_layout(block)
    return block


def draw_array(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def is_fused(block: Any) -> tuple[bool, bool]:
    """(attention, MLP)"""
    return "attention_residual" in vars(block), "mlp_residual" in vars(block)


def unfuse(block: Any) -> Any:
    """Restore the original methods of the block."""
    for name in ("attention_residual", "mlp_residual", "input_residual"):
        vars(block).pop(name, None)
    return block


def export_operations(array: mx.array) -> str:
    """The operations of the array's graph."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return graph.getvalue()
