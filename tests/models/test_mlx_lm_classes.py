"""Every class of mlx-lm gives the logits of mlx-lm itself, or its fault is named.

The tiny configs are in the form that mlx-lm reads. Classes that transformers also has are compared
with it in tests/models/mlx_lm_families.py, from the configs that it saves.
"""

import ast
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils

from models import architectures, kernels
from models.base import ModelError
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
from tests.models import parity
from tests.models.architectures import Case, build_untrained
from tests.models.mlx_lm_families import FAMILIES
from tests.models.test_mlx_lm_adapter import CONFIGS, LATENT, TINY
from tests.models.test_qwen3_5 import TEXT as QWEN3_5

pytestmark = pytest.mark.recorded

ROPE = {"rope_theta": 1e4, "rms_norm_eps": 1e-6}
PLAIN = {**TINY, **ROPE}
HEADS = {**PLAIN, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    **LATENT,
    **ROPE,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
BAILING = {
    **PLAIN,
    **EXPERTS,
    "num_hidden_layers": 4,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENTS = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LONGCAT = {
    **PLAIN,
    **LATENTS,
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
    "attention_method": "MLA",
}
DELTA = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
LINEAR = {
    **HEADS,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "linear_attn_config": {**DELTA, "kda_layers": [1, 2, 3], "full_attn_layers": [4]},
    "model_max_length": 512,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "mla_use_nope": True,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

# classes that are in no other list
CLASSES: Mapping[str, dict[str, Any]] = {
    "Klear": {**PLAIN, **EXPERTS, "attention_bias": False, "mlp_only_layers": [0],
              "decoder_sparse_step": 1, "n_shared_experts": 1, "norm_topk_prob": True},
    "afm7": {"vocab_size": 101, "hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2,
             "num_heads": 4, "num_kv_heads": 2, "max_position_embeddings": 512},
    "baichuan_m1": {**PLAIN, "sliding_window": 6, "sliding_window_layers": [1], "conv_window": 2},
    "bailing_hybrid": {**BAILING, "head_dim": 16, "num_key_value_heads": 4, "layer_group_size": 2,
                       "group_norm_size": 2, "routed_scaling_factor": 1.5, **LATENTS},
    "bailing_moe": BAILING,
    "bailing_moe_linear": {**BAILING, "head_dim": 16, "num_key_value_heads": 4,
                           "layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": {**BAILING, "model_type": "bailing_hybrid", "head_dim": 16,
                       "architectures": ["BailingMoeV3ForCausalLM"], "num_key_value_heads": 4,
                       "layer_group_size": 2, "moe_shared_expert_intermediate_size": 32,
                       **LATENTS},
    "deepseek": {**PLAIN, "num_key_value_heads": 4, "moe_intermediate_size": 32,
                 "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
                 "first_k_dense_replace": 1},
    "exaone": {**HEADS, "num_layers": 2, "layer_norm_epsilon": 1e-5},
    "gemma": HEADS,
    "gpt2": {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512,
             "layer_norm_epsilon": 1e-5, "vocab_size": 101},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "n_inner": 96,
                    "layer_norm_epsilon": 1e-5, "vocab_size": 101},
    "gpt_neox": {**TINY, "layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    "hunyuan": {**PLAIN, "attention_bias": False, "moe_topk": 2, "num_experts": 4,
                "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True,
                "use_cla": True, "cla_share_factor": 2,
                "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "iquestloopcoder": {**HEADS, "loop_num": 2, "loop_window_size": 8},
    "jamba": {**TINY, "rms_norm_eps": 1e-6, "num_hidden_layers": 4, "attn_layer_offset": 1,
              "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
              "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "num_experts": 1,
              "num_experts_per_tok": 1},
    "kimi_linear": LINEAR,
    "kimi_k3": {"text_config": {
        **LINEAR, "model_type": "kimi_linear", "hidden_act": "situ", "q_lora_rank": 32,
        "mla_use_output_gate": True, "attn_res_block_size": 2}},
    "kimi_vl": {"text_config": {**ROUTED, "model_type": "deepseek_v3"}, "vision_config": {}},
    "lille-130m": {"block_size": 512, "layer_norm_eps": 1e-5, "n_embd": 64, "n_head": 4,
                   "n_kv_heads": 2, "n_layer": 2, "rope_theta": 1e4, "vocab_size": 101},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": {**LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3,
                            "emb_split_num": 2},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
              "state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
              "time_step_rank": 4, "vocab_size": 101, "max_position_embeddings": 512},
    "mimo": PLAIN,
    "mimo_v2_flash": {**HEADS, **WINDOWS, "num_experts_per_tok": 2, "hybrid_layer_pattern": [1, 0],
                      "moe_layer_freq": [0, 1], "add_swa_attention_sink_bias": True,
                      "add_full_attention_sink_bias": False, "sliding_window_size": 6,
                      "moe_intermediate_size": 32, "n_shared_experts": None, "n_routed_experts": 4,
                      "routed_scaling_factor": None, "topk_method": "noaux_tc",
                      "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 1,
                      "topk_group": 1, "layernorm_epsilon": 1e-5, "swa_rope_theta": 1e4,
                      "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
                      "head_dim": 24, "v_head_dim": 16, "swa_head_dim": 24, "swa_v_head_dim": 16,
                      "partial_rotary_factor": 0.5},
    "minicpm": {**PLAIN, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12},
    "minicpm3": {**PLAIN, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12,
                 "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
                 "qk_rope_head_dim": 16, "rope_scaling": {
                     "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                     "original_max_position_embeddings": 512}},
    "minimax_m3_vl": {"text_config": {
        **HEADS, "model_type": "minimax_m3_vl_text", "intermediate_size": 32,
        "dense_intermediate_size": 96, "shared_intermediate_size": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2, "rotary_dim": 8, "moe_layer_freq": [0, 1]}},
    "nanbeige": {**PLAIN, "num_loops": 2},
    "nanochat": TINY,
    "nemotron-nas": {**PLAIN, "block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
        {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}}],
        "num_hidden_layers": 4},
    "olmo_hybrid": {**PLAIN, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
                    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                    "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
                    "tie_word_embeddings": False, "attention_bias": False,
                    "layer_types": ["linear_attention", "full_attention"]},
    "openelm": {"head_dim": 16, "num_transformer_layers": 2, "model_dim": 64, "vocab_size": 101,
                "ffn_dim_divisor": 32, "num_query_heads": [4, 4], "num_kv_heads": [2, 2],
                "ffn_multipliers": [1.0, 2.0], "max_context_length": 512},
    "phixtral": {"num_vocab": 101, "model_dim": 64, "num_heads": 4, "num_layers": 2,
                 "rotary_dim": 8, "vocab_size": 101, "n_positions": 512},
    "plamo": {**PLAIN, "n_shared_head": 2},
    "plamo2": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
               "num_key_value_heads": 2, "hidden_size_per_head": 16, "attention_window_size": 512,
               "max_position_embeddings": 512, "full_attention_idx": [1, 3], "mamba_d_state": 16,
               "mamba_num_heads": 4, "intermediate_size": 96, "vocab_size": 101},
    "qwen": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
             "kv_channels": 16, "max_position_embeddings": 512, "intermediate_size": 192,
             "vocab_size": 101},
    "rwkv7": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "norm_eps": 1e-5, "head_dim": 16, "a_low_rank_dim": 16, "v_low_rank_dim": 16,
              "gate_low_rank_dim": 16, "decay_low_rank_dim": 16, "vocab_size": 101,
              "max_position_embeddings": 512},
    "spark2_5": {**HEADS, **WINDOWS, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "step3p5": {**HEADS, "num_attention_groups": 2, **WINDOWS, "moe_num_experts": 4,
                "moe_top_k": 2, "moe_intermediate_size": 32, "share_expert_dim": 32,
                "moe_layers_enum": "1"},
    "talkie": {**HEADS, "num_key_value_heads": 4},
    "telechat3": PLAIN,
    "youtu_llm": {**LATENT, **ROPE},
}  # fmt: skip

