"""Converts the metadata of a GGUF file to a config as on the Hugging Face hub, and its tensor names
to the names of our modules.

Knows: llama.cpp's names of architectures, keys and tensors (gguf-py, constants.py), and what its
converters change. Must not know: MLX, the values of weights.

A file describes a model in the terms of llama.cpp. Everything after this module works with the
config of the same model on the hub, so that each architecture is implemented once.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.gguf.metadata import Metadata
from models.gguf.reader import GGUFError, GGUFFile, GGUFTensor, UnsupportedError, read_floats

Config = dict[str, Any]

_MAX_LAYERS = 4096

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")

# tensors that do not become parameters: factors of rotary frequencies, which the config contains
_ROPE_FREQS, _ROPE_LONG = "rope_freqs.weight", "rope_factors_long.weight"
# with this divisor of its frequency, a dimension is not rotated in any context
_NOT_ROTATED = 1e29

CONFIG_TENSORS = (_ROPE_FREQS, _ROPE_LONG, "rope_factors_short.weight")

# the dense layers that follow the pooling of an encoder, in order: they are not part of the model
DENSE_TENSORS = ("dense_2.weight", "dense_3.weight")

_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_EXPERT_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}

_SHARED_EXPERT_NAMES: Mapping[str, str] = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

_POST_NORM_NAMES: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_BERT_NAMES: Mapping[str, str] = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_qkv": "attention.self.fused_qkv",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}

_NOMIC_BERT_NAMES: Mapping[str, str] = {
    "attn_qkv": "self_attn.fused_qkv",
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}

_ENCODER_GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}

_BERT_GLOBAL_NAMES: Mapping[str, str] = {
    **_ENCODER_GLOBAL_NAMES,
    "position_embd": "embeddings.position_embeddings",
    "cls": "classifier.dense",
    "cls.output": "classifier.out_proj",
}

_GEMMA_NAMES: Mapping[str, str] = {**_POST_NORM_NAMES, "ffn_norm": "pre_feedforward_layernorm"}

_GEMMA4_NAMES: Mapping[str, str] = {
    **_GEMMA_NAMES,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}

_GEMMA4_GLOBAL_NAMES: Mapping[str, str] = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

_GATED_DELTA_NAMES: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    # complete names of parameters, unlike the others
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}

_LFM2_NAMES: Mapping[str, str] = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}

_SIGMOID_EXPERT_NAMES: Mapping[str, str] = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

_GLM4_NAMES: Mapping[str, str] = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}

_NEMOTRON_H_NAMES: Mapping[str, str] = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.switch_mlp.up_proj",
    "ffn_down_exps": "mixer.switch_mlp.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
    # complete names of parameters, unlike the others
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_dt.bias": "mixer.dt_bias",
}

_MLA_NAMES: Mapping[str, str] = {
    **_SIGMOID_EXPERT_NAMES,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp and its differences from Llama.

    read_config: returns the keys of config.json besides the common ones, including model_type.
    names: the names of tensors of a layer without `blk.N.` and the part (`.weight`), and their
        module in our layer. Entries with a part are complete names of parameters.
    global_names: the same for tensors outside the layers.
    layers: the list of layers in our model.
    rotates_pairs: whether llama.cpp rotates adjacent dimensions, for which its converter reorders
        the rows of the query and key projections.
    norms_have_one_added: whether the weights of norms are one larger than in the original.
    layers_differ: whether layers have different numbers of key heads and widths of MLPs, which
        read_config then returns.
    has_dense_layers: whether dense layers (`DENSE_TENSORS`) follow the pooling.
    """

    read_config: Callable[[Metadata], Config]
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    global_names: Mapping[str, str] = field(default_factory=dict[str, str])
    layers: str = "model.layers"
    rotates_pairs: bool = False
    norms_have_one_added: bool = False
    layers_differ: bool = False
    has_dense_layers: bool = False


def find_architecture(metadata: Metadata) -> Architecture:
    """Raises GGUFError for an unsupported architecture."""
    found = ARCHITECTURES.get(metadata.architecture)
    if found is None:
        raise UnsupportedArchitectureError(metadata)
    return found


