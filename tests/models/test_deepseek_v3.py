"""DeepSeek V3 and Kimi K2: both forms of attention, and the published layouts."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from models import architectures, deepseek_v3
from models.base import ModelError
from models.experts import GroupedTopKMoE
from models.mla import LatentCache
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import TINY
from tests.models.test_published_formats import FORMATS, pack
from tests.models.test_qwen3_moe import fuse_experts, read_weights, split_experts

PLAIN, ROTARY, VALUES, LATENT = 32, 16, 32, 64

# a prefill of 23 queries expands the latents; single queries, and few after many positions, use the
# absorbed form
CONFIG = {
    **TINY,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": VALUES,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}

CASES = [
    Case(
        name="plain", config=CONFIG, quantized=("affine-4", "affine-8", "mxfp4", "mxfp8", "nvfp4")
    ),
    Case(
        name="long",
        config={
            **CONFIG,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "rope_scaling": YARN,
        },
        quantized=("affine-6",),
    ),
    Case(
        name="of-kimi-k2.5",
        config={
            "model_type": "kimi_k25",
            "text_config": {**CONFIG, "model_type": "kimi_k2", "rope_scaling": YARN},
            "vision_config": {"model_type": "kimi_k25_vision"},
            "tie_word_embeddings": False,
        },
    ),
]

IDS = [5, 50, 17, 17, 99, 3, 80, 42, 7]


def fuse_kv_b(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Join the two maps from latents as in the published layout."""
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        if "embed_q.weight" in name:
            values = weights[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([array.swapaxes(1, 2), values], axis=1).flatten(0, 1)
            found[name.replace("embed_q", "kv_b_proj")] = both
        elif "unembed_out" not in name:
            found[name] = array
    return found


@pytest.mark.parametrize("layout", [split_experts, fuse_experts])
def test_published_layouts_give_the_same_model(layout: Any, tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    weights = fuse_kv_b(layout(read_weights(tmp_path)))
    # the multi-token prediction layer, which only published checkpoints have
    weights["model.layers.3.eh_proj.weight"] = mx.zeros((64, 128))
    weights["model.layers.3.mlp.experts.0.up_proj.weight"] = mx.zeros((32, 64))
    theirs = architectures.build(CONFIG, weights)
    np.testing.assert_array_equal(
        parity.prefill(theirs, IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


@pytest.mark.parametrize(("others", "bits"), [(4, 4), (8, 8), (4, 8)])
def test_an_early_conversion_is_read_like_in_the_reference(
    others: int, bits: int, tmp_path: Path
) -> None:
    check_early_conversion(CASES[0], others, bits, tmp_path)


def check_early_conversion(case: Case, others: int, bits: int, folder: Path) -> None:
    """Early conversions quantized the joined map from latents, some with different bits. The
    reference splits it and quantizes both halves again; we take the rows of the values unchanged,
    so the test copies these rows to the reference."""
    parity.save_reference(case, folder, kind=f"affine-{others}")
    weights = read_weights(folder)
    for name in [name for name in weights if "embed_q" in name or "unembed_out" in name]:
        del weights[name]
    rng = np.random.default_rng(5)
    rows: list[dict[str, mx.array]] = [{}, {}, {}]
    for layer in range(3):
        path = f"model.layers.{layer}.self_attn.kv_b_proj"
        plain = rng.standard_normal((4 * (PLAIN + VALUES), LATENT)).astype(np.float32) / 8
        parts = mx.quantize(mx.array(plain), group_size=32, bits=bits)
        for kind, array in zip(("weight", "scales", "biases"), parts, strict=True):
            weights[f"{path}.{kind}"] = array
            rows[layer][kind] = array.reshape(4, PLAIN + VALUES, -1)[:, PLAIN:]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    reference: Any = load_model(folder)[0]
    for layer, own in zip(reference.model.layers, rows, strict=True):
        layer.self_attn.unembed_out.update(own)
    np.testing.assert_allclose(
        parity.prefill(parity.load_model(folder), IDS, [9]),
        parity.prefill_reference(reference, IDS),
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("case", "packing"),
    [
        ("w4a16", "4-bit affine"),  # Kimi K2
        ("fp8 blocks", "bfloat16"),  # DeepSeek V3
        ("nvfp4 of ModelOpt", "nvfp4"),
    ],
)
def test_published_formats_of_single_experts_and_latent_projections_are_read(
    case: str, packing: str, tmp_path: Path
) -> None:
    parity.save_reference(CASES[0], tmp_path)
    plain: dict[str, mx.array] = {}
    published: dict[str, mx.array] = {}
    for name, array in fuse_kv_b(split_experts(read_weights(tmp_path))).items():
        if (".mlp." not in name and ".kv_b_proj." not in name) or "gate." in name:
            plain[name] = published[name] = array
            continue
        path = name.removesuffix(".weight")
        packed = pack(case, *array.shape, seed=len(plain))
        widens = packing == "bfloat16" or path.endswith("kv_b_proj")
        plain[name] = mx.array(packed.weight).astype(mx.bfloat16 if widens else mx.float32)
        published |= {f"{path}.{part}": tensor for part, tensor in packed.tensors.items()}
    config = {**CONFIG, "quantization_config": FORMATS[case][0]}
    ours: Any = architectures.build(config, published)
    layer = ours.model.layers[1]
    assert ("scales" in layer.mlp.switch_mlp.up_proj) is (packing != "bfloat16")
    assert "scales" not in layer.self_attn.embed_q
    np.testing.assert_allclose(
        parity.prefill(ours, IDS, [9]),
        parity.prefill(architectures.build(CONFIG, plain), IDS, [9]),
        atol=1e-4,
    )


@pytest.mark.parametrize("kind", [None, "affine-4", "mxfp4"])
@pytest.mark.parametrize(("before", "length"), [(0, 12), (9, 2), (9, 12), (40, 5)])
def test_both_forms_of_attention_agree(
    before: int, length: int, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parity.save_reference(CASES[0], tmp_path, kind=kind)
    model = parity.load_model(tmp_path)
    prompt = parity.ids(CASES[0], before + length)
    chunks = [before, length] if before else [length]
    logits = []
    for expands in (True, False):
        monkeypatch.setattr(
            deepseek_v3.Attention, "_prefers_expanded", lambda *_, expands=expands: expands
        )
        logits.append(parity.prefill(model, prompt, chunks))
    np.testing.assert_allclose(*logits, atol=1e-4)


def test_attention_expands_for_long_chunks_and_absorbs_for_few_queries() -> None:
    """With the sizes of the published model, both forms cost the same at about 400 queries."""
    sizes = {
        "num_attention_heads": 20,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    }
    attention = deepseek_v3.Attention(deepseek_v3.Config.from_dict({**CONFIG, **sizes}))
    assert attention._prefers_expanded(2, 0)
    assert attention._prefers_expanded(512, 100_000)
    assert not attention._prefers_expanded(256, 100_000)
    assert not attention._prefers_expanded(1, 0)
    assert not attention._prefers_expanded(1, mx.array([3, 9]))


def test_the_cache_has_one_latent_and_one_rotary_key_per_position(tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    model = parity.load_model(tmp_path)
    kv = model.make_kv()
    mx.eval(model(mx.array([IDS]), kv))
    for layer in kv:
        assert isinstance(layer, LatentCache)
        assert layer.copy().nbytes == len(IDS) * (LATENT + ROTARY) * 4


def test_positions_can_be_removed_from_the_middle(tmp_path: Path) -> None:
    """The model has one layer, so the cache of a position depends only on its id and position."""
    parity.save_reference(Case(name="shallow", config={**CONFIG, "num_hidden_layers": 1}), tmp_path)
    model = parity.load_model(tmp_path)
    kv, remaining = model.make_kv(), IDS[:2] + IDS[5:]
    mx.eval(model(mx.array([IDS]), kv))
    assert model.shift(kv, 2, 5)
    assert kv[0].offset == len(remaining)
    shifted = model.logits(model(mx.array([[1]]), kv))
    fresh = model.logits(model(mx.array([[*remaining, 1]]), model.make_kv()))
    np.testing.assert_allclose(np.array(shifted[:, -1]), np.array(fresh[:, -1]), atol=1e-4)


def test_rotation_can_pair_the_halves_of_a_head(tmp_path: Path) -> None:
    """rope_interleave: false gives the same model if its rotary rows are reordered."""
    parity.save_reference(CASES[0], tmp_path)
    weights = read_weights(tmp_path)
    order = [*range(0, ROTARY, 2), *range(1, ROTARY, 2)]
    of_keys = [*range(LATENT), *(LATENT + row for row in order)]
    of_head = [*range(PLAIN), *(PLAIN + row for row in order)]
    of_queries = [head * (PLAIN + ROTARY) + row for head in range(4) for row in of_head]
    for name, array in weights.items():
        if "kv_a_proj_with_mqa" in name:
            weights[name] = array[mx.array(of_keys)]
        elif "q_b_proj" in name:
            weights[name] = array[mx.array(of_queries)]
    other = architectures.build({**CONFIG, "rope_interleave": False}, weights)
    np.testing.assert_allclose(
        parity.prefill(other, IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
        atol=1e-4,
    )


def test_mlp_layer_types_set_the_kind_of_each_layer() -> None:
    types = ["dense", "sparse", "dense"]
    model = deepseek_v3.Model(deepseek_v3.Config.from_dict({**CONFIG, "mlp_layer_types": types}))
    found: list[Any] = model.model.layers
    assert [isinstance(layer.mlp, GroupedTopKMoE) for layer in found] == [False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
        ({"n_group": 3}, "n_group 3 and topk_group 1 are not valid for 8 experts"),
        ({"n_group": 0}, "n_group 0 and topk_group 1 are not valid for 8 experts"),
        ({"n_group": 4, "topk_group": 5}, "n_group 4 and topk_group 5 are not valid for 8 experts"),
        ({"n_group": 4, "topk_group": 1}, "num_experts_per_tok is 3, but must be between 1 and 2"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must have one entry per layer"),
        ({"mlp_layer_types": ["dense", "odd", "dense"]}, "an MLP of type 'odd'"),
    ],
)
def test_unsupported_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**CONFIG, **change}, {})
