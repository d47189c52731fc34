"""Encoders in GGUF files: how they are listed, their pooling, and the embeddings of a server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest

from app import store
from app.core.model_files import ModelFiles
from app.engine.model_info import complete_config
from app.serving.pooling_config import find_rank_method, read_pooling_config
from app.text.tokenizer import Tokenizer
from tests.models.encoder_reference import VOCAB, draw_inputs
from tests.models.gguf.encoders import REFERENCE, write_embedding_gemma, write_encoder
from tests.server_process import ServerProcess, run_server
from tests.store.gguf.files import write_tiny
from tests.store.ollama_store import OllamaStore

TIMEOUT = 60.0
CLS, SEP, FIRST_WORD = 2, 3, 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))


def add_words(writer: gguf.GGUFWriter) -> None:
    """A WordPiece vocabulary of whole words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"\u2581w{number}" for number in range(FIRST_WORD, VOCAB)]
    writer.add_tokenizer_model("bert")
    writer.add_token_list([*special, *words])
    writer.add_token_types([3] * len(special) + [1] * len(words))
    writer.add_bos_token_id(CLS)
    writer.add_sep_token_id(SEP)


def write_embedder(path: Path, name: str = "xlm-roberta", **options: Any) -> Path:
    return write_encoder(path, name, extra=add_words, **options)


def read_files(path: Path) -> ModelFiles:
    return complete_config(store.resolve(str(path)))


@pytest.mark.parametrize(
    ("kind", "pooling"), [("CLS", "cls"), ("MEAN", "mean"), ("LAST", "last"), (None, "mean")]
)
def test_the_pooling_is_that_of_the_file(tmp_path: Path, kind: str | None, pooling: str) -> None:
    given = None if kind is None else gguf.PoolingType[kind]
    files = read_files(write_embedder(tmp_path / "m.gguf", pooling=given))
    assert files.is_encoder
    assert (files.context_length, files.vocab_size) == (62, VOCAB)
    config = read_pooling_config(files)
    assert (config.pooling, config.unsupported) == (pooling, None)


def test_an_embedding_gemma_is_an_encoder(tmp_path: Path) -> None:
    files = read_files(write_embedding_gemma(tmp_path / "m.gguf", extra=add_words))
    assert files.is_encoder
    config = read_pooling_config(files)
    assert (config.pooling, config.unsupported) == ("mean", None)


def test_a_decoder_with_a_pooling_is_a_model_for_embeddings(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType.LAST)

    files = read_files(write_tiny(tmp_path / "m.gguf", extra=add))
    assert not files.is_encoder
    assert read_pooling_config(files).pooling == "last"


def test_a_decoder_with_attention_in_both_directions_computes_no_embeddings(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_causal_attention(False)

    files = read_files(write_tiny(tmp_path / "m.gguf", extra=add))
    assert "needs bidirectional attention" in str(read_pooling_config(files).unsupported)


def test_a_reranker_is_recognized(tmp_path: Path) -> None:
    files = read_files(write_embedder(tmp_path / "m.gguf", "xlm-roberta-reranker"))
    assert find_rank_method(files) == "classifier"
    assert files.context_length == 62


def test_texts_begin_with_cls_and_end_with_sep(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(read_files(write_embedder(tmp_path / "m.gguf")))
    assert tokenizer.encode_for_embedding("w5 w9") == [CLS, 5, 9, SEP]
    assert tokenizer.encode_pair("w5", "w6 w7", 60) == ([CLS, 5, SEP, 6, 7, SEP], 3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the models in Ollama's store, which has one encoder."""
    root = tmp_path_factory.mktemp("ollama")
    ollama = OllamaStore(root)
    path = write_embedder(root / "m.gguf", pooling=gguf.PoolingType.MEAN)
    layers = [
        ollama.layer("model", path.read_bytes()),
        ollama.layer("template", b"{{ .Prompt }}"),
    ]
    ollama.write("nomic-embed-text", layers)
    environ = {
        "OLLAMA_MODELS": str(root),
        "XDG_CACHE_HOME": str(root / "cache"),
        "HOME": str(root),
    }
    with run_server("--installed", environ=environ) as server:
        yield server


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    body = {"model": "nomic-embed-text", **body}
    response = httpx.post(server.url + path, json=body, timeout=TIMEOUT)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_embeddings_of_a_server_are_those_of_transformers(server: ServerProcess) -> None:
    tokens, _ = draw_inputs()
    found = post(server, "/v1/embeddings", input=tokens)
    means = np.array(REFERENCE["xlm-roberta"]["outputs"])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    vectors = [item["embedding"] for item in found["data"]]
    np.testing.assert_allclose(vectors, expected, atol=2e-5)


def test_ollamas_endpoint_embeds_texts(server: ServerProcess) -> None:
    found = post(server, "/api/embed", input=["w5 w6", "W7"])
    assert found["prompt_eval_count"] == 7
    same = post(server, "/v1/embeddings", input=[[CLS, 5, 6, SEP], [CLS, 7, SEP]])
    assert found["embeddings"] == [item["embedding"] for item in same["data"]]


def test_it_is_listed_as_a_model_for_embeddings(server: ServerProcess) -> None:
    assert post(server, "/api/show")["capabilities"] == ["embedding"]
    listed = httpx.get(f"{server.url}/api/tags", timeout=TIMEOUT).json()["models"]
    families = {entry["name"]: entry["details"]["family"] for entry in listed}
    assert families["nomic-embed-text:latest"] == "bert"
    refused = httpx.post(
        f"{server.url}/api/generate",
        json={"model": "nomic-embed-text", "prompt": "w5"},
        timeout=TIMEOUT,
    )
    assert (refused.status_code, refused.json()["error"].count("generate")) == (400, 1)
