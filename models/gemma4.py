"""The text model of Gemma 4 (Gemma Team 2026), in all sizes, and of the unified Gemma 4.

Knows: the differences from Gemma 3, the spellings of its config keys, the parameter names. Must not
know: devices, batches, vision towers, audio.

Differences from Gemma 3:

- Attention scores are not scaled. Values are normalized, without weights. Norms have no offset.
- Full attention layers have wider heads, fewer key heads, and proportional rope. If
  `attention_k_eq_v`, their values are their keys before norm and rotation.
- The last `num_kv_shared_layers` layers have no keys and values. They attend to those of the last
  layer of the same type that has some. These layers do not affect any cache, so they compute only
  the positions of a prompt that the caller needs.
- A layer's output is multiplied by a number. In small models, it first adds a vector that depends
  on the token and on the layer (per-layer embeddings). In one model, a mixture of experts runs in
  parallel with the MLP.

Source: the released checkpoints, and transformers' Gemma4TextConfig for the defaults. With
`use_bidirectional_attention` "vision", layers with a window see ahead within an image.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self, cast
from weakref import ref

import mlx.core as mx
import mlx.nn as nn

from models import base, decoder
from models.base import SelectPositions, select_all, select_last
from models.config_check import find_invalid_value
from models.experts import Experts, select_top_experts, stack_experts
from models.image_inputs import ImageInputs
from models.kv import AttentionCache, KVCache, LayerCache
from models.layers import (
    ACTIVATIONS,
    Activation,
    GatedMLP,
    apply_glu,
    merge_heads,
    normalize_rms,
    softcap_logits,
    split_heads,
)
from models.rope import Rope, make_rope
from models.rotating_kv import RotatingKVCache
from models.sharding import ATTENTION_SHARDS, REPLICATED, ShardSpec
from models.sublayers import AttentionSublayer, InputGateSublayer, MlpSublayer

# the rope of each layer type, if config.json does not have one
_ROPES: Mapping[str, Mapping[str, Any]] = {
    decoder.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    decoder.FULL: {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    },
}

# the keys that `per_layer_config` may change for a layer
_PER_LAYER_KEYS: Mapping[str, Any] = {"head_dim": int, "num_key_value_heads": int}

_UNIFIED = "gemma4_unified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads, with the defaults of Hugging Face's
    Gemma4TextConfig and Gemma4UnifiedTextConfig.

    global_head_dim, num_global_key_value_heads: those of full attention layers, the latter only if
    attention_k_eq_v. per_layer_config: the newer spelling of both, by the number of the layer.
    """

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    sliding_window: int | None = 512
    sliding_window_pattern: int = 6
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | bool | None = None
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: Mapping[str, Mapping[str, Any]] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Reads the config. A null `global_head_dim` means `head_dim`."""
        given = dict(config)
        if "global_head_dim" in config and config["global_head_dim"] is None:
            given["global_head_dim"] = 0
        if str(config.get("model_type")).startswith(_UNIFIED):
            # it never has per-layer embeddings, although published configs give their sizes
            given["hidden_size_per_layer_input"] = 0
            for key, default in (("sliding_window", 1024), ("max_position_embeddings", 262144)):
                if given.get(key) is None:
                    given[key] = default
        # `super()` without arguments fails here, because `slots=True` creates a new class
        made = super(Config, cls).from_dict(given)
        made._check()
        return made

    @property
    def num_owning_layers(self) -> int:
        """The number of layers with their own keys and values, which are the first ones."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def default_layer_type(self, layer: int) -> str:
        return decoder.SLIDING if (layer + 1) % self.sliding_window_pattern else decoder.FULL

    def layer_type(self, layer: int) -> str:
        """Returns the type of a layer. The last one always has full attention, as in
        transformers."""
        kind = decoder.Config.layer_type(self, layer)
        return decoder.FULL if layer == self.num_hidden_layers - 1 else kind

    def source_layer(self, layer: int) -> int:
        """Returns the layer whose keys and values this layer attends to."""
        if layer < self.num_owning_layers:
            return layer
        kind = self.layer_type(layer)
        for other in reversed(range(self.num_owning_layers)):
            if self.layer_type(other) == kind:
                return other
        raise base.ModelError(
            f"config.json's num_kv_shared_layers is {self.num_kv_shared_layers}, but no earlier "
            f"layer has keys for layer {layer} of type {kind}"
        )

    def is_two_way(self, layer: int) -> bool:
        """Returns whether the rows of an image attend to each other in both directions: in larger
        models, and only within a window."""
        sees_ahead = self.use_bidirectional_attention == "vision"
        return sees_ahead and self.layer_type(layer) == decoder.SLIDING

    def layer_head_dim(self, layer: int) -> int:
        usual = self.head_size
        if self.per_layer_config is None and self.layer_type(layer) == decoder.FULL:
            usual = self.global_head_dim or usual
        return self._overrides(layer).get("head_dim", usual)

    def layer_kv_heads(self, layer: int) -> int:
        usual = self.kv_heads
        if self.per_layer_config is None and self.values_are_keys(layer):
            usual = self.num_global_key_value_heads or usual
        return self._overrides(layer).get("num_key_value_heads", usual)

    def values_are_keys(self, layer: int) -> bool:
        """Returns whether the values of the layer are its keys, before norm and rotation."""
        return self.attention_k_eq_v and self.layer_type(layer) == decoder.FULL

    def layer_mlp_width(self, layer: int) -> int:
        doubled = self.use_double_wide_mlp and layer >= self.num_owning_layers
        return self.intermediate_size * (2 if doubled else 1)

    def layer_rope(self, layer: int) -> Rope:
        kind = self.layer_type(layer)
        own: Any = _ROPES[kind] if self.rope_parameters is None else self.rope_parameters.get(kind)
        if not isinstance(own, Mapping):
            raise base.ModelError(f"config.json's rope_parameters lacks {kind}")
        own = cast(Mapping[str, Any], own)
        share = own.get("partial_rotary_factor")
        if own.get("rope_type") in (None, "default") and share not in (None, 1):
            raise base.ModelError(
                f"config.json's rope_parameters has partial_rotary_factor {share!r} for {kind}, "
                "which is supported with rope_type 'proportional' only"
            )
        return make_rope(
            dims=self.layer_head_dim(layer),
            theta=own.get("rope_theta", _ROPES[kind]["rope_theta"]),
            max_positions=self.max_position_embeddings,
            scaling=own,
        )

    def activation(self) -> Activation:
        if self.hidden_activation not in ACTIVATIONS:
            raise base.ModelError(f"hidden_activation {self.hidden_activation!r} is not supported")
        return ACTIVATIONS[self.hidden_activation]

    def _overrides(self, layer: int) -> Mapping[str, Any]:
        # transformers pads the numbers with zeros
        own = {int(key): values for key, values in (self.per_layer_config or {}).items()}
        return own.get(layer, {})

    def _check(self) -> None:
        """Raises ModelError for unsupported values and for invalid combinations."""
        if self.use_bidirectional_attention not in (None, False, "vision"):
            raise base.ModelError(
                f"use_bidirectional_attention {self.use_bidirectional_attention!r} is not "
                "supported, because such a model cannot generate text"
            )
        if self.rope_scaling:
            raise base.ModelError("rope_scaling is not supported: use rope_parameters")
        if not 0 <= self.num_kv_shared_layers < self.num_hidden_layers:
            raise base.ModelError(
                f"config.json's num_kv_shared_layers is {self.num_kv_shared_layers}, but must be "
                f"between 0 and {self.num_hidden_layers - 1}"
            )
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            raise base.ModelError(
                f"config.json's vocab_size_per_layer_input is {self.vocab_size_per_layer_input}, "
                f"but must be at least vocab_size, {self.vocab_size}"
            )
        for key, own in (self.per_layer_config or {}).items():
            if not (key.isascii() and key.isdecimal() and int(key) < self.num_hidden_layers):
                raise base.ModelError(f"config.json's per_layer_config has no layer {key[:20]!r}")
            if unknown := sorted(name for name in own if name not in _PER_LAYER_KEYS):
                raise base.ModelError(
                    f"config.json's per_layer_config changes {unknown[0]!r} of layer {key}, which "
                    f"is not supported; supported keys: {', '.join(_PER_LAYER_KEYS)}"
                )
            if wrong := find_invalid_value(own, _PER_LAYER_KEYS):
                raise base.ModelError(f"config.json's per_layer_config: {wrong}")


