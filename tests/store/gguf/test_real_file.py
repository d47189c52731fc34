"""A published model in GGUF (`tests.models.gguf.download`): tokens, logits, and a server.

smollm2_greedy.json holds the greedy answers of transformers 5.24 with the weights dequantized to
float32: AutoModelForCausalLM.from_pretrained(…, gguf_file=…), 32 tokens for each of 8 questions.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from app import store
from app.core.model_files import ModelFiles
from app.core.requests import Message
from app.engine.weights import open_model, read_weights
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer
from tests.models.gguf.download import MODEL, SHA256
from tests.server_process import ServerProcess, run_server
from tests.store.test_ollama import complete_config

ROWS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("smollm2_greedy.json").read_text("utf-8")
)
TIMEOUT = 60.0
NAME = "SmolLM2-135M-Instruct.Q4_1"


@pytest.fixture(scope="module")
def model_path() -> Path:
    if not MODEL.is_file():
        pytest.skip("build/smollm2 has no model: run `make build/smollm2/.installed`")
    return MODEL


@pytest.fixture(scope="module")
def files(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFiles]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield complete_config(store.find(str(model_path)))


def test_the_file_is_the_published_one(model_path: Path) -> None:
    with model_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def test_prompts_have_the_same_tokens_as_in_transformers(files: ModelFiles) -> None:
    tokenizer, template = Tokenizer.load(files), ChatTemplate(files)
    for row in ROWS:
        text = template.render([Message(role="user", content=row["prompt"])])
        assert tokenizer.encode(text, add_special_tokens=False) == row["prompt_ids"]


def test_greedy_answers_are_those_of_transformers(files: ModelFiles) -> None:
    model = open_model(files, None)
    read_weights(model, files.path, lambda percent, memory: None)
    for row in ROWS:
        # each token is the most likely one after the prompt and the tokens before it
        tokens = [*row["prompt_ids"], *row["ids"]]
        logits = model.logits(model(mx.array([tokens[:-1]]), model.make_kv()))[0]
        found = mx.argmax(logits[len(row["prompt_ids"]) - 1 :], axis=-1).tolist()
        assert found == row["ids"], row["prompt"]


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    with run_server(str(model_path), environ=cache) as server:
        yield server


QUESTION = {"role": "user", "content": "What is the capital of France?"}


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    response = httpx.post(server.url + path, json={"model": NAME, **body}, timeout=TIMEOUT)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_conversation_of_two_turns_is_answered(server: ServerProcess) -> None:
    def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return post(
            server, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=24
        )["choices"][0]

    first = ask([QUESTION])
    assert first["message"]["content"] == "The capital of France is Paris."
    assert first["finish_reason"] == "stop"
    again = ask([QUESTION, first["message"], {"role": "user", "content": "And of Italy?"}])
    assert "Rome" in again["message"]["content"]


def test_a_schema_is_kept(server: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    reply = post(
        server,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Describe John, who is 30 years old, as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
        temperature=0,
        max_tokens=60,
    )
    answer = json.loads(reply["choices"][0]["message"]["content"])
    assert answer.keys() == {"name", "age"}
    assert isinstance(answer["age"], int)


def test_all_dialects_answer(server: ServerProcess) -> None:
    anthropic = post(server, "/v1/messages", messages=[QUESTION], max_tokens=24, temperature=0)
    assert anthropic["content"][0]["text"] == "The capital of France is Paris."
    ollama = post(
        server,
        "/api/chat",
        messages=[QUESTION],
        stream=False,
        options={"temperature": 0, "num_predict": 24},
    )
    assert ollama["message"]["content"] == "The capital of France is Paris."
    responses = post(
        server, "/v1/responses", input=QUESTION["content"], temperature=0, max_output_tokens=24
    )
    assert responses["output"][-1]["content"][0]["text"] == "The capital of France is Paris."


def test_embeddings_are_computed(server: ServerProcess) -> None:
    texts = ["a cat", "a kitten", "the stock market"]
    vectors = [
        mx.array(item["embedding"]) for item in post(server, "/v1/embeddings", input=texts)["data"]
    ]
    assert vectors[0].size == 576
    assert mx.inner(vectors[0], vectors[1]) > mx.inner(vectors[0], vectors[2])


def test_ollamas_clients_see_its_details(server: ServerProcess) -> None:
    [entry] = httpx.get(f"{server.url}/api/tags", timeout=TIMEOUT).json()["models"]
    assert entry["details"]["quantization_level"] == "Q4_1"
    assert entry["details"]["family"] == "llama"
    shown = post(server, "/api/show", verbose=True)
    assert shown["details"]["parameter_size"] == "135M"
    assert "<|im_start|>" in shown["template"]
    types = {tensor["type"] for tensor in shown["tensors"]}
    assert types == {"F32", "Q4_1", "Q8_0"}
