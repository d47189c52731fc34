"""Converts a tiny model to GGUF as llama.cpp's converter does, with gguf-py's writer and names.

Each function follows the class of that architecture in llama.cpp (conversion/*.py). Nothing of
models/gguf is used, so that tests compare two implementations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Weights = dict[str, np.ndarray]
Config = Mapping[str, Any]
Types = gguf.GGMLQuantizationType

# model_type -> llama.cpp's architecture
ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen2_5_vl": "qwen2vl",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen2_vl_text": "qwen2vl",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "qwen3_next": "qwen3next",
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "phi3": "phi3",
    "gpt_oss": "gpt-oss",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "glm4": "glm4",
    "nemotron_h": "nemotron_h",
    "granite": "granite",
    "glm4_moe": "glm4moe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "glm4_moe_lite": "deepseek2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "kimi_k2": "deepseek2",
    "mistral4": "deepseek2",  # in the sizes of Mistral Large 3
}

_PAIRED = ("llama", "mistral3", "smollm3", "granite")

# names of MLX checkpoints -> names of the original, which gguf-py knows
_ORIGINAL = (
    (".switch_mlp.", ".experts."),
    (".embed_q.", ".k_b_proj."),
    (".unembed_out.", ".v_b_proj."),
    (".dt_bias", ".dt_proj.bias"),
    (".feed_forward.gate_proj.", ".feed_forward.w1."),
    (".feed_forward.down_proj.", ".feed_forward.w2."),
    (".feed_forward.up_proj.", ".feed_forward.w3."),
    (".block_sparse_moe.experts.", ".feed_forward.experts."),
    (".feed_forward.experts.gate_proj.", ".feed_forward.experts.w1."),
    (".feed_forward.experts.down_proj.", ".feed_forward.experts.w2."),
    (".feed_forward.experts.up_proj.", ".feed_forward.experts.w3."),
    (".expert_bias", ".expert_bias.bias"),
    (".e_score_correction_bias", ".e_score_correction.bias"),
    (".sinks", ".sinks.weight"),
)


def convert(
    config: Config,
    weights: Weights,
    path: Path,
    *,
    quantize: Callable[[str], Types | None] = lambda name: None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Writes a model. config: as on the hub. weights: float32, with the names of MLX checkpoints.
    quantize: the type of a matrix, by its name in the file. extra: adds keys, such as a
    tokenizer."""
    arch = ARCHITECTURES[config["model_type"]]
    if arch == "nemotron_h" and "num_experts_per_tok" in config:
        arch = "nemotron_h_moe"
    writer = gguf.GGUFWriter(path, arch)
    _add_parameters(writer, arch, config)
    _add_rope(writer, config)
    extra(writer)
    write_tensors(writer, _convert_weights(arch, config, weights), quantize)