class SharedAttention(nn.Module):
    """Attention to the keys and values of an earlier layer."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.layer_kv_heads(layer)
        self.head_dim, hidden = config.layer_head_dim(layer), config.hidden_size
        if self.heads % self.kv_heads:
            raise base.ModelError(
                f"layer {layer} has {self.kv_heads} key heads, which do not divide {self.heads} "
                "attention heads"
            )
        bias = config.attention_bias
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=bias)
        self.rope = config.layer_rope(layer)

    @property
    def shard_spec(self) -> ShardSpec:
        """A single key head is replicated."""
        if self.kv_heads == 1:
            return replace(ATTENTION_SHARDS, column_parallel=("q_proj",), counts=("heads",))
        names = tuple(name for name in ATTENTION_SHARDS.column_parallel if name in self)
        return replace(ATTENTION_SHARDS, column_parallel=names)

    def __call__(self, x: mx.array, kv: AttentionCache, offset: int | mx.array) -> mx.array:
        """Maps hidden states [B, L, D] to [B, L, D]. offset: the position of the first one, see
        `models.rope.Rope`."""
        return self.o_proj(merge_heads(kv.attend_shared(self.queries(x, offset), scale=1.0)))

    def queries(self, x: mx.array, offset: int | mx.array) -> mx.array:
        return self.rope(self.q_norm(split_heads(self.q_proj(x), self.heads)), offset)


class Attention(SharedAttention):
    """Attention with its own keys and values."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        hidden, bias = config.hidden_size, config.attention_bias
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.values_are_keys = config.values_are_keys(layer)
        if not self.values_are_keys:
            self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)

    def __call__(self, x: mx.array, kv: AttentionCache, offset: int | mx.array) -> mx.array:
        """See `SharedAttention`. The positions are appended to `kv`."""
        queries = self.queries(x, offset)
        keys = split_heads(self.k_proj(x), self.kv_heads)
        values = keys if self.values_are_keys else split_heads(self.v_proj(x), self.kv_heads)
        keys = self.rope(self.k_norm(keys), offset)
        values = normalize_rms(values, self.k_norm.eps)
        return self.o_proj(merge_heads(kv.attend(queries, keys, values, scale=1.0)))


