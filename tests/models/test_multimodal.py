"""The text part of multimodal checkpoints, in the published layouts."""

from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from models.checkpoint_config import get_text_config, is_multimodal
from models.multimodal import get_text_weights
from tests.models.test_llama import IDS, TINY, draw_weights, logits

TEXT = {**TINY, "vocab_size": 256}
SEES = {"vision_config": {"hidden_size": 8}}


def under(text: str, *others: str) -> Callable[[Mapping[str, mx.array]], dict[str, mx.array]]:
    """A layout with `text` for the prefix `model.`; the head keeps its name."""

    def lay_out(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        named = {name.replace("model.", text, 1): array for name, array in weights.items()}
        return {**named, **{f"{other}.weight": mx.zeros((3,)) for other in others}}

    return lay_out


def language_model(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    others = {"vision_tower.x", "multi_modal_projector.linear_1.weight", "image_newline"}
    named = {f"language_model.{name}": array for name, array in weights.items()}
    return {**named, **{name: mx.zeros((3,)) for name in others}}


LAYOUTS = {
    "llava, mistral3, as first published": language_model,
    "mistral3, as transformers writes it now": under(
        "model.language_model.", "model.vision_tower.x", "model.multi_modal_projector.x"
    ),
    "qwen2_vl, as first published": under("model.", "visual.blocks.0.x"),
    "smolvlm, idefics3": under("model.text_model.", "model.vision_model.x", "model.connector.x"),
}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_text_part_equals_the_model_alone(
    layout: Callable[[Mapping[str, mx.array]], dict[str, mx.array]], kind: str
) -> None:
    alone = {**TEXT, "model_type": kind}
    weights = draw_weights(alone)
    config = {"model_type": "sees_and_speaks", "text_config": alone, **SEES}
    np.testing.assert_array_equal(
        logits(architectures.build(config, layout(weights)), IDS),
        logits(architectures.build(alone, weights), IDS),
    )


def test_outer_keys_are_defaults_of_the_text_config() -> None:
    config = {"model_type": "a", "vocab_size": 5, "text_config": {"model_type": "b"}, **SEES}
    assert get_text_config(config) == {"model_type": "b", "vocab_size": 5}


def test_text_keys_can_be_on_the_top_level() -> None:
    flat = {**TEXT, **SEES}
    assert is_multimodal(flat)
    assert get_text_config(flat) == flat
    assert not is_multimodal(TEXT)


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_tensors_decide_if_the_configs_disagree_about_a_tied_head(
    outer: bool, inner: bool, tied: bool
) -> None:
    """transformers saves the head outside the text part and writes `tie_word_embeddings` in both
    configs; for Mistral 3, true in the outer and false in the inner one."""
    weights = draw_weights({**TEXT, "tie_word_embeddings": tied})
    config = {
        "model_type": "mistral3",
        "tie_word_embeddings": outer,
        "text_config": {**TEXT, "model_type": "mistral", "tie_word_embeddings": inner},
        **SEES,
    }
    np.testing.assert_array_equal(
        logits(architectures.build(config, weights), IDS),
        logits(architectures.build({**TEXT, "tie_word_embeddings": tied}, weights), IDS),
    )


def test_only_tensors_of_the_text_part_are_loaded() -> None:
    names = ("visual.x", "model.visual.x", "draft.norm.weight", "model.norm.weight")
    weights = {name: mx.zeros((1,)) for name in names}
    assert get_text_weights(weights).keys() == {"model.norm.weight"}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("keys", [{}, {"tie_word_embeddings": False}])
def test_a_checkpoint_without_head_and_prefix_is_a_model_with_a_tied_head(
    kind: str, keys: dict[str, bool]
) -> None:
    """Embedding models are published like this, and not all configs say that there is no head."""
    config = {**TEXT, "model_type": kind, "tie_word_embeddings": True}
    weights = {name: array for name, array in draw_weights(config).items() if "lm_head" not in name}
    trunk = {name.removeprefix("model."): array for name, array in weights.items()}
    bare = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    np.testing.assert_array_equal(
        logits(architectures.build({**bare, **keys}, trunk), IDS),
        logits(architectures.build(config, weights), IDS),
    )


def test_modules_that_the_text_model_lacks_are_dropped() -> None:
    """Whatever their names are."""
    weights = draw_weights(TEXT)
    config = {"model_type": "sees_and_speaks", "text_config": TEXT, **SEES}
    others = {"patch_merge_mlp.linear_1.weight", "model.vit_merger.x", "language_model.new.a.b"}
    given = {**weights, **{name: mx.zeros((3,)) for name in others}}
    np.testing.assert_array_equal(
        logits(architectures.build(config, given), IDS),
        logits(architectures.build(TEXT, weights), IDS),
    )
    with pytest.raises(ModelError, match="unexpected tensors: new"):
        architectures.build(TEXT, {**weights, "new.weight": mx.zeros((3,))})


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.new_proj.weight", "model.norm.bias", "lm_head.bias"]
)
def test_an_unknown_tensor_in_a_part_of_the_text_model_is_an_error(name: str) -> None:
    config = {"model_type": "sees_and_speaks", "text_config": TEXT, **SEES}
    with pytest.raises(ModelError, match=f"unexpected tensors: {name}"):
        architectures.build(config, {**draw_weights(TEXT), name: mx.zeros((3,))})


def test_a_missing_tensor_of_a_multimodal_checkpoint_is_an_error() -> None:
    weights = draw_weights(TEXT)
    del weights["model.layers.1.mlp.up_proj.weight"]
    config = {"model_type": "sees_and_speaks", "text_config": TEXT, **SEES}
    with pytest.raises(ModelError, match=r"lacks tensors: model.layers.1.mlp.up_proj.weight"):
        architectures.build(config, weights)