class UnsupportedArchitectureError(UnsupportedError):
    """The architecture of the file is not supported. architecture: its name in llama.cpp."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(
            f"{metadata.file.path}: GGUF models of the architecture {metadata.architecture!r} are "
            f"not supported; supported architectures: {', '.join(sorted(ARCHITECTURES))}"
        )
        self.architecture = metadata.architecture


def read_config(file: GGUFFile) -> Config:
    """Returns the config as on the hub. Raises GGUFError for an unsupported architecture, and for a
    missing or invalid key, with its name."""
    metadata = Metadata(file)
    kind = file.metadata.get("general.type", "model")
    if kind == "mmproj" or metadata.architecture == "clip":
        raise GGUFError(
            f"{file.path} is the vision tower of a model: serve the text model, which finds it in "
            "the same folder"
        )
    if kind != "model":
        raise GGUFError(f"{file.path} is a GGUF file of type {kind!r}, not a language model")
    architecture = find_architecture(metadata)
    common = _read_common_config(metadata, layers_differ=architecture.layers_differ)
    return {**common, **architecture.read_config(metadata)}


def rename_tensors(file: GGUFFile) -> dict[str, str]:
    """Returns the name of each tensor's parameter in our modules. Tensors of the draft layers for
    multi-token prediction, and those that the config contains, are omitted. Raises GGUFError for a
    tensor that the architecture does not have."""
    metadata = Metadata(file)
    architecture = find_architecture(metadata)
    layers = count_layers(metadata)
    named: dict[str, str] = {}
    unknown: list[str] = []
    for name in file.tensors:
        block = _BLOCK.fullmatch(name)
        if name in CONFIG_TENSORS or (block is not None and int(block[1]) >= layers):
            continue
        if architecture.has_dense_layers and name in DENSE_TENSORS:
            continue
        target = rename_tensor(name, architecture)
        if target is None:
            unknown.append(name)
        else:
            named[name] = target
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise GGUFError(
            f"{file.path}: models of the architecture {metadata.architecture} have no tensors "
            f"{', '.join(unknown[:3])}{more}"
        )
    return named


def rename_tensor(name: str, architecture: Architecture) -> str | None:
    """Returns the name of a tensor's parameter in our modules, or None for a tensor that the
    architecture does not have."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _rename(name, {**_NAMES, **architecture.global_names})
    target = _rename(block[2], {**_LAYER_NAMES, **architecture.names})
    return target and f"{architecture.layers}.{block[1]}.{target}"


def count_layers(metadata: Metadata) -> int:
    """Returns the number of layers without those for multi-token prediction, which follow."""
    layers = metadata.integer("block_count") - metadata.integer("nextn_predict_layers", 0)
    if not 0 < layers <= _MAX_LAYERS:  # lists with an entry per layer are made
        raise GGUFError(f"{metadata.file.path}: the model has {layers} layers")
    return layers


def _rename(name: str, names: Mapping[str, str]) -> str | None:
    if name in names:
        return names[name]
    module, _, part = name.rpartition(".")
    return f"{names[module]}.{part}" if module in names else None


def _read_common_config(metadata: Metadata, *, layers_differ: bool) -> Config:
    layers = count_layers(metadata)
    embeddings = _get_tensor(metadata, "token_embd.weight")
    heads = metadata.uniform_integer("attention.head_count", layers)
    config: Config = {
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": embeddings.shape[0],
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
    }
    if not layers_differ:
        kv_heads = metadata.uniform_integer("attention.head_count_kv", layers, heads)
        config["num_key_value_heads"] = kv_heads
    if metadata.has("feed_forward_length") and not layers_differ:
        config["intermediate_size"] = metadata.uniform_integer("feed_forward_length", layers)
    if metadata.has("attention.key_length"):
        config["head_dim"] = metadata.integer("attention.key_length")
        values = metadata.integer("attention.value_length", config["head_dim"])
        if values != config["head_dim"] and not metadata.has("attention.kv_lora_rank"):
            raise GGUFError(
                f"{metadata.file.path}: heads with keys of {config['head_dim']} and values of "
                f"{values} dimensions are not supported"
            )
    scaling = _read_rope_scaling(metadata)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if not metadata.flag("attention.causal", True):
        config["is_causal"] = False
    if pooling := metadata.integer("pooling_type", 0):
        config["pooling_mode"] = _POOLING_MODES.get(pooling, f"type {pooling}")
    return config


# values of pooling_type, and the names of these poolings in the configs of sentence-transformers; 0
# is used in files whose converter did not know it
_POOLING_MODES: Mapping[int, str] = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}


