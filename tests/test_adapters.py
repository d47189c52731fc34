"""LoRA adapters in a real server: PEFT's and mlx-lm's on one base, in mixed batches, and changes
under load."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from tests import tiny
from tests.engine.test_adapters import write_adapter as write_peft
from tests.models.test_lora import ADAPTERS, draw_adapter
from tests.server_process import TIMEOUT, ServerProcess, run_server

FACTORS = {
    "peft-1": ADAPTERS[0],
    "peft-2": ADAPTERS[1],
    "mlx-1": draw_adapter(11),
    "mlx-2": draw_adapter(12, rank=8, part="self_attn"),
}
NAMES = ("base", *(f"base:{name}" for name in FACTORS))

# The largest difference of a log probability from that of the merged model, whose weights are
# rounded in a different order.
NEAR = 1e-4


def write_mlx(folder: Path, name: str) -> Path:
    """An adapter in mlx-lm's format."""
    folder.mkdir(parents=True)
    factors = FACTORS[name]
    [scale] = {one.scale for one in factors.values()}
    config = {"fine_tune_type": "lora", "lora_parameters": {"scale": scale}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {f"{layer}.lora_a": one.a.T for layer, one in factors.items()}
    tensors |= {f"{layer}.lora_b": one.b.T for layer, one in factors.items()}
    contiguous = {key: mx.contiguous(array) for key, array in tensors.items()}
    mx.save_safetensors(str(folder / "adapters.safetensors"), contiguous)
    return folder


def write_merged(folder: Path, name: str) -> Path:
    """The base with the products of an adapter added to its weights."""
    tiny.write(folder)
    merged = tiny.weights()
    for layer, one in FACTORS[name].items():
        merged[f"{layer}.weight"] += one.scale * (one.b @ one.a)
    mx.save_safetensors(str(folder / "model.safetensors"), merged)
    return folder


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The base, the adapters, and the merged models as merged-NAME."""
    root = tmp_path_factory.mktemp("adapters")
    found = {"base": tiny.write(root / "base")}
    for index, name in enumerate(FACTORS):
        folder = root / name
        found[name] = write_peft(folder, index) if index < 2 else write_mlx(folder, name)
        found[f"merged-{name}"] = write_merged(root / f"merged-{name}", name)
    return found


@pytest.fixture(scope="module")
def server(paths: Mapping[str, Path]) -> Iterator[ServerProcess]:
    flags = [word for name in FACTORS for word in ("--adapter", f"{name}={paths[name]}")]
    with run_server(str(paths["base"]), "--parallel", "16", *flags) as running:
        yield running


def send(client: httpx.Client, model: str, number: int, **fields: Any) -> httpx.Response:
    body = {
        "model": model,
        "prompt": f"request {number}",
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
        **fields,
    }
    return client.post("/v1/completions", json=body)


def read(reply: httpx.Response) -> tuple[Sequence[int], Sequence[float]]:
    """The token IDs and the log probabilities."""
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def complete(client: httpx.Client, model: str, number: int, **fields: Any) -> Any:
    return read(send(client, model, number, **fields))


def post(client: httpx.Client, path: str, **body: Any) -> tuple[int, str]:
    reply = client.post(path, json=body)
    return reply.status_code, reply.text


def test_16_mixed_requests_equal_themselves_alone_and_the_merged_models(
    server: ServerProcess, paths: Mapping[str, Path]
) -> None:
    """To the bit those of the same server one at a time, and within 1e-4 the merged models'."""
    requests = [(NAMES[1 + number % 4], number) for number in range(16)]
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        with ThreadPoolExecutor(16) as threads:
            mixed = list(threads.map(lambda one: complete(client, *one), requests))
        fields = {"cache_prompt": False}
        assert [complete(client, *one, **fields) for one in requests] == mixed
        base = [complete(client, "base", number) for number in range(16)]
    assert all(a[0] != b[0] for a, b in zip(base, mixed, strict=True)), "the adapters do nothing"
    for name in FACTORS:
        with (
            run_server(str(paths[f"merged-{name}"])) as merged,
            httpx.Client(base_url=merged.url, timeout=TIMEOUT) as client,
        ):
            for number, (model, _) in enumerate(requests):
                if model == f"base:{name}":
                    ids, logprobs = complete(client, f"merged-{name}", number)
                    assert mixed[number][0] == ids
                    assert mixed[number][1] == pytest.approx(logprobs, abs=NEAR)


def test_loading_and_unloading_under_load_loses_nothing(
    server: ServerProcess, paths: Mapping[str, Path]
) -> None:
    """Requests for the base, for the other adapters and for one that comes and goes: each one has
    the bits that it has alone. Only the last kind may be 404."""
    fields = {"max_tokens": 60, "logit_bias": {str(tiny.END): -100}}
    extra = {"lora_name": "extra", "lora_path": str(paths["peft-2"])}
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        alone = {model: complete(client, model, 0, **fields) for model in NAMES}
        alone |= dict.fromkeys(("base:extra", "extra"), alone["base:peft-2"])

        def run(number: int) -> bool:
            """Whether the model was there."""
            model = [*NAMES, "base:extra", "extra"][number % 7]
            reply = send(client, model, 0, **fields)
            if reply.status_code != 404:
                assert read(reply) == alone[model]
            return reply.status_code != 404

        with ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(run, number) for number in range(140)]
            changes = 0
            while not all(answer.done() for answer in answers):
                added = post(client, "/v1/load_lora_adapter", **extra)
                assert added == (200, "Success: LoRA adapter 'extra' added successfully.")
                assert post(client, "/v1/load_lora_adapter", **extra)[0] == 400
                missing = {"lora_name": "bad", "lora_path": "/none"}
                assert post(client, "/v1/load_lora_adapter", **missing)[0] == 404
                removed = post(client, "/v1/unload_lora_adapter", lora_name="extra")
                assert removed == (200, "Success: LoRA adapter 'extra' removed successfully.")
                changes += 1
        was_there = [answer.result() for answer in answers]
    assert changes > 1
    assert all(found for number, found in enumerate(was_there) if number % 7 < 5)
    assert any(found for number, found in enumerate(was_there) if number % 7 >= 5)


def test_every_list_shows_an_adapter_as_soon_as_it_is_loaded(
    server: ServerProcess, paths: Mapping[str, Path]
) -> None:
    def list_names(client: httpx.Client) -> Sequence[set[str]]:
        openai = client.get("/v1/models").json()["data"]
        anthropic = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        ollama = client.get("/api/tags").json()["models"]
        return [
            {one["id"] for one in openai},
            {one["id"] for one in anthropic["data"]},
            {one["name"].removesuffix(":latest") for one in ollama},
        ]

    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        before = list_names(client)
        assert before == [set(NAMES)] * 3
        weights = client.get("/v1/status").json()["Ledger"]["weights"]
        path = str(paths["mlx-1"])
        assert post(client, "/v1/load_lora_adapter", lora_name="new", lora_path=path)[0] == 200
        assert list_names(client) == [{*NAMES, "base:new"}] * 3
        assert client.get("/v1/models/base:new").json()["parent"] == "base"
        assert client.get("/v1/status").json()["Ledger"]["weights"] > weights
        assert post(client, "/v1/unload_lora_adapter", lora_name="new")[0] == 200
        assert list_names(client) == before
        assert client.get("/v1/status").json()["Ledger"]["weights"] == weights
        assert post(client, "/v1/unload_lora_adapter", lora_name="new")[0] == 404
