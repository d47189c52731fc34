"""The files of a repository that are downloaded."""

from app.store.hub.required_files import select_files


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