def _read_rope_scaling(metadata: Metadata) -> Config | None:
    """Returns the value of rope_scaling, or None. Llama 3's scaling is stored as one factor per
    frequency, which is expressed as the general form, longrope."""
    factors = metadata.file.tensors.get(_ROPE_FREQS)
    if factors is not None:
        return _make_longrope(read_floats(factors), metadata.integer("context_length"), 1.0)
    kind = metadata.text("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling: Config = {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.integer(
                "rope.scaling.original_context_length"
            ),
        }
        for key, name in (
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
            ("yarn_attn_factor", "attention_factor"),
        ):
            if metadata.has(f"rope.scaling.{key}"):
                scaling[name] = metadata.number(f"rope.scaling.{key}")
        return scaling
    if kind not in ("none", "longrope"):
        raise UnsupportedError(f"{metadata.file.path}: the rope scaling {kind!r} is not supported")
    return None


def _make_longrope(factors: list[float], original: int, magnitude: float | None) -> Config:
    scaling: Config = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": original,
    }
    return scaling if magnitude is None else {**scaling, "attention_factor": magnitude}


def _get_tensor(metadata: Metadata, name: str) -> GGUFTensor:
    tensor = metadata.file.tensors.get(name)
    if tensor is None:
        raise GGUFError(f"{metadata.file.path} lacks the tensor {name}")
    return tensor


def _has_bias(metadata: Metadata, name: str) -> bool:
    return metadata.has_tensor(f"blk.0.{name}.bias")


def _plain(model_type: str) -> Callable[[Metadata], Config]:
    """Returns a function for architectures without further keys."""
    return lambda metadata: {
        "model_type": model_type,
        "attention_bias": _has_bias(metadata, "attn_q"),
    }


def _read_llama(metadata: Metadata) -> Config:
    """Llama, Mistral, SmolLM2 and others. With experts, it is Mixtral."""
    if metadata.integer("expert_count", 0):
        return {
            "model_type": "mixtral",
            "num_local_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": metadata.integer("expert_used_count"),
        }
    return {
        **_plain("llama")(metadata),
        "mlp_bias": _has_bias(metadata, "ffn_gate"),
    }


def _read_mistral3(metadata: Metadata) -> Config:
    """Mistral Small 3, and Ministral 3, whose queries are scaled by position."""
    if not metadata.has("attention.temperature_scale"):
        return {"model_type": "mistral"}
    scaling = _read_rope_scaling(metadata) or {}
    scale = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
    return {
        "model_type": "ministral3",
        "rope_scaling": None,
        "rope_parameters": {
            **scaling,
            "rope_theta": metadata.number("rope.freq_base"),
            "llama_4_scaling_beta": metadata.number("attention.temperature_scale"),
            **({"mscale": scale, "mscale_all_dim": scale} if scale else {}),
        },
    }


def _read_experts(metadata: Metadata) -> Config:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def _read_qwen2_moe(metadata: Metadata) -> Config:
    return {
        "model_type": "qwen2_moe",
        **_read_experts(metadata),
        "shared_expert_intermediate_size": _read_shared_expert_width(metadata),
        "norm_topk_prob": False,
    }


def _read_shared_expert_width(metadata: Metadata) -> int:
    width = metadata.integer("expert_shared_feed_forward_length", 0)
    stored = metadata.file.tensors.get("blk.0.ffn_up_shexp.weight")
    return width or (0 if stored is None else stored.shape[0])


def _read_qwen3_moe(metadata: Metadata) -> Config:
    return {
        "model_type": "qwen3_moe",
        "attention_bias": _has_bias(metadata, "attn_q"),
        **_read_experts(metadata),
        "norm_topk_prob": True,
    }


def _read_qwen_vl(model_type: str) -> Callable[[Metadata], Config]:
    """Returns a function for the text models of Qwen2-VL to Qwen3-VL."""
    return lambda metadata: {**_plain(model_type)(metadata), **_read_image_axes(metadata)}


def _read_qwen3_vl_moe(metadata: Metadata) -> Config:
    return {
        **_read_qwen3_moe(metadata),
        "model_type": "qwen3_vl_moe_text",
        **_read_image_axes(metadata),
    }


def _read_image_axes(metadata: Metadata) -> Config:
    """Returns rope_scaling with the number of frequencies of each axis of M-RoPE, which matters for
    images only, if the file has them."""
    if not metadata.has("rope.dimension_sections"):
        return {}
    scaling = _read_rope_scaling(metadata) or {"rope_type": "default"}
    # a fourth axis is always empty
    return {
        "rope_scaling": {
            **scaling,
            "mrope_section": metadata.integers("rope.dimension_sections", 3),
        }
    }


