"""The common parts of decoder-only models around their blocks: embeddings, layer stack, norm, head.

Knows: the parameter names of Llama-like checkpoints (`model.embed_tokens`, `model.layers`,
`model.norm`, `lm_head`), the interface of a block. Must not know: the contents of a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, Self, cast

import mlx.core as mx
import mlx.nn as nn

from models import base
from models.base import SelectPositions, select_all
from models.config_check import changes_logits
from models.image_attention import wrap_caches
from models.image_inputs import ImageInputs, ImageRules
from models.kv import KVCache, LayerCache, get_position_delta, set_kv_dtype
from models.layers import ACTIVATIONS, Activation
from models.rope import Rope, Scaling, is_proportional, make_rope, rope_settings

# the values of `layer_types` in config.json for attention layers
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of config.json that nearly every decoder reads."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None
    rope_traditional: bool = False
    partial_rotary_factor: float = 1.0
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_types: Sequence[str] | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Reads the config. Raises ModelError for a key that changes the logits and that the
        architecture does not read."""
        known = {field.name for field in fields(cls)}
        for key, value in config.items():
            if key not in known and changes_logits(key, value):
                raise base.ModelError(
                    f"config.json sets {key}, which is not supported for model_type "
                    f"{config.get('model_type')!r}: the results would be wrong"
                )
        # `super()` without arguments fails here, because `slots=True` creates a new class
        return super(Config, cls).from_dict(config)

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def rope(self, layer_type: str | None = None) -> Rope:
        """Returns the rope defined by `rope_theta`, `rope_scaling`, `rope_parameters` and
        `partial_rotary_factor`. layer_type: see `rope_settings`."""
        theta, scaling = self.rope_settings(layer_type)
        share = (scaling or {}).get("partial_rotary_factor", self.partial_rotary_factor)
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise base.ModelError(f"config.json's partial_rotary_factor is {share!r}")
        return make_rope(
            dims=self.head_size if is_proportional(scaling) else int(self.head_size * share),
            theta=theta,
            max_positions=self.max_position_embeddings,
            scaling=scaling,
            traditional=self.rope_traditional,
        )

    def rope_settings(self, layer_type: str | None = None) -> tuple[float, Scaling | None]:
        """Returns (theta, scaling). Architectures with different config keys override this
        method."""
        return rope_settings(self, layer_type)

    def layer_type(self, layer: int) -> str:
        """Returns the layer's entry in `layer_types`, or the default of the architecture."""
        if self.layer_types is None:
            return self.default_layer_type(layer)
        if len(self.layer_types) != self.num_hidden_layers:
            raise base.ModelError("config.json's layer_types must have one entry per layer")
        return self.layer_types[layer]

    def default_layer_type(self, layer: int) -> str:
        """Returns the default type of a layer. Architectures in which some layers do not use full
        attention override this method."""
        return FULL

    def window(self, layer: int) -> int | None:
        """Returns the number of positions that a query of the layer attends to, including its own
        position, or None for all positions. Raises ModelError for a layer type that is neither full
        nor sliding attention."""
        kind = self.layer_type(layer)
        if kind == FULL:
            return None
        if kind != SLIDING:
            raise base.ModelError(f"a layer of type {kind!r} is not supported")
        if self.sliding_window is None or self.sliding_window < 1:
            raise base.ModelError(f"config.json's sliding_window is {self.sliding_window}")
        # If no sequence can be longer than the window, the layer uses a full cache, because full
        # caches can be shared more easily.
        acts = self.sliding_window < self.max_position_embeddings
        return self.sliding_window if acts else None

    def is_two_way(self, layer: int) -> bool:
        """Returns whether the rows of an image attend to each other in both directions."""
        return False

    @property
    def image_positions(self) -> Literal["ordinary", "mrope"]:
        """See `models.image_inputs.ImageRules`."""
        return "ordinary"

    def activation(self) -> Activation:
        """Returns the activation of an MLP. Raises ModelError if it is not supported."""
        if self.hidden_act not in ACTIVATIONS:
            raise base.ModelError(
                f"hidden_act {self.hidden_act!r} is not supported; "
                f"supported values: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[self.hidden_act]

    def norm(self) -> nn.RMSNorm:
        """Returns a norm over hidden states."""
        return nn.RMSNorm(self.hidden_size, self.rms_norm_eps)


class Block(Protocol):
    """One layer of the stack. Implementations are subclasses of mlx.nn.Module."""

    def __call__(self, x: mx.array, kv: Any, select: SelectPositions = select_all) -> mx.array:
        """Maps hidden states [B, L, D] to select([B, L, D]). The L positions are appended to
        `kv`."""
        ...

    def make_kv(self) -> LayerCache:
        """Returns an empty cache of the type that this layer needs."""
        ...

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        """Shifts the positions of cached keys by `positions`, with a RoPE rotation. It is only
        called for layers whose cache is a `KVCache`."""
        ...


class Backbone(nn.Module):
    def __init__(self, config: Config, layers: Sequence[Block]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = list(layers)
        self.norm = config.norm()
        self.two_way_layers = [config.is_two_way(layer) for layer in range(len(self.layers))]

    def __call__(
        self,
        tokens: mx.array,
        kv: Sequence[object],
        select: SelectPositions = select_all,
        images: ImageInputs | None = None,
    ) -> mx.array:
        x = self.embed(tokens)
        if images is not None:
            x, kv = images.insert(x), self.wrap_caches(kv, images)
        elif select is select_all:
            return self.norm(self.run_layers(x, kv))
        for number, (layer, layer_kv) in enumerate(zip(self.layers[:-1], kv[:-1], strict=True)):
            x = layer(x, layer_kv)
            if images is not None:
                x = images.add_deepstack(x, number)
        return self.norm(self.layers[-1](x, kv[-1], select))

    # On devices with fused operations, models/cpu_layout.py replaces this method with them.

    def run_layers(self, x: mx.array, kv: Sequence[object]) -> mx.array:
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x = layer(x, layer_kv)
        return x

    def wrap_caches(self, kv: Sequence[object], images: ImageInputs) -> Sequence[object]:
        """Returns the caches for the pass of a chunk with image rows."""
        assert len(images.deepstack) < len(self.layers)
        return wrap_caches(kv, images, self.two_way_layers[: len(kv)])

    @property
    def cached_layers(self) -> Sequence[Block]:
        """The layers that have a layer cache, in order."""
        return self.layers

    def embed(self, tokens: mx.array) -> mx.array:
        """Returns the input of the first layer."""
        return self.embed_tokens(tokens)


class CausalLM(nn.Module):
    """The part of `models.base.Model` that does not depend on the type of block."""

    batch_invariant: ClassVar[bool] = True
    selects_logits: ClassVar[bool] = False

    def __init__(self, config: Config, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        self.model = backbone
        self.image_rules: ImageRules | None = ImageRules(
            positions=config.image_positions, atomic=any(backbone.two_way_layers)
        )
        self.kv_dtype: mx.Dtype | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def __call__(
        self,
        tokens: mx.array,
        kv: Sequence[object],
        select: SelectPositions = select_all,
        images: ImageInputs | None = None,
    ) -> mx.array:
        return self.model(tokens, kv, select, images)

    def logits(self, hidden: mx.array) -> mx.array:
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(hidden)
        return self.lm_head(hidden)

    def make_kv(self) -> list[LayerCache]:
        caches = [layer.make_kv() for layer in self.model.cached_layers]
        set_kv_dtype(caches, self.kv_dtype)
        return caches

    def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
        if not all(isinstance(layer, KVCache) for layer in kv):
            return False
        # if an image is removed, the later positions change by a different number than the indexes
        if get_position_delta(kv):
            return False
        for block, layer in zip(self.model.cached_layers, kv, strict=True):
            cast(KVCache, layer).remove(start, end, block.rerotate)
        return True

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drops the rotary frequencies of old checkpoints. Also drops a stored head if the
        embeddings are tied."""
        tied = self.config.tie_word_embeddings
        return {
            name: array
            for name, array in weights.items()
            if not name.endswith("rotary_emb.inv_freq")
            and not (tied and name.startswith("lm_head."))
        }


def drop_extra_layers(weights: Mapping[str, mx.array], count: int) -> dict[str, mx.array]:
    """Drops `model.layers.N` for N >= count. Such layers are for multi-token prediction: they
    follow the last layer and predict the token after the next one (num_nextn_predict_layers)."""

    def is_extra(name: str) -> bool:
        number = name.removeprefix("model.layers.").partition(".")[0]
        return number.isdecimal() and (len(number) > 9 or int(number) >= count)

    return {name: array for name, array in weights.items() if not is_extra(name)}
