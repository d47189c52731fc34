"""Gemma 4: its config keys in all spellings, and the tensors of the text part."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models import architectures, gemma4
from models.base import ModelError, select_last
from models.cpu_layout import apply_cpu_layout
from models.kv import KVCache
from models.quant import quantize_model
from models.rotating_kv import RotatingKVCache
from tests.models import parity
from tests.models.architectures import Case
from tests.models.kernel_switch import BOTH, use_kernels
from tests.models.test_published_formats import W4A16, pack

S, F = "sliding_attention", "full_attention"

ROPES: dict[str, Any] = {
    F: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    S: {"rope_type": "default", "rope_theta": 1e4},
}

# Each shape has the keys of a published config.json, with smaller numbers. mlx-lm's defaults differ
# from transformers', so no key is omitted.
TINY: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": None,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPES,
    "sliding_window": 7,
    "layer_types": [S, S, F, S, S, F],
    "final_logit_softcapping": 30.0,
    "attention_bias": False,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 101,
    "enable_moe_block": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
# E2B: one key head, half of the layers share keys, and these have wider MLPs
E2B = {
    **TINY,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
}
E4B = {**E2B, "num_key_value_heads": 2, "num_kv_shared_layers": 2, "use_double_wide_mlp": False}
DENSE = {**TINY, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
MOE = {
    **DENSE,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
UNIFIED: dict[str, Any] = {
    "model_type": "gemma4_unified",
    "vocab_size": 101,
    "text_config": {
        **DENSE,
        "model_type": "gemma4_unified_text",
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {"model_type": "gemma4_unified_vision", "mm_embed_dim": 8},
}

CASES = [
    Case(name="e2b", config=E2B, quantized=("affine-4", "affine-8", "mxfp4", "mxfp8", "nvfp4")),
    Case(name="e4b", config=E4B),
    Case(name="31b", config=DENSE, quantized=("affine-4", "affine-8")),
    Case(name="26b-a4b", config=MOE, quantized=("affine-4", "affine-8", "mxfp4")),
    Case(
        name="windowless",
        config={**E2B, "final_logit_softcapping": None, "sliding_window": 600},
    ),
    Case(name="12b", config=UNIFIED, quantized=("affine-4", "affine-8")),
]

# the text part of google/gemma-4-E2B-it's config.json, and of google/gemma-4-12B-it's
PUBLISHED_E2B: dict[str, Any] = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": [*[S, S, S, S, F] * 7],
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": 8,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPES,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}
PUBLISHED_12B: dict[str, Any] = {
    "model_type": "gemma4_unified",
    "text_config": {
        "attention_k_eq_v": True,
        "hidden_size": 3840,
        "hidden_size_per_layer_input": 256,  # of no layer
        "layer_types": [*[S, S, S, S, S, F] * 8],
        "model_type": "gemma4_unified_text",
        "num_attention_heads": 16,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
}


def draw_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random tensors with our names."""
    flat: Any = tree_flatten(gemma4.Model(gemma4.Config.from_dict(config)).parameters())
    rng = np.random.default_rng(seed)
    return {
        name: mx.array(
            (rng.standard_normal(array.shape) * array.shape[-1] ** -0.5).astype("f4")
            + (array.ndim == 1)
        )
        for name, array in flat
    }


def build(config: dict[str, Any], seed: int = 0) -> Any:
    return architectures.build(config, draw_weights(config, seed))


def logits(config: dict[str, Any], weights: dict[str, mx.array]) -> np.ndarray:
    prompt = np.random.default_rng(1).integers(0, 101, 23).tolist()
    return parity.prefill(architectures.build(config, dict(weights)), prompt, [23])


def read(config: dict[str, Any]) -> gemma4.Config:
    return gemma4.Config.from_dict(architectures.get_text_config(config))


def test_a_published_config_of_a_small_model_is_read() -> None:
    config = read(PUBLISHED_E2B)
    owned, kinds = config.num_owning_layers, [config.layer_type(layer) for layer in range(35)]
    assert (owned, kinds[13], kinds[14]) == (15, S, F)
    assert {config.source_layer(layer) for layer in range(owned, 35)} == {13, 14}
    assert all(kinds[config.source_layer(layer)] == kinds[layer] for layer in range(35))
    assert [config.layer_head_dim(layer) for layer in (0, 4, 34)] == [256, 512, 512]
    assert [config.layer_mlp_width(layer) for layer in (14, 15)] == [6144, 12288]
    assert config.layer_kv_heads(4) == 1
    assert config.window(0) == 512
    assert config.window(34) is None