def _read_gated_delta(metadata: Metadata) -> Config:
    """Qwen3-Next and Qwen3.5. The projections of a Qwen3-Next are stored separately, like those of
    a Qwen3.5; it is a special case of Qwen3.5."""
    heads = metadata.integer("ssm.time_step_rank")
    inner = metadata.integer("ssm.inner_size")
    rotated, size = (
        metadata.integer("rope.dimension_count"),
        metadata.integer("attention.key_length"),
    )
    if heads < 1 or inner % heads or not 0 < rotated <= size:
        raise GGUFError(
            f"{metadata.file.path}: ssm.inner_size {inner}, ssm.time_step_rank {heads}, "
            f"rope.dimension_count {rotated} and attention.key_length {size} do not match"
        )
    config: Config = {
        "model_type": "qwen3_5",
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "full_attention_interval": metadata.integer("full_attention_interval", 4),
        "partial_rotary_factor": rotated / size,
        "attention_bias": _has_bias(metadata, "attn_q"),
        **_read_image_axes(metadata),
    }
    if metadata.integer("expert_count", 0):
        config |= {
            "model_type": "qwen3_5_moe",
            **_read_experts(metadata),
            "shared_expert_intermediate_size": _read_shared_expert_width(metadata),
            "norm_topk_prob": True,
        }
    return config


def _read_gemma2(metadata: Metadata) -> Config:
    return {
        "model_type": "gemma2",
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _read_gemma_query_scalar(metadata, largest=46),
    }


def _read_gemma3(metadata: Metadata) -> Config:
    config: Config = {
        "model_type": "gemma3_text",
        "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _read_gemma_query_scalar(metadata, largest=62),
        "sliding_window_pattern": 6,
        "sliding_window": metadata.integer("attention.sliding_window", 0) or None,
    }
    if config["sliding_window"] is None:  # all layers have full attention
        config["sliding_window_pattern"] = 1
    if metadata.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return config


def _read_gemma_embedding(metadata: Metadata) -> Config:
    """EmbeddingGemma. Its vectors are the output of the dense layers that follow the pooling."""
    missing = [name for name in DENSE_TENSORS if not metadata.has_tensor(name)]
    if missing:
        raise UnsupportedError(
            f"{metadata.file.path} lacks {' and '.join(missing)}, without which its embeddings "
            "would be wrong: use a file that was converted with "
            "--sentence-transformers-dense-modules"
        )
    config = {**_read_gemma3(metadata), "use_bidirectional_attention": True}
    pattern = "attention.sliding_window_pattern"
    if metadata.has(pattern):
        config["layer_types"] = [
            "sliding_attention" if slides else "full_attention"
            for slides in metadata.flags(pattern, count_layers(metadata))
        ]
    return config


def _read_gemma_query_scalar(metadata: Metadata, *, largest: int) -> float:
    """Returns the number whose root divides the scores: the width of a head, except for the largest
    model of a generation. No key has it; llama.cpp recognizes that model by its number of layers.
    """
    if count_layers(metadata) != largest:
        return metadata.integer("attention.key_length")
    return metadata.integer("embedding_length") / metadata.integer("attention.head_count")


def _read_gemma4(metadata: Metadata) -> Config:
    """All sizes. Full attention layers have their own width of a head and number of key heads."""
    layers = count_layers(metadata)
    slides = metadata.flags("attention.sliding_window_pattern", layers)
    kv_heads = metadata.integers("attention.head_count_kv", layers)
    widths = metadata.integers("feed_forward_length", layers)
    shared = metadata.integer("attention.shared_kv_layers", 0)
    sliding, full = "sliding_attention", "full_attention"
    size = metadata.integer("attention.key_length")
    sliding_size = metadata.integer("attention.key_length_swa", size)
    if metadata.integer("rope.dimension_count_swa", sliding_size) != sliding_size:
        raise UnsupportedError(
            f"{metadata.file.path}: gemma4.rope.dimension_count_swa differs from "
            "gemma4.attention.key_length_swa, which is not supported"
        )
    config: Config = {
        "model_type": "gemma4_text",
        "head_dim": sliding_size,
        "num_key_value_heads": next(
            (heads for heads, is_sliding in zip(kv_heads, slides, strict=True) if is_sliding),
            kv_heads[0],
        ),
        "per_layer_config": {
            str(layer): {"head_dim": size, "num_key_value_heads": kv_heads[layer]}
            for layer in range(layers)
            if not slides[layer]
        },
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "layer_types": [sliding if is_sliding else full for is_sliding in slides],
        "sliding_window": metadata.integer("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        # such layers have no tensor for values
        "attention_k_eq_v": any(
            not is_sliding and not metadata.has_tensor(f"blk.{layer}.attn_v.weight")
            for layer, is_sliding in enumerate(slides[: max(0, layers - shared)])
        ),
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0),
        "rope_scaling": None,
        "rope_parameters": {
            sliding: {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0),
            },
            full: {
                "rope_type": "proportional",
                "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": _read_rotated_share(metadata),
            },
        },
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }
    embeddings = metadata.file.tensors.get("per_layer_token_embd.weight")
    if embeddings is not None:
        config["vocab_size_per_layer_input"] = embeddings.shape[0]
    if metadata.integer("expert_count", 0):
        config |= {
            "enable_moe_block": True,
            "num_experts": metadata.integer("expert_count"),
            "top_k_experts": metadata.integer("expert_used_count"),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        }
    return config


