"""Which files of a repository are fetched."""

from app.store.hub.required_files import select_files


def test_what_says_how_vectors_are_made_is_fetched_with_the_model():
    listing = [
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "README.md",
        "config.json",
        "model.safetensors",
        "modules.json",
        "onnx/model.onnx",
        "tokenizer.json",
    ]
    assert select_files(listing) == [
        "1_Pooling/config.json",
        "config.json",
        "modules.json",
        "tokenizer.json",
        "model.safetensors",
    ]