def test_a_published_config_of_the_unified_model_is_completed() -> None:
    config = read(PUBLISHED_12B)
    assert [config.layer_kv_heads(layer) for layer in (0, 5)] == [8, 1]
    assert [config.layer_head_dim(layer) for layer in (0, 5)] == [256, 512]
    assert [config.values_are_keys(layer) for layer in (0, 5)] == [False, True]
    assert (config.window(0), config.hidden_size_per_layer_input) == (1024, 0)
    assert architectures.read_info(PUBLISHED_12B) == architectures.ModelInfo(
        context_length=262144, vocab_size=262144
    )


def test_layers_that_share_keys_have_no_cache() -> None:
    assert [type(kv) for kv in build(E2B).make_kv()] == [RotatingKVCache, RotatingKVCache, KVCache]
    sizes = [kv.head_dim for kv in (layer.self_attn for layer in build(E2B).model.layers)]
    assert sizes == [32, 32, 64, 32, 32, 64]


@pytest.mark.parametrize("padded", [False, True])
def test_per_layer_config_is_another_spelling_of_the_global_heads(padded: bool) -> None:
    """Of transformers since version 5, which pads the numbers of layers with zeros."""
    weights = draw_weights(DENSE)
    older = ("global_head_dim", "num_global_key_value_heads")
    newer = {key: value for key, value in DENSE.items() if key not in older}
    newer["per_layer_config"] = {
        f"{layer:02}" if padded else str(layer): {"head_dim": 64, "num_key_value_heads": 1}
        for layer in (2, 5)
    }
    np.testing.assert_array_equal(logits(newer, weights), logits(DENSE, weights))


def test_an_empty_per_layer_config_means_equal_layers() -> None:
    """It replaces the keys of the older spelling."""
    config = read({**DENSE, "per_layer_config": {}})
    assert {config.layer_head_dim(layer) for layer in range(6)} == {32}
    assert {config.layer_kv_heads(layer) for layer in range(6)} == {2}


def test_a_null_global_head_dim_means_head_dim() -> None:
    config = read({**TINY, "global_head_dim": None})
    assert {config.layer_head_dim(layer) for layer in range(6)} == {32}


def test_the_rope_of_a_config_without_one_has_the_defaults() -> None:
    weights = draw_weights(TINY)
    bare = {key: value for key, value in TINY.items() if key != "rope_parameters"}
    np.testing.assert_array_equal(logits(bare, weights), logits(TINY, weights))


def test_layer_types_are_optional_and_end_with_full_attention() -> None:
    bare = {**TINY, "layer_types": None, "num_hidden_layers": 8}
    assert [read(bare).layer_type(layer) for layer in range(8)] == [S, S, S, S, S, F, S, F]
    assert read({**bare, "sliding_window_pattern": 2}).layer_type(1) == F


PREFIXES = ("language_model.model.", "model.language_model.", "model.")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("config", [MOE, E2B], ids=["moe", "e2b"])
def test_the_text_part_of_a_multimodal_checkpoint_is_found(
    config: dict[str, Any], prefix: str
) -> None:
    """In the layouts of mlx-lm and mlx-vlm, of transformers, and of a text model."""
    weights = draw_weights(config)
    checkpoint = {name.replace("model.", prefix, 1): array for name, array in weights.items()}
    for other in ("vision_tower.x", "embed_vision.x", "vision_embedder.x", "audio_tower.x"):
        checkpoint[f"{other}.weight"] = mx.zeros((2, 2))
        checkpoint[f"model.{other}.input_max"] = mx.zeros((2,))
    np.testing.assert_array_equal(logits(config, checkpoint), logits(config, weights))


def test_experts_are_found_in_both_layouts() -> None:
    weights = draw_weights(MOE)
    ours = "model.layers.{}.experts.{}.weight"
    fused, renamed = dict(weights), dict(weights)
    for layer in range(6):
        gate, up, down = (
            ours.format(layer, name) for name in ("gate_proj", "up_proj", "down_proj")
        )
        path = f"model.layers.{layer}.experts"
        fused[f"{path}.gate_up_proj"] = mx.concatenate([fused.pop(gate), fused.pop(up)], axis=1)
        fused[f"{path}.down_proj"] = fused.pop(down)
        for name in (gate, up, down):
            renamed[name.replace("experts.", "experts.switch_glu.")] = renamed.pop(name)
    for checkpoint in (fused, renamed):
        np.testing.assert_array_equal(logits(MOE, checkpoint), logits(MOE, weights))


def test_keys_and_values_of_layers_that_share_them_are_dropped() -> None:
    """Published checkpoints contain them, also quantized."""
    weights = draw_weights(E2B)
    checkpoint = dict(weights)
    for name in ("k_proj.weight", "v_proj.weight", "k_proj.scales", "k_norm.weight"):
        checkpoint[f"model.layers.4.self_attn.{name}"] = mx.zeros((2, 2))
    np.testing.assert_array_equal(logits(E2B, checkpoint), logits(E2B, weights))