def _read_rotated_share(metadata: Metadata) -> float:
    """Returns the share of the dimensions of a full attention layer that are rotated: those whose
    divisor of the frequency is one. The others have a divisor that makes them constant."""
    tensor = metadata.file.tensors.get(_ROPE_FREQS)
    if tensor is None:
        return 1.0
    divisors = read_floats(tensor)
    rotated = divisors.count(1.0)
    if any(divisor < _NOT_ROTATED for divisor in divisors[rotated:]) or not rotated:
        raise UnsupportedError(
            f"{metadata.file.path}: the tensor {_ROPE_FREQS} of a gemma4 must have divisors of 1, "
            "followed by divisors that make a frequency zero"
        )
    return rotated / len(divisors)


def _read_phi3(metadata: Metadata) -> Config:
    heads = metadata.integer("attention.head_count")
    size = metadata.integer("embedding_length") // max(heads, 1)
    rotated = metadata.integer("rope.dimension_count", size)
    original = metadata.integer(
        "rope.scaling.original_context_length", metadata.integer("context_length")
    )
    config: Config = {
        "model_type": "phi3",
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rotated / max(size, 1),
        "sliding_window": metadata.integer("attention.sliding_window", 0) or None,
    }
    factors = metadata.file.tensors.get(_ROPE_LONG)
    if factors is not None:
        magnitude = None
        if metadata.has("rope.scaling.attn_factor"):
            magnitude = metadata.number("rope.scaling.attn_factor")
        config["rope_scaling"] = _make_longrope(read_floats(factors), original, magnitude)
    return config


def _read_gpt_oss(metadata: Metadata) -> Config:
    scaling = _read_rope_scaling(metadata)
    return {
        "model_type": "gpt_oss",
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        # published configs have this key, for which llama.cpp has none
        "rope_scaling": scaling
        and {"beta_fast": 32.0, "beta_slow": 1.0, **scaling, "truncate": False},
    }


def _read_olmo2(metadata: Metadata) -> Config:
    """OLMo 2 and, with a sliding window, OLMo 3. In the latter, only layers with full attention
    have the scaling of rotary frequencies."""
    window = metadata.integer("attention.sliding_window", 0)
    if not window:
        return _plain("olmo2")(metadata)
    layers = count_layers(metadata)
    pattern = "attention.sliding_window_pattern"
    # llama.cpp's default
    slides = [(layer + 1) % 4 != 0 for layer in range(layers)]
    if metadata.has(pattern):
        slides = metadata.flags(pattern, layers)
    return {
        **_plain("olmo3")(metadata),
        "sliding_window": window,
        "layer_types": [
            "sliding_attention" if is_sliding else "full_attention" for is_sliding in slides
        ],
    }


def _read_lfm2(metadata: Metadata) -> Config:
    layers = count_layers(metadata)
    kv_heads = metadata.integers("attention.head_count_kv", layers)
    return {
        "model_type": "lfm2",
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": False,
        # the stored width is the adjusted one
        "block_auto_adjust_ff_dim": False,
    }


