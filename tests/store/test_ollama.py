"""Models of Ollama's store, in the format that Ollama writes."""

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app import store
from app.core.model_files import ModelFiles, read_generation_defaults
from app.engine.model_info import complete_config
from app.engine.weights import open_model
from tests.store.asking import refusal
from tests.store.ollama_store import CONFIG, GO_TEMPLATE, OllamaStore

PARAMETERS = {
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.05,
    "repeat_penalty": 1.1,
    "repeat_last_n": 64,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "num_predict": 100,
    "seed": 7,
    "stop": ["<|im_end|>", "</s>"],
    "num_ctx": 2048,
}


def logits(files: ModelFiles) -> mx.array:
    model = open_model(complete_config(files), None)
    return model.logits(model(mx.array([[72, 105, 33]]), model.make_kv()))


def test_a_model_of_the_store_gives_the_same_logits_as_in_a_folder(
    ollama: OllamaStore, packed_model: Path, layers: list[dict[str, Any]]
) -> None:
    ollama.write("tiny", layers)
    files, same = store.resolve("tiny"), store.resolve(str(packed_model))
    assert files.name == "tiny"
    assert files.tokenizer_vocab_size == same.tokenizer_vocab_size
    assert files.weight_bytes == same.weight_bytes
    assert files.config["hidden_size"] == CONFIG["hidden_size"]
    assert mx.array_equal(logits(files), logits(same))


def test_a_blob_of_two_layers_and_two_names_is_one_file(
    ollama: OllamaStore, packed_model: Path, layers: list[dict[str, Any]]
) -> None:
    """Ollama lists a layer for each tensor, also if one blob contains several."""
    [weight] = [layer for layer in layers if layer.get("name") == "lm_head.weight"]
    ollama.write("one", [*layers, {**weight, "name": "lm_head.weight.scale"}])
    ollama.write("two", layers)
    one, two = store.find("one"), store.find("two")
    assert one.shards == two.shards
    assert len(one.shards) == len(set(one.shards)) == len(layers) - 3
    assert mx.array_equal(logits(one), logits(store.find(str(packed_model))))


def test_parameters_become_defaults(ollama: OllamaStore, layers: list[dict[str, Any]]) -> None:
    base = ollama.json("json", {"do_sample": False, "top_k": 3}, "generation_config.json")
    ollama.write("tiny", [*layers, base, ollama.json("params", PARAMETERS)])
    files = store.find("tiny")
    found = read_generation_defaults(files)
    assert found.sampling == {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "repeat_last_n": 64,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 7,
    }
    assert found.max_tokens == 100
    assert found.stop_strings == ("<|im_end|>", "</s>")
    assert files.recommended_context == 2048


def test_unset_parameters_change_nothing(ollama: OllamaStore, layers: list[dict[str, Any]]) -> None:
    unset = {"seed": -1, "num_predict": -1, "repeat_penalty": 0, "num_gpu": 99, "stop": "x"}
    ollama.write("tiny", [*layers, ollama.json("params", unset)])
    found = read_generation_defaults(store.find("tiny"))
    assert (found.sampling, found.max_tokens, found.stop_strings) == ({}, None, ("x",))


@pytest.mark.parametrize("value", [0, "8192", True, 1.5])
def test_an_absurd_context_is_rejected(
    ollama: OllamaStore, layers: list[dict[str, Any]], value: Any
) -> None:
    ollama.write("tiny", [*layers, ollama.json("params", {"num_ctx": value})])
    assert "num_ctx" in refusal()


def test_the_system_prompt_of_the_model_is_read(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    ollama.write("tiny", [*layers, ollama.layer("system", b"You are terse.")])
    assert store.find("tiny").system_prompt == "You are terse."


def test_a_go_template_alone_is_ignored_with_a_warning(
    ollama: OllamaStore, layers: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    template = ollama.layer("template", GO_TEMPLATE.encode())
    ollama.write("jinja", [*layers, template])
    with caplog.at_level(logging.WARNING):
        assert store.find("jinja").tokenizer_config["chat_template"]
    assert caplog.messages == []
    plain = [layer for layer in layers if layer.get("name") != "tokenizer_config.json"]
    ollama.write("go", [*plain, template])
    with caplog.at_level(logging.WARNING):
        assert store.find("go").chat_template is None
    assert caplog.messages == [
        "go: its chat template is in Ollama's Go format, which is not supported"
    ]


def test_a_separate_jinja_template_is_read(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    ollama.write("tiny", [*layers, ollama.layer("json", b"{{ x }}", "chat_template.jinja")])
    assert store.find("tiny").chat_template == "{{ x }}"


def test_tensors_of_a_draft_model_are_ignored(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    draft = ollama.tensors({"draft.w": mx.zeros((2, 2))}, "draft.w")
    ollama.write("tiny", [*layers, draft])
    assert ollama.path_of(draft) not in store.find("tiny").shards


def test_a_model_without_weights_is_rejected_with_an_alternative(ollama: OllamaStore) -> None:
    ollama.write("mine", [ollama.layer("projector", b"GGUF...")])
    message = refusal("mine")
    assert "has no weights in a supported format" in message
    assert "`mlxrunner pull mlx-community/" in message


def test_an_adapter_is_a_part_of_the_model(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    adapter = ollama.layer("adapter", b"LoRA")
    ollama.write("tiny", [*layers, adapter])
    assert store.find("tiny").adapter_path == ollama.path_of(adapter)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_missing_required_layer_is_reported(
    ollama: OllamaStore, layers: list[dict[str, Any]], file: str
) -> None:
    ollama.write("tiny", [layer for layer in layers if layer.get("name") != file])
    assert f"has no {file} layer" in refusal()


def test_the_settings_of_the_image_processor_are_read(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    old = ollama.json("json", {"patch_size": 14, "merge_size": 2}, "preprocessor_config.json")
    new = ollama.json("json", {"image_processor": {"patch_size": 16}}, "processor_config.json")
    ollama.write("tiny", [*layers, old, new])
    assert store.find("tiny").processor_config == {"patch_size": 16, "merge_size": 2}
