"""A model in Ollama's store whose only file contains its vision tower processes images as the same
model in a folder does."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jinja2
import mlx.core as mx
import numpy as np
import pytest

from app import store
from app.core.models import ModelRecipe
from app.engine.weights import open_model
from app.serving.model_describer import read_model_traits
from app.store.gguf.templates import find_template
from app.store.installed import derive_model
from models import architectures
from tests.models.gguf.ollama_converter import Weights, write_tower
from tests.store.gguf.test_projector import (
    FAMILIES,
    compute_logits,
    convert,
    has_vision,
    plan_image,
    write_folder,
)
from tests.store.ollama_store import OllamaStore
from tests.store.test_ollama import complete_config

TOWERS = ("gemma3", "gemma4", "qwen2_5_vl", "qwen3_5", "qwen3_vl")


def install(
    name: str,
    folder: Path,
    tmp_path: Path,
    change: Callable[[Weights], None] = lambda tensors: None,
) -> OllamaStore:
    """Stores the model of a folder as `tiny`, as Ollama's converter does."""
    config = json.loads((folder / "config.json").read_text())
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    vision = {key: np.array(array) for key, array in loaded.items() if "language_model." not in key}
    whole = write_tower(
        tmp_path / "whole.gguf",
        config,
        vision,
        text=convert(name, folder, tmp_path / "converted"),
        processor=json.loads((folder / "preprocessor_config.json").read_text()),
        change=change,
    )
    ollama = OllamaStore(tmp_path / "ollama")
    ollama.write("tiny", [ollama.layer("model", whole.read_bytes())])
    return ollama


@pytest.mark.parametrize("name", TOWERS)
def test_the_logits_of_a_prompt_with_an_image_are_those_of_the_folder(tmp_path: Path, name: str):
    folder = write_folder(name, tmp_path / "folder")
    install(name, folder, tmp_path)
    [expected_files, files] = (
        complete_config(store.resolve(place)) for place in (str(folder), "tiny")
    )
    plan = plan_image(files, FAMILIES[name].tokens, (100, 80))
    assert plan == plan_image(expected_files, FAMILIES[name].tokens, (100, 80))
    logits, expected = compute_logits(files, plan), compute_logits(expected_files, plan)
    # the decay of a delta net is stored as its exponential
    near = 1e-5 if name == "qwen3_5" else 0
    np.testing.assert_allclose(logits, expected, rtol=0, atol=near)
    assert np.ptp(logits) > 1, "equal logits prove nothing"


@pytest.mark.parametrize(
    ("name", "marks", "expected"),
    [
        ("gemma3", ("<start_of_turn>", "<end_of_turn>"), "user\nsee <start_of_image>,"),
        ("qwen3_vl", ("<|im_start|>", "<|im_end|>"), "user\nsee <|vision_start|><|image_pad|><|v"),
    ],
)
def test_the_template_of_a_family_marks_images(
    tmp_path: Path, name: str, marks: tuple[str, ...], expected: str
):
    tokens = [*marks, *FAMILIES[name].marks]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    template = jinja2.Template(find_template(path))
    parts = [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": ", ok"}]
    rendered = template.render(messages=[{"role": "user", "content": parts}])
    assert expected in rendered
    whole = template.render(messages=[{"role": "user", "content": "see , ok"}])
    mark = rendered.partition("see ")[2].partition(", ok")[0]
    assert rendered.replace(mark, "") == whole


def test_the_tower_is_a_part_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    install("qwen3_vl", write_folder("qwen3_vl", tmp_path / "folder"), tmp_path)
    files = complete_config(store.resolve("tiny"))
    assert files.shards == (files.projector_path,)
    assert has_vision(files)
    assert 0.9 < files.weight_bytes / files.shards[0].stat().st_size < 1
    caplog.set_level(logging.INFO)
    assert architectures.get_tower(open_model(files, None)) is not None
    assert "without its" not in caplog.text
    assert architectures.get_tower(open_model(files, None, vision=False)) is None
    assert "loading the model without its vision tower" in caplog.text
    assert read_model_traits(files).chat


def test_a_model_made_from_it_has_its_tower(tmp_path: Path):
    install("qwen3_vl", write_folder("qwen3_vl", tmp_path / "folder"), tmp_path)
    base = store.resolve("tiny")
    derive_model(base, ModelRecipe(name="derived", base=base.name, system="Be terse."))
    derived = complete_config(store.resolve("derived"))
    assert has_vision(derived)
    assert derived.shards == base.shards


def test_a_tower_with_other_tensors_costs_only_the_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def change(tensors: Weights) -> None:
        tensors["v.blk.0.extra.weight"] = np.ones((2, 2), np.float32)

    install("qwen3_vl", write_folder("qwen3_vl", tmp_path / "folder"), tmp_path, change)
    files = complete_config(store.resolve("tiny"))
    assert files.projector_path is None
    assert not has_vision(files)
    [line] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert line.endswith("v.blk.0.extra.weight; the model cannot process images")
    caplog.set_level(logging.INFO)
    assert open_model(files, None) is not None
    assert "loading the model without its vision tower" in caplog.text