def _read_lfm2_moe(metadata: Metadata) -> Config:
    return {
        **_read_lfm2(metadata),
        "model_type": "lfm2_moe",
        **_read_experts(metadata),
        "num_dense_layers": metadata.integer("leading_dense_block_count"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "use_expert_bias": any(
            name.endswith(".exp_probs_b.bias") for name in metadata.file.tensors
        ),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _read_granite(metadata: Metadata) -> Config:
    config = _plain("granite")(metadata)
    for key, name in (
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ):
        config[name] = metadata.number(key, 1.0)
    if not metadata.has("attention.scale"):
        raise GGUFError(
            f"{metadata.file.path} lacks the key {metadata.architecture}.attention.scale"
        )
    return {**config, "mlp_bias": _has_bias(metadata, "ffn_gate")}


def _read_glm4_moe(metadata: Metadata) -> Config:
    size = metadata.integer("attention.key_length")
    return {
        "model_type": "glm4_moe",
        "attention_bias": _has_bias(metadata, "attn_q"),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        "partial_rotary_factor": metadata.integer("rope.dimension_count") / max(size, 1),
        **_read_sigmoid_experts(metadata),
    }


def _read_glm4(metadata: Metadata) -> Config:
    """GLM-4-0414, which rotates adjacent dimensions. The order of rows is the same as in the
    original."""
    config = _plain("glm4")(metadata)
    size = metadata.integer(
        "attention.key_length",
        metadata.integer("embedding_length") // max(metadata.integer("attention.head_count"), 1),
    )
    rotated = metadata.integer("rope.dimension_count", size // 2)
    if metadata.text("rope.scaling.type", "none") != "none":
        raise UnsupportedError(f"{metadata.file.path}: the rope scaling of a glm4 is not supported")
    return {**config, "head_dim": size, "partial_rotary_factor": rotated / max(size, 1)}


def _read_nemotron_h(metadata: Metadata) -> Config:
    """Nemotron-H and Nemotron 3. The tensors of a layer show its type."""
    kinds = [_find_nemotron_h_layer(metadata, layer) for layer in range(count_layers(metadata))]
    first = {kind: f"blk.{kinds.index(kind)}" for kind in kinds}
    heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if heads < 1 or inner % heads:
        raise GGUFError(
            f"{metadata.file.path}: ssm.inner_size {inner} cannot be divided among "
            f"ssm.time_step_rank {heads} heads"
        )
    mamba, mlp = first.get("mamba", ""), first.get("mlp", first.get("moe", ""))
    config: Config = {
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        "num_key_value_heads": metadata.uniform_integer(
            "attention.head_count_kv", len(kinds), metadata.integer("attention.head_count")
        ),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "ssm_state_size": metadata.integer("ssm.state_size"),
        "n_groups": metadata.integer("ssm.group_count"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_bias": metadata.has_tensor(f"{mamba}.ssm_in.bias"),
        "use_conv_bias": metadata.has_tensor(f"{mamba}.ssm_conv1d.bias"),
        "mlp_bias": any(
            metadata.has_tensor(f"{mlp}.{name}.bias") for name in ("ffn_up", "ffn_up_shexp")
        ),
        "attention_bias": metadata.has_tensor(f"{first.get('attention', '')}.attn_q.bias"),
    }
    if "mlp" in first:
        config["intermediate_size"] = metadata.file.tensors[f"{mlp}.ffn_up.weight"].shape[0]
    if "moe" in first:
        config |= _read_sigmoid_experts(metadata)
        shared = metadata.integer("expert_shared_feed_forward_length")
        config["moe_shared_expert_intermediate_size"] = shared
        config["moe_latent_size"] = metadata.integer("moe_latent_size", 0) or None
    return config


def _find_nemotron_h_layer(metadata: Metadata, layer: int) -> str:
    for tensor, kind in (
        ("ssm_in", "mamba"),
        ("attn_q", "attention"),
        ("ffn_gate_inp", "moe"),
        ("ffn_up", "mlp"),
    ):
        if metadata.has_tensor(f"blk.{layer}.{tensor}.weight"):
            return kind
    raise GGUFError(f"{metadata.file.path}: the layer blk.{layer} has no known tensors")


def _read_sigmoid_experts(metadata: Metadata) -> Config:
    """Experts that are selected in groups by sigmoid scores and a correction."""
    return {
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count", 0) or None,
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "n_group": metadata.integer("expert_group_count", 1) or 1,
        "topk_group": metadata.integer("expert_group_used_count", 1) or 1,
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


# values of expert_gating_func
_UNSPECIFIED, _SOFTMAX, _SIGMOID = 0, 1, 2

# (experts, layers) of DeepSeek V2 and V3 -> groups of experts, and groups that a token uses. Older
# files lack both keys.
_PUBLISHED_GROUPS: Mapping[tuple[int, int], tuple[int, int]] = {
    (160, 60): (8, 3),
    (256, 61): (8, 4),
}


def _read_deepseek2(metadata: Metadata) -> Config:
    """DeepSeek V2 and V3, GLM-4.7-Flash, Mistral Large 3: latent attention, and experts that are
    selected by a softmax (V2, Mistral) or by sigmoid scores."""
    is_softmax = _uses_softmax(metadata)
    experts = _read_sigmoid_experts(metadata)
    if not metadata.has("expert_group_count"):
        size = experts["n_routed_experts"], count_layers(metadata)
        experts["n_group"], experts["topk_group"] = _PUBLISHED_GROUPS.get(size, (1, 1))
    if is_softmax:
        has_groups = experts["n_group"] > 1
        experts["topk_method"] = "group_limited_greedy" if has_groups else "greedy"
    rotated = metadata.integer("rope.dimension_count")
    key = "attention.key_length_mla"
    keys = metadata.integer(key if metadata.has(key) else "attention.key_length")
    key = "attention.value_length_mla"
    values = metadata.integer(key if metadata.has(key) else "attention.value_length")
    config: Config = {
        "model_type": "deepseek_v2" if is_softmax else "glm4_moe_lite",
        "head_dim": None,
        "num_key_value_heads": metadata.integer("attention.head_count"),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values,
        "q_lora_rank": metadata.integer("attention.q_lora_rank", 0) or None,
        **experts,
    }
    scaling = _read_rope_scaling(metadata)
    if scaling is not None and metadata.has("rope.scaling.yarn_log_multiplier"):
        # the converter stores a tenth of mscale_all_dim
        scale = 10 * metadata.number("rope.scaling.yarn_log_multiplier")
        scaling = {**scaling, "mscale": scale, "mscale_all_dim": scale}
        config["rope_scaling"] = scaling
    if metadata.has("attention.temperature_scale"):
        return {**config, **_read_scaled_queries(metadata, scaling or {}, is_softmax=is_softmax)}
    return config


def _read_scaled_queries(metadata: Metadata, scaling: Config, *, is_softmax: bool) -> Config:
    """What is different in a model of deepseek2 whose queries are scaled by position. It is a
    Mistral Small 4 in other sizes."""
    original = scaling.get("original_max_position_embeddings")
    step = metadata.integer("attention.temperature_length", original or 0)
    if not is_softmax or step != original:
        raise UnsupportedError(
            f"{metadata.file.path}: models of the architecture deepseek2 whose queries are scaled "
            "by position are supported only with a softmax (expert_gating_func) and with steps as "
            "long as the original context (attention.temperature_length)"
        )
    return {
        "model_type": "mistral4",
        "topk_method": "noaux_tc",
        "rope_scaling": None,
        "rope_parameters": {
            **scaling,
            "rope_theta": metadata.number("rope.freq_base"),
            "llama_4_scaling_beta": metadata.number("attention.temperature_scale"),
        },
    }


def _uses_softmax(metadata: Metadata) -> bool:
    """Returns whether a softmax selects experts. In a file without the key, as of a DeepSeek V2,
    only sigmoid scores have a correction."""
    gating = metadata.integer("expert_gating_func", _UNSPECIFIED)
    if gating not in (_UNSPECIFIED, _SOFTMAX, _SIGMOID):
        raise UnsupportedError(
            f"{metadata.file.path}: models of the architecture deepseek2 with "
            f"expert_gating_func {gating} are not supported"
        )
    if gating == _UNSPECIFIED:
        tensors = metadata.file.tensors
        return not any(name.endswith(".exp_probs_b.bias") for name in tensors)
    return gating == _SOFTMAX


def _read_encoder(metadata: Metadata) -> Config:
    return {
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon", 1e-12),
        "type_vocab_size": _count_rows(_get_tensor(metadata, "token_types.weight")),
    }


def _count_rows(tensor: GGUFTensor) -> int:
    """Returns the number of rows. Some converters write a matrix of one row as a vector."""
    return tensor.shape[0] if len(tensor.shape) > 1 else 1


def _read_bert(metadata: Metadata) -> Config:
    """BERT and RoBERTa. The table of positions of the latter begins with the first position, so as
    an encoder of embeddings it is a BERT."""
    positions = _get_tensor(metadata, "position_embd.weight").shape[0]
    config: Config = {
        "model_type": "bert",
        "max_position_embeddings": positions,
        **_read_encoder(metadata),
    }
    if not any(name.startswith("cls.") for name in metadata.file.tensors):
        return config
    if not (metadata.has_tensor("cls.weight") and metadata.has_tensor("cls.output.weight")):
        raise UnsupportedError(
            f"{metadata.file.path}: only classification heads of RoBERTa are supported (tensors "
            "cls.weight and cls.output.weight), because llama.cpp's converter drops the pooler of "
            "a BERT"
        )
    return {
        **config,
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaForSequenceClassification"],
        "num_labels": _count_rows(metadata.file.tensors["cls.output.weight"]),
        "pad_token_id": NUM_UNUSED_POSITIONS - 1,
        "max_position_embeddings": NUM_UNUSED_POSITIONS + positions,
    }


# the rows at the start of the table of positions of a RoBERTa, which llama.cpp's converter removes
NUM_UNUSED_POSITIONS = 2


def _read_nomic_bert(metadata: Metadata) -> Config:
    return {
        "model_type": "nomic_bert",
        "rope_theta": metadata.number("rope.freq_base", 1000.0),
        **_read_encoder(metadata),
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(read_config=_read_llama, names=_EXPERT_NAMES, rotates_pairs=True),
    "mistral3": Architecture(read_config=_read_mistral3, rotates_pairs=True),
    "smollm3": Architecture(read_config=_plain("smollm3"), rotates_pairs=True),
    "qwen2": Architecture(read_config=_plain("qwen2")),
    "qwen2moe": Architecture(
        read_config=_read_qwen2_moe, names={**_EXPERT_NAMES, **_SHARED_EXPERT_NAMES}
    ),
    "qwen2vl": Architecture(read_config=_read_qwen_vl("qwen2_5_vl_text")),
    "qwen3": Architecture(read_config=_plain("qwen3")),
    "qwen3moe": Architecture(read_config=_read_qwen3_moe, names=_EXPERT_NAMES),
    "qwen3vl": Architecture(read_config=_read_qwen_vl("qwen3_vl_text")),
    "qwen3vlmoe": Architecture(read_config=_read_qwen3_vl_moe, names=_EXPERT_NAMES),
    **{
        name: Architecture(
            read_config=_read_gated_delta,
            names={**_GATED_DELTA_NAMES, **_EXPERT_NAMES, **_SHARED_EXPERT_NAMES},
        )
        for name in ("qwen3next", "qwen35", "qwen35moe")
    },
    "gemma2": Architecture(read_config=_read_gemma2, names=_GEMMA_NAMES, norms_have_one_added=True),
    "gemma3": Architecture(read_config=_read_gemma3, names=_GEMMA_NAMES, norms_have_one_added=True),
    "gemma-embedding": Architecture(
        read_config=_read_gemma_embedding,
        names=_GEMMA_NAMES,
        norms_have_one_added=True,
        has_dense_layers=True,
    ),
    "gemma4": Architecture(
        read_config=_read_gemma4,
        names=_GEMMA4_NAMES,
        global_names=_GEMMA4_GLOBAL_NAMES,
        layers_differ=True,
    ),
    "phi3": Architecture(
        read_config=_read_phi3,
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "gpt-oss": Architecture(
        read_config=_read_gpt_oss,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.gate_proj",
            "ffn_up_exps": "mlp.experts.up_proj",
            "ffn_down_exps": "mlp.experts.down_proj",
        },
    ),
    "granite": Architecture(read_config=_read_granite, rotates_pairs=True),
    "glm4moe": Architecture(
        read_config=_read_glm4_moe,
        names={
            **_EXPERT_NAMES,
            **_SIGMOID_EXPERT_NAMES,
            "post_attention_norm": "post_attention_layernorm",
        },
    ),
    "glm4": Architecture(read_config=_read_glm4, names=_GLM4_NAMES),
    **{
        name: Architecture(
            read_config=_read_nemotron_h, names=_NEMOTRON_H_NAMES, layers_differ=True
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    },
    "olmo2": Architecture(read_config=_read_olmo2, names=_POST_NORM_NAMES),
    "lfm2": Architecture(
        read_config=_read_lfm2,
        names={
            **_LFM2_NAMES,
            "ffn_gate": "feed_forward.w1",
            "ffn_down": "feed_forward.w2",
            "ffn_up": "feed_forward.w3",
        },
        global_names={"token_embd_norm": "model.norm"},
    ),
    "lfm2moe": Architecture(
        read_config=_read_lfm2_moe,
        names={
            **_LFM2_NAMES,
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.switch_mlp.gate_proj",
            "ffn_up_exps": "feed_forward.switch_mlp.up_proj",
            "ffn_down_exps": "feed_forward.switch_mlp.down_proj",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        global_names={"token_embd_norm": "model.norm"},
    ),
    "deepseek2": Architecture(read_config=_read_deepseek2, names={**_EXPERT_NAMES, **_MLA_NAMES}),
    "bert": Architecture(
        read_config=_read_bert,
        names=_BERT_NAMES,
        global_names=_BERT_GLOBAL_NAMES,
        layers="encoder.layer",
    ),
    "nomic-bert": Architecture(
        read_config=_read_nomic_bert,
        names=_NOMIC_BERT_NAMES,
        global_names=_ENCODER_GLOBAL_NAMES,
        layers="layers",
    ),
}
