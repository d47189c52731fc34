"""The tower of a checkpoint: its names and layouts, quantized layers, and errors."""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from models.vision.tower import VisionTower
from tests.models import parity
from tests.models.test_llama import draw_weights as draw_text
from tests.models.vision.reference import CASES
from tests.models.vision.test_towers import (
    REFERENCE,
    all_close,
    arrays,
    draw_weights,
    same_bits,
    tiles,
)
from tests.rows import rows

pytestmark = pytest.mark.recorded

QWEN = "qwen3_vl"
TEXT: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def build(name: str, vision_weights: Mapping[str, mx.array], **options: Any) -> Any:
    """A model with a tower and a small text model."""
    config = {**REFERENCE[name]["config"], "text_config": TEXT, "tie_word_embeddings": True}
    text = {
        f"model.language_{key}": array
        for key, array in draw_text(TEXT).items()
        if key != "lm_head.weight"
    }
    return architectures.build(config, {**text, **vision_weights}, **options)


def get_tower(name: str, weights: Mapping[str, mx.array], **options: Any) -> VisionTower:
    found = architectures.get_tower(build(name, weights, **options))
    assert isinstance(found, VisionTower)
    return found


def to_channels_last(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The layout of convolutions in MLX's checkpoints."""
    return {
        name: mx.moveaxis(array, 1, -1) if array.ndim > 3 else array
        for name, array in weights.items()
    }


# a case, a prefix in its names, and an alternative in other checkpoints
NAMES = [
    (QWEN, "model.visual.", "visual."),
    (QWEN, "model.visual.", "vision_tower."),
    ("qwen3_5", "model.visual.", "vision_tower."),
    ("gemma3", "vision_tower.", "vision_tower.vision_model."),
    ("gemma3", "vision_tower.", "model.vision_tower."),
    ("gemma4", "model.", ""),
    ("gemma4_unified", "model.", ""),
    ("mistral3", "vision_tower.", "vision_tower.vision_model."),
    ("mistral3", "multi_modal_projector.", "model.multi_modal_projector."),
    ("qwen2_vl", "visual.", "model.visual."),
    ("qwen2_vl", "visual.", "vision_tower."),
    ("qwen2_5_vl", "visual.", "model.visual."),
    ("qwen2_5_vl", "visual.", "vision_tower."),
    ("smolvlm", "model.", ""),
    ("lfm2_vl", "model.vision_tower.", "vision_tower.vision_model."),
    ("pixtral", "vision_tower.", "vision_tower.vision_model."),
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("name", "old", "new"), NAMES)
def test_all_published_names_and_layouts_are_accepted(
    name: str, old: str, new: str, channels_last: bool
):
    weights = draw_weights(name)
    image = tiles(CASES[name].images[0])
    expected = get_tower(name, weights).encode(image)
    renamed = {key.replace(old, new, 1): array for key, array in weights.items()}
    assert renamed.keys() != weights.keys()
    if channels_last:
        renamed = to_channels_last(renamed)
    assert same_bits(get_tower(name, renamed).encode(image), expected)


@pytest.mark.parametrize("name", CASES)
def test_a_model_has_its_tower_unless_vision_is_off(name: str):
    weights = draw_weights(name)
    assert build(name, weights, vision=False).vision is None
    assert build(name, {}).vision is None
    assert get_tower(name, weights).count_rows(CASES[name].images[0])


def test_a_text_model_and_an_unknown_family_have_no_tower():
    def has_tower(config: dict[str, Any], weights: dict[str, mx.array]) -> bool:
        return architectures.get_tower(architectures.build(config, weights)) is not None

    assert not has_tower(TEXT, draw_text(TEXT))
    config = {"model_type": "sees_and_speaks", "text_config": TEXT, "vision_config": {}}
    weights = {**draw_text(TEXT), **draw_weights(QWEN)}
    assert not has_tower(config, weights)
    assert not has_tower({**config, "model_type": QWEN, "vision_config": None}, weights)


@pytest.mark.parametrize("name", CASES)
def test_a_missing_or_wrongly_shaped_tensor_is_named(name: str):
    weights = draw_weights(name)
    # blocks are alike, and SigLIP's pooling head is not used
    used = [tensor for tensor in weights if not re.search(r"\.[1-9]\.|\.head\.", tensor)]
    for tensor in used:
        less = {key: array for key, array in weights.items() if key != tensor}
        with pytest.raises(ModelError, match="the vision tower: the checkpoint lacks tensors: "):
            build(name, less)
    for tensor in used:
        wrong = {**weights, tensor: mx.zeros((7, 7, 7))}
        with pytest.raises(ModelError, match=r"wrongly shaped tensors: .*\[7, 7, 7\]"):
            build(name, wrong)


@pytest.mark.parametrize("name", CASES)
def test_an_unknown_tensor_is_named(name: str):
    weights = draw_weights(name)
    first = next(iter(weights)).rpartition(".")[0]
    with pytest.raises(ModelError, match=r"unexpected tensors: .*surplus"):
        build(name, {**weights, f"{first}.surplus": mx.zeros((3,))})


@rows("kind", ["affine-8", "mxfp8"])
@pytest.mark.parametrize("name", CASES)
def test_quantized_layers_are_found_by_their_scales(name: str, kind: str):
    """A tower with some quantized layers gives the same output as with the dequantized weights."""
    settings: Any = parity.KINDS[kind]
    quantized, dequantized = dict[str, mx.array](), dict[str, mx.array]()
    for key, array in draw_weights(name).items():
        if array.ndim != 2 or array.shape[-1] % 32 or not key.endswith(".weight"):
            quantized[key] = dequantized[key] = array
            continue
        parts: Any = mx.quantize(array, **settings)
        stem = key.removesuffix("weight")
        names = (key, f"{stem}scales", f"{stem}biases")
        quantized |= dict(zip(names, parts, strict=False))
        dequantized[key] = mx.dequantize(*parts, **settings, dtype=mx.float32)
    assert quantized.keys() != dequantized.keys()
    image = tiles(CASES[name].images[0])
    found = get_tower(name, quantized).encode(image)
    all_close(arrays(found), arrays(get_tower(name, dequantized).encode(image)))


def test_quantizing_a_model_leaves_its_tower_unchanged():
    weights, image = draw_weights(QWEN), tiles(CASES[QWEN].images[0])
    config = {**TEXT, "hidden_size": 64, "intermediate_size": 64}
    text = {f"model.language_{key}": array for key, array in draw_text(config).items()}
    whole = {**REFERENCE[QWEN]["config"], "text_config": config}
    models: list[Any] = [
        architectures.build(whole, {**text, **weights}, bits=bits) for bits in (None, 4)
    ]
    first, second = (model.vision.encode(image) for model in models)
    assert same_bits(first, second)


def test_the_processor_config_selects_the_values_of_pixels():
    weights, image = draw_weights(QWEN), tiles(CASES[QWEN].images[0])
    default = get_tower(QWEN, weights).encode(image)
    same = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    assert same_bits(get_tower(QWEN, weights, processor=same).encode(image), default)
    other = {**same, "image_mean": [0.4, 0.5, 0.5]}
    assert not same_bits(get_tower(QWEN, weights, processor=other).encode(image), default)
    with pytest.raises(ModelError, match=r"the vision tower: .* image_mean must"):
        build(QWEN, weights, processor={"image_mean": "a"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": "two"}, "depth is 'two', but must be an integer"),
        ({"hidden_act": "swish!"}, "the activation 'swish!' of vision_config is not supported"),
        ({"patch_size": 0}, "not describe a valid vision tower|patch_size"),
        ({"num_heads": 0}, "not describe a valid vision tower|num_heads"),
    ],
)
def test_invalid_config_values_are_named(change: dict[str, Any], message: str):
    config = REFERENCE[QWEN]["config"]
    vision = {**config["vision_config"], **change}
    weights = {**draw_text(TEXT), **draw_weights(QWEN)}
    whole = {**config, "text_config": TEXT, "vision_config": vision}
    with pytest.raises(ModelError, match=message):
        architectures.build(whole, weights)


def test_rows_have_the_width_of_the_text_model():
    found = get_tower(QWEN, draw_weights(QWEN)).encode(tiles([(64, 64)]))
    assert np.array(found.rows).shape == (4, TEXT["hidden_size"])