def test_weights_trained_for_quantization_are_read_as_published() -> None:
    """Google publishes them in the format of compressed-tensors, with unquantized embeddings."""
    plain, published = dict[str, mx.array](), dict[str, mx.array]()
    for name, array in draw_weights(E2B).items():
        path = name.replace("model.", "model.language_model.", 1).removesuffix(".weight")
        if "_proj" not in name or ".layers." not in name:
            plain[name] = published[name.replace("model.", "model.language_model.", 1)] = array
            continue
        packed = pack("w4a16", *array.shape, seed=len(plain))
        plain[name] = mx.array(packed.weight).astype(mx.float32)
        published |= {f"{path}.{part}": tensor for part, tensor in packed.tensors.items()}
    quantization = {**W4A16, "ignore": ["lm_head", "re:.*vision.*", "re:.*audio.*"]}
    found = logits({**E2B, "quantization_config": quantization}, published)
    np.testing.assert_allclose(found, logits(E2B, plain), atol=1e-4)


def test_routers_are_not_quantized() -> None:
    model = build({**MOE, "hidden_size": 128})
    quantize_model(model, 4)
    assert hasattr(model.model.layers[0].mlp.gate_proj, "scales")
    assert not hasattr(model.model.layers[0].router.proj, "scales")


@pytest.mark.parametrize("enabled", BOTH)
def test_of_a_prompt_the_sharing_layers_compute_the_selected_position(enabled: bool) -> None:
    lengths: list[int] = []

    class Counting(gemma4.Block):
        def __call__(self, x: mx.array, *rest: Any) -> mx.array:
            lengths.append(x.shape[1])
            return super().__call__(x, *rest)

    with use_kernels(enabled=enabled):
        model = build(E2B)
        apply_cpu_layout(model)
        prompt, whole, last = mx.array([parity.ids(CASES[0], 23)]), model.make_kv(), model.make_kv()
        expected = np.array(model(prompt, whole)[:, -1:])
        for layer in model.model.layers:
            layer.__class__ = Counting
        found = np.array(model(prompt[:, :20], last, select_last))
        found = np.array(model(prompt[:, 20:], last, select_last))
    assert lengths == [20, 20, 20, 1, 1, 1, 3, 3, 3, 1, 1, 1]
    if enabled:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_rotated_keys_can_be_moved() -> None:
    block = build(TINY).model.layers[2]
    x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 5, 64)).astype("f4"))
    moved = block.rerotate(block.self_attn.rope(x, 9), -4)
    np.testing.assert_allclose(np.array(moved), np.array(block.self_attn.rope(x, 5)), atol=1e-5)


def test_a_context_shift_needs_layers_without_windows() -> None:
    windowless = {**E2B, "sliding_window": 600}
    for config, shifts in ((windowless, True), (E2B, False)):
        model = build(config)
        kv = model.make_kv()
        mx.eval(model(mx.array([list(range(20))]), kv))
        assert model.shift(kv, 4, 9) is shifts
        assert {layer.offset for layer in kv} == {15 if shifts else 20}
        mx.eval(model(mx.array([[1]]), kv))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "'all' is not supported, because such a model"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is not supported"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters lacks sliding_attention"),
        (
            {"rope_parameters": {**ROPES, F: {"partial_rotary_factor": 0.25}}},
            "partial_rotary_factor 0.25 for full_attention, which is supported with rope_type",
        ),
        (
            {"rope_parameters": {**ROPES, F: {**ROPES[F], "partial_rotary_factor": 2}}},
            "'proportional' is invalid: partial_rotary_factor is 2",
        ),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6, but must be between 0 and 5"),
        ({"num_kv_shared_layers": 4}, "no earlier layer has keys for layer 2 of type full"),
        ({"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 9}, "at least vocab_"),
        ({"hidden_activation": "tanh"}, "hidden_activation 'tanh' is not supported"),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "3 key heads, which do not"),
        ({"enable_moe_block": True}, "top_k_experts is 0, but must be between 1 and 0"),
        ({"per_layer_config": {"9": {}}}, "per_layer_config has no layer '9'"),
        ({"per_layer_config": {"1": {"skip": ["mlp"]}}}, "changes 'skip' of layer 1"),
        ({"per_layer_config": {"1": {"head_dim": 10**9}}}, "head_dim is 1000000000, but must be"),
        ({"per_layer_config": {"1": 3}}, "per_layer_config is .*, but must be an object"),
        (
            {"num_kv_shared_layers": 1, "per_layer_config": {"5": {"head_dim": 64}}},
            "layer 5 uses the keys of layer 2, but has a different head_dim: 64 and 32",
        ),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**TINY, **change}, {})
