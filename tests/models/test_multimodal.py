"""The text part of multimodal checkpoints, in the layouts in which they are published."""

from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np
import pytest

import models
from models.multimodal import get_text_config, get_text_weights, is_multimodal
from tests.models.test_llama import IDS, TINY, drawn, logits

TEXT = {**TINY, "vocab_size": 256}
SEES = {"vision_config": {"hidden_size": 8}}


def under(text: str, *others: str) -> Callable[[Mapping[str, mx.array]], dict[str, mx.array]]:
    """The layout in which the text's `model.` is called `text` and the head is left outside."""

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
def test_the_text_part_is_the_model_that_it_would_be_alone(
    layout: Callable[[Mapping[str, mx.array]], dict[str, mx.array]], kind: str
) -> None:
    alone = {**TEXT, "model_type": kind}
    weights = drawn(alone)
    whole = {"model_type": "sees_and_speaks", "text_config": alone, **SEES}
    np.testing.assert_array_equal(
        logits(models.build(whole, layout(weights)), IDS),
        logits(models.build(alone, weights), IDS),
    )


def test_what_the_whole_says_holds_where_the_part_is_silent() -> None:
    whole = {"model_type": "a", "vocab_size": 5, "text_config": {"model_type": "b"}, **SEES}
    assert get_text_config(whole) == {"model_type": "b", "vocab_size": 5}


def test_keys_of_the_text_may_stand_beside_those_of_the_picture() -> None:
    flat = {**TEXT, **SEES}
    assert is_multimodal(flat)
    assert get_text_config(flat) == flat
    assert not is_multimodal(TEXT)


@pytest.mark.parametrize(("whole", "part"), [(True, False), (False, True)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_tensors_tell_of_a_head_about_which_whole_and_part_disagree(
    whole: bool, part: bool, tied: bool
) -> None:
    """transformers keeps the head beside the text and writes `tie_word_embeddings` for both, its
    Mistral 3 true for the whole and false for the part."""
    weights = drawn({**TEXT, "tie_word_embeddings": tied})
    config = {
        "model_type": "mistral3",
        "tie_word_embeddings": whole,
        "text_config": {**TEXT, "model_type": "mistral", "tie_word_embeddings": part},
        **SEES,
    }
    np.testing.assert_array_equal(
        logits(models.build(config, weights), IDS),
        logits(models.build({**TEXT, "tie_word_embeddings": tied}, weights), IDS),
    )


def test_nothing_but_the_text_is_kept() -> None:
    names = ("visual.x", "model.visual.x", "draft.norm.weight", "model.norm.weight")
    weights = {name: mx.zeros((1,)) for name in names}
    assert get_text_weights(weights).keys() == {"model.norm.weight"}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": False}])
def test_a_trunk_that_was_saved_alone_is_a_model_with_a_tied_head(
    kind: str, said: dict[str, bool]
) -> None:
    """Models for vectors are published so, and not all say that there is no head."""
    config = {**TEXT, "model_type": kind, "tie_word_embeddings": True}
    weights = {name: array for name, array in drawn(config).items() if "lm_head" not in name}
    trunk = {name.removeprefix("model."): array for name, array in weights.items()}
    bare = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    np.testing.assert_array_equal(
        logits(models.build({**bare, **said}, trunk), IDS),
        logits(models.build(config, weights), IDS),
    )