class Router(nn.Module):
    """Selects the experts of a token."""

    shard_spec: ClassVar[ShardSpec] = REPLICATED

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.num_experts or 0
        self.top_k, self.eps = config.top_k_experts or 0, config.rms_norm_eps
        if not 0 < self.top_k <= experts:
            raise base.ModelError(
                f"top_k_experts is {self.top_k}, but must be between 1 and {experts} (num_experts)"
            )
        self.proj = nn.Linear(hidden, experts, bias=False)
        self.scale = mx.ones((hidden,))
        self.per_expert_scale = mx.ones((experts,))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the selected experts and their weights, each [..., k], for hidden states [...,
        D]."""
        x = normalize_rms(x, self.eps) * (self.scale * self.scale.size**-0.5)
        scores = self.proj(x)
        chosen = select_top_experts(scores, self.top_k)
        best = mx.take_along_axis(scores, chosen, axis=-1)
        return chosen, mx.softmax(best, axis=-1, precise=True) * self.per_expert_scale[chosen]


class Block(nn.Module):
    # these layers are children of the block, because their names in checkpoints are
    replicated: ClassVar[Sequence[str]] = ("per_layer_input_gate", "per_layer_projection")

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.hidden_size_per_layer_input
        self.activation = config.activation()
        self.window = config.window(layer)
        owns_kv = layer < config.num_owning_layers
        self.self_attn = (Attention if owns_kv else SharedAttention)(config, layer)
        self.mlp = GatedMLP(hidden, config.layer_mlp_width(layer), activation=self.activation)
        self.input_layernorm = config.norm()
        self.post_attention_layernorm = config.norm()
        self.pre_feedforward_layernorm = config.norm()
        self.post_feedforward_layernorm = config.norm()
        self.layer_scalar = mx.ones((1,))
        self.has_input_gate = bool(width)
        if width:
            self.per_layer_input_gate = nn.Linear(hidden, width, bias=False)
            self.per_layer_projection = nn.Linear(width, hidden, bias=False)
            self.post_per_layer_input_norm = config.norm()
        if config.enable_moe_block:
            self.router = Router(config)
            self.experts = Experts(
                hidden,
                config.moe_intermediate_size or 0,
                config.num_experts or 0,
                gating=partial(apply_glu, self.activation),
            )
            self.post_feedforward_layernorm_1 = config.norm()
            self.post_feedforward_layernorm_2 = config.norm()
            self.pre_feedforward_layernorm_2 = config.norm()

    def __call__(
        self,
        x: mx.array,
        kv: AttentionCache,
        offset: int | mx.array,
        per_layer_input: mx.array | None,
        select: SelectPositions = select_all,
    ) -> mx.array:
        """Maps hidden states [B, L, D] to select([B, L, D]). offset: see `SharedAttention`.
        per_layer_input: [B, L, P], for a model with per-layer embeddings."""
        x = self.mlp_residual(select(self.attention_residual(x, kv, offset)))
        return x if per_layer_input is None else self.input_residual(x, select(per_layer_input))

    # On devices with fused operations, models/cpu_layout.py replaces these methods with them.

    def attention_residual(
        self, x: mx.array, kv: AttentionCache, offset: int | mx.array
    ) -> mx.array:
        seen = self.self_attn(self.input_layernorm(x), kv, offset)
        return x + self.post_attention_layernorm(seen)

    def mlp_residual(self, x: mx.array) -> mx.array:
        hidden = self.mlp(self.pre_feedforward_layernorm(x))
        if "experts" in self:
            routed = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
            hidden = self.post_feedforward_layernorm_1(hidden)
            hidden = hidden + self.post_feedforward_layernorm_2(routed)
        x = x + self.post_feedforward_layernorm(hidden)
        return x if self.has_input_gate else x * self.layer_scalar

    def input_residual(self, x: mx.array, per_layer_input: mx.array) -> mx.array:
        gated = apply_glu(self.activation, self.per_layer_input_gate(x), per_layer_input)
        x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar

    def describe_attention(self) -> AttentionSublayer:
        attention = self.self_attn
        return AttentionSublayer(
            norm=self.input_layernorm,
            attention=attention,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            scale=1.0,
            rope=attention.rope,
            value_norm_eps=attention.q_norm.eps,
            post_norm=self.post_attention_layernorm,
        )

    def describe_mlp(self) -> MlpSublayer | None:
        if "experts" in self:
            return None
        return MlpSublayer(
            norm=self.pre_feedforward_layernorm,
            mlp=self.mlp,
            post_norm=self.post_feedforward_layernorm,
            get_scale=None if self.has_input_gate else self._scale_getter(),
        )

    def describe_input_gate(self) -> InputGateSublayer | None:
        if not self.has_input_gate:
            return None
        return InputGateSublayer(
            gate=self.per_layer_input_gate,
            projection=self.per_layer_projection,
            activation=self.activation,
            post_norm=self.post_per_layer_input_norm,
            get_scale=self._scale_getter(),
        )

    def _scale_getter(self) -> Callable[[], mx.array]:
        block = ref(self)

        def get_scale() -> mx.array:
            owner: Any = block()
            return owner["layer_scalar"]

        return get_scale

    def make_kv(self) -> LayerCache:
        return KVCache() if self.window is None else RotatingKVCache(self.window)

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        return self.self_attn.rope.rerotate(keys, positions)


class Backbone(decoder.Backbone):
    def __init__(self, config: Config) -> None:
        layers = range(config.num_hidden_layers)
        # these blocks take more arguments
        super().__init__(config, cast(Any, [Block(config, layer) for layer in layers]))
        self.sources = [config.source_layer(layer) for layer in layers]
        for layer, source in zip(layers, self.sources, strict=True):
            _check_source(config, layer, source)
        self.width = config.hidden_size_per_layer_input
        self.scale, self.per_layer_scale = config.hidden_size**0.5, self.width**0.5
        if self.width:
            widths = len(self.layers) * self.width
            self.embed_tokens_per_layer = nn.Embedding(config.vocab_size_per_layer_input, widths)
            self.per_layer_model_projection = nn.Linear(config.hidden_size, widths, bias=False)
            self.per_layer_projection_norm = nn.RMSNorm(self.width, config.rms_norm_eps)

    @property
    def cached_layers(self) -> Sequence[decoder.Block]:
        return self.layers[: max(self.sources) + 1]

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
        caches = cast(Sequence[AttentionCache], kv)
        inputs = self.embed_per_layer(tokens, x) if self.width else None
        offset, last = caches[0].positions, len(self.layers) - 1
        blocks = cast(Sequence[Block], self.layers)
        for number, (layer, source) in enumerate(zip(blocks, self.sources, strict=True)):
            if number == len(caches) and select is select_last and x.shape[1] > 1:
                # the other positions affect only the caches, which are complete
                offset = offset + (x.shape[1] - 1)
                x, inputs = x[:, -1:], None if inputs is None else inputs[:, -1:]
            own = None if inputs is None else inputs[:, :, number]
            x = layer(x, caches[source], offset, own, select if number == last else select_all)
        return self.norm(x)

    def embed(self, tokens: mx.array) -> mx.array:
        x = self.embed_tokens(tokens)
        return x * mx.array(self.scale, x.dtype)

    def embed_per_layer(self, tokens: mx.array, x: mx.array) -> mx.array:
        """Returns the per-layer inputs [B, L, layers, P] of tokens [B, L] with the inputs x [B, L,
        D] of the first layer. The token of an image row is 0, which is the padding token."""
        shape = (*tokens.shape, len(self.layers), self.width)
        scale = mx.array(self.per_layer_scale, x.dtype)
        by_token = self.embed_tokens_per_layer(tokens).reshape(shape) * scale
        projected = self.per_layer_model_projection(x) * mx.array(1 / self.scale, x.dtype)
        projected = self.per_layer_projection_norm(projected.reshape(shape))
        return (projected + by_token) * mx.array(0.5**0.5, x.dtype)


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        super().__init__(config, Backbone(config))
        self.config: Config = config

    def logits(self, hidden: mx.array) -> mx.array:
        return softcap_logits(super().logits(hidden), self.config.final_logit_softcapping or None)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Names the experts as mlx-lm's conversions do, and drops the keys and values of layers
        that share those of others."""
        kept = {
            name.replace(".experts.switch_glu.", ".experts."): array
            for name, array in weights.items()
            if not self._is_unused(name)
        }
        return super().sanitize(stack_experts(kept, module_name="experts"))

    def _is_unused(self, name: str) -> bool:
        number, _, rest = name.removeprefix("model.layers.").partition(".")
        return (
            number.isdecimal()
            and self.config.num_owning_layers <= int(number) < self.config.num_hidden_layers
            and rest.startswith(tuple(f"self_attn.{part}." for part in _KV_PARTS))
        )


# the modules that a layer with its own keys and values has, and that others do not use
_KV_PARTS = ("k_proj", "v_proj", "k_norm", "v_norm")


def _check_source(config: Config, layer: int, source: int) -> None:
    """Raises ModelError if a layer cannot use the keys of another one."""
    for key, of in (
        ("head_dim", config.layer_head_dim),
        ("num_key_value_heads", config.layer_kv_heads),
    ):
        if of(layer) != of(source):
            raise base.ModelError(
                f"layer {layer} uses the keys of layer {source}, but has a different {key}: "
                f"{of(layer)} and {of(source)}"
            )