# classes that are rejected: a part of the message
REJECTED: Mapping[str, tuple[dict[str, Any], str]] = {
    "bitnet": (PLAIN, "No Metal back-end"),
    "deepseek_v41": ({**HEADS, "num_hidden_layers": 3, "head_dim": 32, "q_lora_rank": 32,
                     "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 16,
                     "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
                     "sliding_window": 8, "compress_ratios": [0, 4, 8],
                     "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4, "hc_mult": 2},
                     "LayerCache is not supported"),
    "ernie4_5_moe": ({**PLAIN, "use_bias": False, "moe_num_experts": 4}, "ignores the bias"),
    "minimax": ({**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2,
                 "linear_attn_alpha_factor": 3.5}, "sets linear_attn_alpha_factor"),
    "muse_spark": ({"text_config": {
        **HEADS, **WINDOWS, "model_type": "muse_spark_text", "post_norm_eps": 1e-8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "layer_rope_theta": [1e4, 0], "final_logit_softcapping": 20.0, "output_multiplier": 0.5,
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_hidden_size": 32,
        "moe_intermediate_size": 32}}, "No Metal back-end"),
    "olmo": (PLAIN, "SystemExit"),
    "phi3small": ({"hidden_size": 64, "dense_attention_every_n_layers": 2,
                  "ff_intermediate_size": 96, "gegelu_limit": 20.0, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "num_key_value_heads": 2, "layer_norm_epsilon": 1e-5,
                  "vocab_size": 101, "max_position_embeddings": 512}, "corrupts memory on a CPU"),
    "plamo3": ({**HEADS, "window_size": 6, "sliding_window": 6, "sliding_window_pattern": 2},
               "a sliding window of 7 positions with a cache of 6"),
}  # fmt: skip

# files whose classes come from another file, and one that needs packed weights 512 wide
OTHERS = {
    "gemma3_text", "gemma4_text", "llama4_text", "pixtral", "mistral3", "qwen2_vl", "qwen3_5_moe",
    "kimi_k25", "lfm2-vl", "gear", "prism_hadamard_qwen35",
}  # fmt: skip

CASES_HERE = [
    Case(name="class", config={"model_type": kind, **config}) for kind, config in CLASSES.items()
]
each_class = pytest.mark.parametrize("case", CASES_HERE, ids=CLASSES.keys())

# positions that the eight rows of a batch have before its first step
ROWS = (1, 2, 5, 8, 11, 14, 17, 20)
STEPS = 3

# classes with a delta rule, which amplifies rounding (tests/models/parity.py)
DELTA_CLASSES = {"bailing_hybrid", "kimi_k3", "kimi_linear", "olmo_hybrid"}

# classes that compute one row of a batch at a time on a CPU; docs/models.md describes them
UNBATCHED = {
    "afm7", "bailing_hybrid", "bailing_moe_linear", "deepseek", "gemma", "gpt_bigcode",
    "iquestloopcoder", "jamba", "kimi_k3", "kimi_linear", "longcat_flash",
    "longcat_flash_ngram", "mamba", "mimo_v2_flash", "minimax_m3_vl", "nanochat", "olmo_hybrid",
    "plamo", "plamo2", "rwkv7", "step3p5", "talkie",
}  # fmt: skip


def get_tolerance(case: Case) -> float:
    is_delta = case.config["model_type"] in DELTA_CLASSES
    return parity.TOLERANCE_OF_DELTAS if is_delta else parity.TOLERANCE


def list_classes() -> set[str]:
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    folders = spec.submodule_search_locations or []
    return {
        file.stem
        for folder in folders
        for file in (Path(folder) / "models").glob("*.py")
        if {"Model", "ModelArgs"} <= _read_class_names(file)
    }


def _read_class_names(file: Path) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def is_native(kind: str) -> bool:
    try:
        module = importlib.import_module(f"models.{kind}")
    except ModuleNotFoundError:
        return False
    return {"Config", "Model"} <= vars(module).keys()


def test_every_class_of_mlx_lm_is_in_a_list() -> None:
    compared = {case.config["model_type"] for case in FAMILIES}
    compared |= {config["model_type"] for config in CONFIGS.values()}
    missing = {
        kind
        for kind in list_classes() - compared - CLASSES.keys() - REJECTED.keys() - OTHERS
        if not is_native(kind)
    }
    assert not missing


@each_class
def test_a_class_gives_the_logits_of_mlx_lm(case: Case, tmp_path: Path) -> None:
    parity.save_reference(case, tmp_path)
    # loading may change weights: Baichuan normalizes its head
    reference = utils.load_model(tmp_path)[0]
    ours = parity.load_model(tmp_path)
    apply_cpu_layout(cast(nn.Module, ours))
    found = parity.find_differences(reference, ours, case)
    assert max(found.values()) < get_tolerance(case), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["affine-4", "affine-8"])