def write_tensors(
    writer: gguf.GGUFWriter, tensors: Weights, quantize: Callable[[str], Types | None]
) -> None:
    """Writes the tensors, and closes the file. Vectors, and matrices without a type, are float32.
    quantize: the type of a matrix, by its name in the file."""
    for name, array in tensors.items():
        kind = quantize(name) if array.ndim > 1 else None
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_parameters(writer: gguf.GGUFWriter, arch: str, config: Config) -> None:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    layers = config["num_hidden_layers"]
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(
        config.get("rms_norm_eps") or config.get("norm_eps") or config["layer_norm_epsilon"]
    )
    rope = config.get("rope_parameters") or {}
    if theta := rope.get("rope_theta") or config.get("rope_theta"):
        writer.add_rope_freq_base(theta)
    if "head_dim" in config and arch != "gemma4":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch in ("lfm2", "lfm2moe"):
        attends = config.get("layer_types") or [
            "full_attention" if layer in config["full_attn_idxs"] else "conv"
            for layer in range(config["num_hidden_layers"])
        ]
        writer.add_head_count_kv([kv_heads if kind != "conv" else 0 for kind in attends])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_vocab_size(config["vocab_size"])
    elif arch == "deepseek2":
        _add_latent_attention(writer, config)
    elif arch == "gemma4":
        _add_gemma4(writer, config)
    elif arch.startswith("nemotron_h"):
        _add_nemotron_h(writer, config, kv_heads)
    else:
        writer.add_head_count_kv(kv_heads)
    width = config.get("block_ff_dim") or config.get("intermediate_size")
    if width is not None and config.get("use_double_wide_mlp"):
        owners = layers - config["num_kv_shared_layers"]  # gemma4
        writer.add_feed_forward_length([width * (1 + (i >= owners)) for i in range(layers)])
    elif width is not None and not arch.startswith("nemotron_h"):
        if config.get("block_auto_adjust_ff_dim"):
            width, multiple = int(2 * width / 3), config["block_multiple_of"]
            width = multiple * -(-int(config["block_ffn_dim_multiplier"] * width) // multiple)
        writer.add_feed_forward_length(width)
    _add_experts(writer, arch, config)
    if arch in ("qwen3next", "qwen35", "qwen35moe"):
        values = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
        writer.add_full_attention_interval(config["full_attention_interval"])
        share = config.get("partial_rotary_factor") or rope["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(config["head_dim"] * share))
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch in ("gemma2", "gemma3", "gpt-oss", "phi3", "olmo2") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "olmo3":
        writer.add_sliding_window_pattern([(layer + 1) % 4 != 0 for layer in range(layers)])
    if arch == "glm4":
        size = config["head_dim"]
        writer.add_rope_dimension_count(int(size * config["partial_rotary_factor"]))
    if arch == "glm4moe":
        share = config.get("partial_rotary_factor", 0.5)
        writer.add_rope_dimension_count(int(config["head_dim"] * share))
        _add_grouped_experts(writer, config)
    if arch == "phi3":
        size = config["hidden_size"] // heads
        writer.add_rope_dimension_count(int(size * config.get("partial_rotary_factor", 1.0)))
        original = config.get("original_max_position_embeddings", 4096)
        writer.add_rope_scaling_orig_ctx_len(original)
        if config.get("rope_scaling"):
            factor = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(
                1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            )


def _list_nemotron_h_layers(config: Config) -> list[str]:
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return config.get("layers_block_type") or [kinds[x] for x in config["hybrid_override_pattern"]]


def _add_nemotron_h(writer: gguf.GGUFWriter, config: Config, kv_heads: int) -> None:
    kinds = _list_nemotron_h_layers(config)
    has_experts = "num_experts_per_tok" in config
    width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    named = "moe" if has_experts else "mlp"
    writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_feed_forward_length([width if kind == named else 0 for kind in kinds])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    if has_experts:
        shared = config["moe_shared_expert_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])


def _convert_nemotron_h(config: Config, weights: Weights) -> Weights:
    """The names of the original, and the shapes that llama.cpp's graph needs."""
    made: Weights = {}
    for name, array in weights.items():
        if name.endswith((".A_log", ".mixer.D")):
            array = array.reshape(-1, 1)
        elif name.endswith(".mixer.norm.weight"):
            array = array.reshape(config["n_groups"], -1)
        name = name.replace(".dt_bias", ".dt.bias").replace(
            ".switch_mlp.fc1.", ".switch_mlp.up_proj."
        )
        name = name.replace(".switch_mlp.fc2.", ".switch_mlp.down_proj.")
        if ".switch_mlp." in name:
            name = name.replace("backbone.", "model.").replace(
                ".mixer.switch_mlp.", ".mlp.experts."
            )
        made[name] = array
    return made


def _add_gemma4(writer: gguf.GGUFWriter, config: Config) -> None:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    heads, full = config["num_key_value_heads"], config["num_global_key_value_heads"]
    if full is None:
        writer.add_head_count_kv(heads)
    else:
        writer.add_head_count_kv([heads if is_sliding else full for is_sliding in slides])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(config["global_head_dim"])
    writer.add_value_length(config["global_head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(config["global_head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if cap := config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(cap)


def _add_latent_attention(writer: gguf.GGUFWriter, config: Config) -> None:
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    keys, values = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    writer.add_kv_lora_rank(latent)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if config["model_type"] == "deepseek_v2":  # as in older files, which have attn_kv_b
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(keys)
        writer.add_value_length(values)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(latent + rotated)
        writer.add_value_length(latent)
        writer.add_key_length_mla(keys)
        writer.add_value_length_mla(values)
    writer.add_rope_dimension_count(rotated)
    _add_grouped_experts(writer, config)


def _add_grouped_experts(writer: gguf.GGUFWriter, config: Config) -> None:
    is_v2 = config["model_type"] == "deepseek_v2"
    kinds = gguf.ExpertGatingFuncType
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"] or 0)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    is_softmax = is_v2 or config["model_type"] == "mistral4"
    writer.add_expert_gating_func(kinds.SOFTMAX if is_softmax else kinds.SIGMOID)
    if config.get("norm_topk_prob", not is_v2):
        writer.add_expert_weights_norm(True)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _add_experts(writer: gguf.GGUFWriter, arch: str, config: Config) -> None:
    if config.get("top_k_experts"):
        config = {**config, "num_experts_per_tok": config["top_k_experts"]}
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    if not (experts := next((config[name] for name in names if config.get(name)), 0)):
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch != "llama":
        width = "intermediate_size" if arch == "gpt-oss" else "moe_intermediate_size"
        writer.add_expert_feed_forward_length(config[width])
    if shared := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_rope(writer: gguf.GGUFWriter, config: Config) -> None:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "mscale_all_dim" in rope:
            scale = 1.0 if config["model_type"] == "ministral3" else 0.1
            writer.add_rope_scaling_yarn_log_mul(scale * rope["mscale_all_dim"])
        if "llama_4_scaling_beta" in rope:
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
            if config["model_type"] == "mistral4":
                writer.add_attn_temperature_length(rope["original_max_position_embeddings"])
    elif kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


def _convert_gemma4(config: Config, weights: Weights) -> tuple[Weights, Weights]:
    """Returns the tensors with the names of the original, where the gate and up projections of
    experts are fused, and those with names in the file."""
    renamed: Weights = {}
    made: Weights = {}
    for name, array in weights.items():
        path, _, parameter = name.partition(".experts.switch_glu.")
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if name.endswith(".router.scale"):
            made[f"blk.{layer}.ffn_gate_inp.scale"] = array
        elif name.endswith(".router.per_expert_scale"):
            made[f"blk.{layer}.ffn_down_exps.scale"] = array
        elif name.endswith(".layer_scalar"):
            renamed[f"{name}.weight"] = array
        elif parameter == "gate_proj.weight":
            up = weights[f"{path}.experts.switch_glu.up_proj.weight"]
            renamed[f"{path}.experts.gate_up_proj.weight"] = np.concatenate([array, up], axis=1)
        elif parameter != "up_proj.weight":
            renamed[name.replace(".switch_glu.", ".")] = array
    half = config["global_head_dim"] // 2
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    divisors = np.full(half, 1e30, np.float32)
    divisors[: int(half * share)] = 1.0
    return renamed, {**made, "rope_freqs.weight": divisors}


def _convert_weights(arch: str, config: Config, weights: Weights) -> Weights:
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    made: Weights = {}
    if arch == "gemma4":
        weights, made = _convert_gemma4(config, weights)
    if arch.startswith("nemotron_h"):
        weights = _convert_nemotron_h(config, weights)
    for name, array in weights.items():
        for target, part in _convert_tensor(arch, config, name, array):
            for ours, original in _ORIGINAL:
                target = target.replace(ours, original)
            if ".feed_forward.experts." in target:
                target = target.removeprefix("model.")
            found = names.get_name(target, try_suffixes=(".weight", ".bias"))
            if found is None and ".ssm_" not in target:
                raise AssertionError(f"gguf-py does not know {target}")
            made[found or target] = part
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        made["rope_freqs.weight"] = _llama3_factors(config, rope)
    if rope.get("type") == "longrope":
        for kind in ("short", "long"):
            made[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return made


def _convert_tensor(
    arch: str, config: Config, name: str, array: np.ndarray
) -> Sequence[tuple[str, np.ndarray]]:
    if arch in _PAIRED and name.endswith(("q_proj.weight", "q_proj.bias")):
        array = permute(array, config["num_attention_heads"])
    if arch in _PAIRED and name.endswith(("k_proj.weight", "k_proj.bias")):
        array = permute(array, config["num_key_value_heads"])
    if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        array = array + 1
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        array = array.squeeze()
    if name.endswith(".A_log"):
        array = -np.exp(array)
    if ".linear_attn." in name:
        return _convert_delta_net(arch, config, name, array)
    return [(name, array)]


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def _convert_delta_net(
    arch: str, config: Config, name: str, array: np.ndarray
) -> Sequence[tuple[str, np.ndarray]]:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    ratio = values // keys
    if name.endswith("in_proj_qkvz.weight"):
        width = ratio * value_size
        parts = np.split(
            array.T.reshape(-1, keys, 2 * key_size + 2 * width),
            [key_size, 2 * key_size, 2 * key_size + width],
            axis=-1,
        )
        *qkv, z = (part.reshape(array.shape[1], -1) for part in parts)
        path = name.removesuffix("qkvz.weight")
        return [
            (f"{path}qkv.weight", np.concatenate(qkv, axis=-1).T),
            (f"{path}z.weight", z.T),
        ]
    if arch == "qwen3next" or ratio == 1:
        return [(name, array)]

    def tile(part: np.ndarray, axis: int, size: int) -> np.ndarray:
        shape = list(part.shape)
        split = part.reshape(*shape[:axis], keys, ratio, size, *shape[axis + 1 :])
        return split.swapaxes(axis, axis + 1).reshape(shape)

    if ".in_proj_qkv." in name or ".conv1d." in name:
        start = 2 * keys * key_size
        array = np.concatenate([array[:start], tile(array[start:], 0, value_size)])
    elif ".in_proj_z." in name:
        array = tile(array, 0, value_size)
    elif ".out_proj." in name:
        array = tile(array, 1, value_size)
    elif not name.endswith(".norm.weight"):  # in_proj_a, in_proj_b, A_log, dt_bias
        array = tile(array, 0, 1)
    return [(name, array)]


def _llama3_factors(config: Config, rope: Config) -> np.ndarray:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original = rope["original_max_position_embeddings"]
    low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
    factors: list[float] = []
    for index in range(0, size, 2):
        length = 2 * math.pi * config["rope_theta"] ** (index / size)
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
