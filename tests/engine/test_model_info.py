"""The config of a model before it is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.engine.model_info import complete_config
from tests import tiny, tiny_vision
from tests.models import encoder_reference


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> ModelFiles:
    return store.resolve(str(tiny_model))


def complete_with(files: ModelFiles, **config: Any) -> ModelFiles:
    return complete_config(replace(files, config=config))


def test_a_complete_config_is_not_changed(files: ModelFiles) -> None:
    assert complete_config(files) == replace(files, max_positions=files.context_length)


def test_the_builtin_model_has_what_its_architecture_would_add() -> None:
    builtin = store.find(None)
    assert complete_config(replace(builtin, max_positions=None)) == builtin
    assert complete_config(builtin) is builtin


def test_a_roberta_has_fewer_positions_than_rows(files: ModelFiles) -> None:
    """The number of rows stays in the config, so that the model can be built from it. Otherwise,
    no model of this architecture could be served."""
    config = json.loads(encoder_reference.FILE.read_text())["xlm-roberta"]["config"]
    found = complete_with(files, **config)
    assert (found.context_length, found.config["max_position_embeddings"]) == (62, 64)
    assert complete_config(found) == found


def test_defaults_of_the_architecture_are_filled_in(files: ModelFiles) -> None:
    config = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2}
    more = {"intermediate_size": 128, "num_attention_heads": 4}
    found = complete_with(files, **config, **more)
    assert (found.context_length, found.vocab_size) == (131_072, 262_208)
    assert found.sampleable_vocab_size == tiny.VOCAB


def test_the_text_config_of_a_multimodal_model_is_used(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = complete_with(
        files, model_type="whole", eos_token_id=1, vision_config={}, text_config=dict(tiny.CONFIG)
    )
    assert found.context_length == 4096
    assert "loading the text model only" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": None}, "config.json has no model_type"),
        ({"model_type": 3}, "config.json has no model_type"),
        ({"max_position_embeddings": None}, "config.json lacks max_position_embeddings"),
        ({"vocab_size": None}, "config.json lacks vocab_size"),
        ({"vocab_size": 0}, "config.json: vocab_size is 0, but must be between 1 and "),
        ({"vocab_size": "258"}, "config.json: vocab_size is '258', but must be an integer"),
        (
            {"max_position_embeddings": -1},
            "max_position_embeddings is -1, but must be between 1 and ",
        ),
    ],
)
def test_an_invalid_config_is_an_error(
    files: ModelFiles, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(AppError) as caught:
        complete_with(files, **{**tiny.CONFIG, **change})
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert caught.value.message.startswith(f"{files.path}: ")
    assert words in caught.value.message


def test_the_config_of_a_model_with_a_tower_keeps_its_vision_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    whole = store.resolve(str(tiny_vision.write(tmp_path / "vision")))
    found = complete_config(whole)
    assert found.config["model_type"] == "qwen3_vl"
    assert found.config["vision_config"] == whole.config["vision_config"]
    assert (found.context_length, found.vocab_size) == (1 << 15, tiny.VOCAB + 3)
    assert found.config["num_attention_heads"] == 2, "of the text model"
    assert complete_config(found) == found
    assert "text model only" not in caplog.text