@each_class
def test_a_quantized_class_gives_the_logits_of_mlx_lm(
    case: Case, kind: str, tmp_path: Path
) -> None:
    parity.save_reference(case, tmp_path, kind=kind)
    reference = utils.load_model(tmp_path)[0]
    ours = parity.load_model(tmp_path)
    apply_cpu_layout(cast(nn.Module, ours))
    found = parity.find_differences(reference, ours, case)
    assert max(found.values()) < get_tolerance(case), found


@each_class
def test_a_row_of_a_batch_has_the_bits_that_it_has_alone(case: Case, tmp_path: Path) -> None:
    parity.save_reference(case, tmp_path)
    model: Any = parity.load_model(tmp_path)
    apply_cpu_layout(model)
    if kernels.ops() is not None:
        shares = getattr(model, "shares_pass", True)
        assert shares == (case.config["model_type"] not in UNBATCHED)
    prompt = parity.ids(case, 23)
    steps = [prompt[length : length + STEPS] for length in ROWS]
    rows = parity.decode_batch(model, [prompt[:length] for length in ROWS], steps)
    alone = [
        parity.prefill(model, prompt[: length + STEPS], [length, *[1] * STEPS])[-STEPS:]
        for length in ROWS
    ]
    np.testing.assert_array_equal(rows, np.stack(alone))
    if is_batch_invariant(model):
        whole = parity.prefill(model, prompt, [23])
        np.testing.assert_array_equal(parity.prefill(model, prompt, [6, 1, 9, 7]), whole)


