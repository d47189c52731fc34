"""Tiny configs of the architectures that run through mlx-lm's classes and that transformers has.

They are arguments of transformers' config classes. `make parity` saves a random model of each with
transformers and compares the logits. tests/models/test_mlx_lm_config.py checks without torch that
mlx-lm's classes get the values.
"""

from collections.abc import Sequence
from typing import Any

from tests.models.architectures import Case

THETA = 5e4

_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
}
_ROPE = {"rope_theta": THETA}
_HEADS = {"head_dim": 16}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_INDEX = {"index_head_dim": 32, "index_n_heads": 4, "index_topk": 8}
_LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": THETA,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}
_LLAMA4 = {
    **_TINY,
    **_HEADS,
    **_ROPE,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8,
}
_GPT: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "n_inner": 256,
    "vocab_size": 101,
}
_STATES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 16,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "time_step_rank": 4,
}
# one layer of each kind, twice
_WINDOWS = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_MINIMAX_M3 = {
    **_TINY,
    **_HEADS,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 32,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": THETA,
        "partial_rotary_factor": 0.5,
    },
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 2,
}


def _case(kind: str, *parts: dict[str, Any], name: str = "saved") -> Case:
    config = {"model_type": kind}
    for part in parts:
        config |= part
    return Case(name=name, config=config)


FAMILIES: Sequence[Case] = (
    _case("afmoe", _TINY, _HEADS, _ROPE, {"num_experts": 4, "num_experts_per_tok": 2,
          "num_dense_layers": 1, "num_shared_experts": 1, "moe_intermediate_size": 32,
          "sliding_window": 6}),
    _case("apertus", _TINY, _LLAMA3),
    _case("cohere", _TINY, _ROPE),
    _case("cohere2", _TINY, _HEADS, _ROPE, {"sliding_window": 6}),
    _case("dbrx", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512,
          "vocab_size": 101, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0,
          "rope_theta": 10000.0}, "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4,
          "moe_top_k": 2}}),
    _case("deepseek_v32", _TINY, _EXPERTS, _LATENT, _INDEX, _ROPE),
    _case("dots1", _TINY, _HEADS, _EXPERTS, _ROPE),
    _case("ernie4_5", _TINY, _HEADS, _ROPE),
    _case("exaone", _TINY, _ROPE),
    _case("exaone4", _TINY, _ROPE, {"sliding_window": 6}),
    _case("exaone_moe", _TINY, _ROPE, {"num_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 32, "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
          "first_k_dense_replace": 1, "sliding_window": 6}),
    _case("falcon_h1", _TINY, _ROPE, {"mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_ssm": 64,
          "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 16}),
    _case("falcon_mamba", _STATES),
    _case("glm", _TINY, _HEADS, _ROPE),
    _case("glm4", _TINY, _HEADS, _ROPE),
    _case("glm_moe_dsa", _TINY, _EXPERTS, _LATENT, _INDEX, _ROPE),
    _case("gpt2", _GPT),
    _case("gpt_bigcode", _GPT, {"activation_function": "gelu"}),
    _case("gpt_neox", _TINY, {"intermediate_size": 256, "hidden_act": "gelu_pytorch_tanh",
          "rope_parameters": {"rope_type": "default", "rope_theta": THETA,
                              "partial_rotary_factor": 0.25}}),
    _case("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 256,
          "rotary_dim": 8, "vocab_size": 101}),
    _case("granitemoe", _TINY, _ROPE, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    _case("helium", _TINY, _HEADS, _ROPE),
    _case("hunyuan_v1_dense", _TINY, _HEADS, _ROPE),
    _case("hunyuan_v1_dense", _TINY, _HEADS, {"rope_parameters": {"rope_type": "dynamic",
          "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}}, name="alpha"),
    _case("internlm3", _TINY, _HEADS, _ROPE),
    _case("jamba", _TINY, {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2,
          "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}),
    _case("laguna", _TINY, _HEADS, {"num_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
          "sliding_window": 6}),
    _case("llama4", {"text_config": _LLAMA4}),
    _case("mamba", _STATES),
    _case("mamba2", _STATES, {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16}),
    _case("mellum", _TINY, _HEADS, {"num_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 32, "sliding_window": 6}),
    _case("mimo_v2_flash", _TINY, _WINDOWS, {"head_dim": 24, "v_head_dim": 16,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    _case("minicpm3", _TINY, _LATENT, {"dim_model_base": 32, "rope_parameters": {
          "rope_type": "longrope", "rope_theta": THETA, "factor": 1.0,
          "long_factor": [2.0] * 8, "short_factor": [2.0] * 8,
          "original_max_position_embeddings": 512}}),
    _case("minimax_m3_vl", {"text_config": _MINIMAX_M3}),
    _case("nemotron", _TINY, _HEADS, _ROPE),
    _case("olmo3", _TINY, {"sliding_window": 6}),
    _case("olmoe", _TINY, _ROPE, {"num_experts": 4, "num_experts_per_tok": 2}),
    _case("phi", _TINY, _ROPE),
    _case("phimoe", _TINY, _ROPE, {"num_local_experts": 4, "num_experts_per_tok": 2,
          "attention_bias": True, "lm_head_bias": True, "sliding_window": 6}),
    _case("recurrent_gemma", _TINY, {"num_hidden_layers": 3, "num_key_value_heads": 1,
          "attention_window_size": 6}),
    _case("seed_oss", _TINY, _HEADS, _ROPE),
    _case("seed_oss", _TINY, _HEADS, _LLAMA3, name="llama3"),
    _case("seed_oss", _TINY, _HEADS, _YARN, name="yarn"),
    _case("solar_open", _TINY, _HEADS, _ROPE, {"n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    _case("stablelm", _TINY, _ROPE),
    # the difference of the two forms of GELU exceeds 1e-4 with the default activation
    _case("starcoder2", _TINY, _ROPE, {"sliding_window": 6, "hidden_act": "gelu"}),
)  # fmt: skip
