"""The files of a repository that are downloaded."""

import pytest

from app.core.errors import AppError
from app.store.hub.required_files import check_loadable, select_files


def test_pooling_configs_and_dense_layers_are_downloaded_with_the_model():
    listing = [
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "2_Dense/pytorch_model.bin",
        "README.md",
        "config.json",
        "model.safetensors",
        "modules.json",
        "onnx/model.onnx",
        "tokenizer.json",
    ]
    assert select_files(listing) == [
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "config.json",
        "modules.json",
        "tokenizer.json",
        "model.safetensors",
    ]


def test_a_tiktoken_model_replaces_a_tokenizer_json() -> None:
    listing = ["README.md", "config.json", "model.safetensors", "tiktoken.model"]
    check_loadable("moonshotai/Kimi-K2", listing)
    assert select_files(listing) == ["config.json", "tiktoken.model", "model.safetensors"]
    with pytest.raises(AppError, match=r"has no tokenizer\.json, which is required"):
        check_loadable("org/other", [name for name in listing if name != "tiktoken.model"])


def test_the_settings_of_the_image_processor_are_downloaded() -> None:
    names = ["preprocessor_config.json", "processor_config.json"]
    listing = ["config.json", "model.safetensors", *names, "tokenizer.json"]
    assert set(names) < set(select_files(listing))
