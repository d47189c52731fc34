"""GGUF models in Ollama's store: the layers besides the weights, and models created from them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.errors import AppError
from app.core.models import ModelRecipe
from app.core.requests import Message
from app.core.thread_pools import CancelToken
from app.store.installed import copy_model, derive_model
from app.store.model_names import parse_ollama_name
from app.store.ollama.create import create_model
from app.store.tensor_summary import list_tensors, summarize_tensors
from app.text.chat_template import ChatTemplate
from tests import tiny
from tests.store.gguf.files import write_tiny
from tests.store.ollama_store import GO_TEMPLATE, OllamaStore

PARAMETERS = {"temperature": 0.7, "num_ctx": 2048, "stop": ["<|user|>"], "num_predict": 12}


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OllamaStore:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return OllamaStore(tmp_path / "ollama")


def layer(ollama: OllamaStore, tmp_path: Path, **options: Any) -> dict[str, Any]:
    return ollama.layer("model", write_tiny(tmp_path / "m.gguf", **options).read_bytes())


def test_all_layers_of_a_model_are_used(ollama: OllamaStore, tmp_path: Path) -> None:
    weights = layer(ollama, tmp_path)
    path = ollama.write(
        "llama3.2",
        [
            weights,
            ollama.layer("template", GO_TEMPLATE.encode()),
            ollama.layer("system", b"You are terse."),
            ollama.json("params", PARAMETERS),
            ollama.json("messages", [{"role": "user", "content": "Hi"}]),
            ollama.layer("license", b"MIT"),
        ],
    )
    files = store.resolve("llama3.2")
    assert (files.name, files.path, files.shards) == ("llama3.2", path, (ollama.path_of(weights),))
    assert files.system_prompt == "You are terse."
    assert files.first_messages == (("user", "Hi"),)
    assert files.license == "MIT"
    assert files.recommended_context == 2048
    assert files.generation_config == {
        "eos_token_id": [tiny.END],
        "temperature": 0.7,
        "stop_strings": ["<|user|>"],
        "max_new_tokens": 12,
    }
    # the file's own template, not Ollama's
    assert ChatTemplate(files).render([Message(role="user", content="Hi")]).startswith("user: Hi")


def test_its_tensors_are_listed_with_their_types(ollama: OllamaStore, tmp_path: Path) -> None:
    def label(writer: Any) -> None:
        writer.add_file_type(15)

    ollama.write("plain", [layer(ollama, tmp_path)])
    ollama.write("labelled", [layer(ollama, tmp_path, extra=label)])
    plain = store.find("plain")
    assert summarize_tensors(plain).quantization == "F32"
    assert summarize_tensors(store.find("labelled")).quantization == "Q4_K_M"
    tensors = {tensor.name: tensor for tensor in list_tensors(plain)}
    assert tensors["token_embd.weight"].shape == (tiny.VOCAB + 1, 16)
    assert tensors["token_embd.weight"].dtype == "F32"
    assert summarize_tensors(plain).parameters == plain.weight_bytes // 4


@pytest.mark.parametrize(
    ("markers", "rendered"),
    [
        (("<|im_start|>", "<|im_end|>"), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (
            ("<start_of_turn>", "<end_of_turn>"),
            "<s><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
            "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]Hi[/INST]",
        ),
    ],
)
def test_without_a_template_that_of_the_family_is_used(
    ollama: OllamaStore, tmp_path: Path, markers: tuple[str, ...], rendered: str
) -> None:
    content = write_tiny(tmp_path / "m.gguf", template=None, markers=markers).read_bytes()
    go_template = ollama.layer("template", GO_TEMPLATE.encode())
    ollama.write("old", [ollama.layer("model", content), go_template])
    messages = [Message(role="system", content="Be kind."), Message(role="user", content="Hi")]
    assert ChatTemplate(store.find("old")).render(messages).endswith(rendered)


def test_an_answer_of_mistrals_format_ends_with_the_end_token(
    ollama: OllamaStore, tmp_path: Path
) -> None:
    """As in the published template of Mistral Small 3.1."""
    markers = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")
    content = write_tiny(tmp_path / "m.gguf", template=None, markers=markers).read_bytes()
    go_template = ollama.layer("template", GO_TEMPLATE.encode())
    ollama.write("old", [ollama.layer("model", content), go_template])
    turns = [("user", "Hi"), ("assistant", "Yes?"), ("user", "Go")]
    chat = ChatTemplate(store.find("old"))
    rendered = chat.render([Message(role=role, content=text) for role, text in turns])
    end = tiny.tokenizer().id_to_token(tiny.END)
    assert rendered == f"<s>[INST]Hi[/INST]Yes?{end}[INST]Go[/INST]"


def test_a_chat_without_a_known_template_is_rejected(ollama: OllamaStore, tmp_path: Path) -> None:
    go_template = ollama.layer("template", GO_TEMPLATE.encode())
    ollama.write("old", [layer(ollama, tmp_path, template=None), go_template])
    with pytest.raises(
        AppError, match="only chat template of this model is in the Go format of Ollama"
    ):
        ChatTemplate(store.find("old")).render([Message(role="user", content="Hi")])


def test_an_adapter_is_a_part_of_the_model(ollama: OllamaStore, tmp_path: Path) -> None:
    adapter = ollama.layer("adapter", b"LoRA")
    ollama.write("tuned", [layer(ollama, tmp_path), adapter])
    assert store.find("tuned").adapter_path == ollama.path_of(adapter)
    ollama.write("twice", [layer(ollama, tmp_path), adapter, ollama.layer("adapter", b"LoRA 2")])
    with pytest.raises(AppError, match="has 2 LoRA adapters, but only one is supported"):
        store.find("twice")


def test_a_damaged_blob_is_found(ollama: OllamaStore, tmp_path: Path) -> None:
    weights = layer(ollama, tmp_path)
    ollama.write("tiny", [weights])
    store.resolve("tiny")
    blob = ollama.path_of(weights)
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    with pytest.raises(AppError, match="is damaged: its SHA-256"):
        store.resolve("tiny")


def test_models_made_from_it_share_its_weights(ollama: OllamaStore, tmp_path: Path) -> None:
    ollama.write("tiny", [layer(ollama, tmp_path)])
    base = store.find("tiny")
    copy_model(base, "copy")
    derive_model(base, ModelRecipe(name="pirate", base="tiny", system="Arr!"))
    assert store.find("copy").shards == base.shards
    assert store.find("pirate").shards == base.shards
    assert store.find("pirate").system_prompt == "Arr!"


def test_a_file_outside_the_store_is_imported(ollama: OllamaStore, tmp_path: Path) -> None:
    base = store.find(str(write_tiny(tmp_path / "m.gguf")))
    copy_model(base, "mine")
    made = store.find("mine")
    assert made.shards[0].read_bytes() == base.path.read_bytes()
    config = ollama.path("mine").read_text()
    digest = json.loads(config)["config"]["digest"].replace(":", "-")
    assert json.loads((ollama.root / "blobs" / digest).read_text())["model_format"] == "gguf"


def test_an_uploaded_file_becomes_a_model(ollama: OllamaStore, tmp_path: Path) -> None:
    digest = layer(ollama, tmp_path)["digest"]
    name = parse_ollama_name("uploaded")
    assert name is not None
    recipe = ModelRecipe(name="uploaded", base=None, files={"m.gguf": digest})
    create_model(name, recipe, None, CancelToken())
    assert store.find("uploaded").vocab_size == tiny.VOCAB + 1
    other = ollama.blob(b"no model")["digest"]
    recipe = replace(recipe, files={"m.gguf": other})
    with pytest.raises(AppError, match="does not begin as a GGUF file"):
        create_model(name, recipe, None, CancelToken())