@pytest.mark.parametrize("kind", REJECTED)
def test_a_class_that_computes_something_else_is_rejected(kind: str) -> None:
    config, reason = REJECTED[kind]
    case = Case(name="rejected", config={"model_type": kind, **config})
    with pytest.raises(ModelError, match=reason):
        # some faults appear only in a forward pass, like the first check of a loaded model
        is_batch_invariant(build_untrained(case))


# classes that compute tied heads differently than untied ones, and the name of the latter
TIED: Mapping[str, tuple[dict[str, Any], str]] = {
    "llama4_text": ({**HEADS, "intermediate_size_mlp": 96, "attention_bias": False,
                     "use_qk_norm": True, "no_rope_layers": [1, 1]}, "output"),
    "minicpm": (CLASSES["minicpm"], "lm_head"),
    "minicpm3": (CLASSES["minicpm3"], "lm_head"),
    "seed_oss": (HEADS, "lm_head"),
}  # fmt: skip


@pytest.mark.parametrize("quantization", [None, "affine-4"])
@pytest.mark.parametrize("kind", TIED)
def test_a_tied_embedding_is_used_like_an_output_layer(
    kind: str, quantization: str | None, tmp_path: Path
) -> None:
    """mlx-lm's classes multiply by its weight, which is packed on a CPU and if it is quantized, or
    do not scale the logits."""
    config, head = TIED[kind]
    case = Case(name="tied", config={"model_type": kind, **config, "tie_word_embeddings": False})
    parity.save_reference(case, tmp_path, kind=quantization)
    weights = cast(dict[str, mx.array], mx.load(str(tmp_path / "model.safetensors")))
    own = {name: array for name, array in weights.items() if not name.startswith(head)}
    copies = {
        f"{head}.{name.removeprefix('model.embed_tokens.')}": array
        for name, array in own.items()
        if name.startswith("model.embed_tokens.")
    }
    untied: Any = architectures.build(case.config, {**own, **copies})
    tied: Any = architectures.build({**case.config, "tie_word_embeddings": True}, own)
    for model in (untied, tied):
        apply_cpu_layout(model)
    assert is_batch_invariant(tied) == is_batch_invariant(untied)
    # Llama 4 normalizes queries with an operation of MLX
    if kernels.ops() is not None and kind != "llama4_text":
        assert tied.shares_pass
    prompt = parity.ids(case, 9)
    np.testing.assert_array_equal(
        parity.prefill(tied, prompt, [6, 1, 2]), parity.prefill(untied, prompt, [6, 1, 2])
    )


MLP = ("gate", "up", "down")
PRISM = "prism_hadamard_qwen35"
PACKED = ("lm_head", *(f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in MLP))


def draw_packed(name: str, array: mx.array, rng: np.random.Generator) -> mx.array:
    if array.dtype == mx.uint32:
        return mx.array(rng.integers(0, 2**32, array.shape, dtype=np.uint32))
    if name.endswith(".signs"):
        return mx.array(np.where(rng.random(array.shape) < 0.5, -1, 1).astype(np.float32))
    if name.endswith((".scales", ".biases")):
        sign = 1 if name.endswith(".scales") else -1
        return mx.array((sign * (0.01 + 0.05 * rng.random(array.shape))).astype(np.float16))
    noise = mx.array(rng.standard_normal(array.shape).astype(np.float32))
    return noise / array.shape[-1] ** 0.5 if array.ndim > 1 else 1 + noise / 9


@pytest.mark.parametrize(
    ("layers", "packed", "tolerance"),
    [
        (["linear_attention", "full_attention"], PACKED, parity.TOLERANCE_OF_DELTAS),
        # a packed embedding has activations of float16
        (None, (*PACKED, "model.embed_tokens"), 0.03),
    ],
)
def test_bonsai_2_runs_through_the_class_of_the_whole_model(
    layers: Any, packed: Sequence[str], tolerance: float
) -> None:
    """Its text part has the model type of Qwen3.5, and packed weights that this one lacks."""
    text = {**QWEN3_5, "hidden_size": 512, "num_hidden_layers": 2, "intermediate_size": 512}
    text |= {"full_attention_interval": 2, "layer_types": layers, "tie_word_embeddings": False}
    config = {
        "model_type": PRISM,
        "schema_version": 2,
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": path, "embedding": "embed" in path, "block": 512, "dtype": "float16"}
            for path in packed
        ],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
    }
    module = importlib.import_module(f"mlx_lm.models.{PRISM}")
    reference = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng(0)
    flat: Any = tree_flatten(reference.parameters())
    weights = {name: draw_packed(name, array, rng) for name, array in flat}
    reference.update(tree_unflatten(list(weights.items())))
    reference.eval()
    ours = architectures.build(config, weights | {"vision_tower.x": mx.zeros((3,))}, vision=False)
    apply_cpu_layout(cast(nn.Module, ours))
    case = Case(name="packed", config=text)
    found = parity.find_differences(reference, ours, case)
    assert max(found.values()) < tolerance, found


@pytest.mark.parametrize("kinds", [["linear_attention", "full_attention"], ["full_attention"]])
def test_layers_that_the_class_of_the_whole_model_computes_otherwise_are_an_error(
    kinds: list[str],
) -> None:
    text = {**QWEN3_5, "layer_types": kinds * (4 // len(kinds))}
    with pytest.raises(ModelError, match=f"sets layer_types, which mlx-lm's {PRISM} .* ignores"):
        architectures.build({"model_type": PRISM, "text_config": text}, {})
