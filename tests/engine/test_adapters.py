"""Requests with adapters: mixed batches, cached prefixes and preemptions give each request the bits
that it has alone in a fresh engine."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from app.core.errors import AppError, ErrorKind
from app.core.settings import AdapterSettings
from app.engine.adapters import Adapters, read_adapter
from app.engine.loop import Loop
from tests import tiny
from tests.engine.harness import Outcome, job, make_loop, run, run_one, token_bits
from tests.models.gguf.test_lora import write_adapter as write_gguf
from tests.models.test_lora import ADAPTERS, QUERY, build

NAMES = ("a", "b", "c")
PROMPT = tuple(range(40, 70))


def write_adapter(folder: Path, index: int) -> Path:
    """An adapter in PEFT's format."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "lora_alpha": 1, "r": 1}
    tensors: dict[str, mx.array] = {}
    for name, one in ADAPTERS[index].items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = one.a
        # the scale is alpha / rank
        tensors[f"base_model.model.{name}.lora_B.weight"] = one.b * one.scale * one.a.shape[0]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterSettings]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        AdapterSettings(name=name, path=str(write_adapter(root / name, index)))
        for index, name in enumerate(NAMES)
    ]


@pytest.fixture
def make(settings: list[AdapterSettings]) -> Any:
    """make(**options of make_loop) -> a loop with all adapters"""

    def make(**options: Any) -> Loop:
        model = build()
        return make_loop(model, adapters=Adapters(model, settings, config=tiny.CONFIG), **options)

    return make


def run_alone(make: Any, adapter: str, prompt: tuple[int, ...] = PROMPT) -> Outcome:
    return run_one(make(), job("alone", prompt, adapter=adapter))


def test_mixed_requests_have_the_bits_that_they_have_alone(make: Any) -> None:
    alone = {name: token_bits(run_alone(make, name)) for name in ("", *NAMES)}
    assert len({str(bits) for bits in alone.values()}) == 4
    jobs = [job(f"{n}-{i}", PROMPT, adapter=n) for i in range(4) for n in ("", *NAMES)]
    found = run(make(running=16, policy="radix", chunk=16), *jobs)
    for name, outcome in found.items():
        assert token_bits(outcome) == alone[name.partition("-")[0]], name


def test_an_adapter_of_the_output_layer_changes_the_tokens(tmp_path: Path) -> None:
    model = build()
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 1}')
    rng = np.random.default_rng(4)
    width, vocab = tiny.CONFIG["hidden_size"], tiny.VOCAB
    factors = {"A": (2, width), "B": (vocab, 2)}
    tensors = {
        f"lm_head.lora_{name}.weight": mx.array(rng.standard_normal(shape).astype(np.float32))
        for name, shape in factors.items()
    }
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    settings = [AdapterSettings(name="head", path=str(tmp_path))]
    adapters = Adapters(model, settings, config=tiny.CONFIG)
    loop = make_loop(model, adapters=adapters, running=2, policy="radix")
    found = run(
        loop,
        job("a", PROMPT, adapter="head", prompt_logprobs=0),
        job("b", PROMPT, prompt_logprobs=0),
    )
    assert token_bits(found["b"]) == token_bits(run_alone_without_adapters(model))
    assert [token.id for token in found["a"].tokens] != [token.id for token in found["b"].tokens]
    assert found["a"].scores != found["b"].scores


def run_alone_without_adapters(model: Any) -> Outcome:
    return run_one(make_loop(model), job("alone", PROMPT))


@pytest.mark.parametrize("policy", ["radix", "slots", "single"])
def test_a_prefix_is_reused_only_by_the_same_adapter(make: Any, policy: str) -> None:
    loop = make(policy=policy)
    assert run_one(loop, job("1", PROMPT, adapter="a")).cached == 0
    assert run_one(loop, job("2", PROMPT, adapter="a")).cached == len(PROMPT) - 1
    assert run_one(loop, job("3", PROMPT)).cached == 0
    assert run_one(loop, job("4", PROMPT, adapter="b")).cached == 0


def test_cached_equals_uncached_with_an_adapter(make: Any) -> None:
    loop = make(policy="radix")
    longer = (*PROMPT, 7, 8, 9)
    run_one(loop, job("1", PROMPT, adapter="b"))
    found = run_one(loop, job("2", longer, adapter="b"))
    assert found.cached > 0
    assert token_bits(found) == token_bits(run_alone(make, "b", longer))


def test_a_shifted_context_stays_with_its_adapter(make: Any) -> None:
    """The first tokens are discarded, so another one becomes the first."""
    loop = make(policy="slots", context=64, shift=True)
    first = run_one(loop, job("1", PROMPT, adapter="a", max_tokens=60, stop_token_ids=frozenset()))
    assert len(first.tokens) == 60
    kept = (*PROMPT, *(token.id for token in first.tokens))[-40:]
    assert run_one(loop, job("2", kept)).cached == 0
    assert all(0 <= token.id < 258 for token in first.tokens)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "adapter_config.json"),
        ({"adapter_config.json": "["}, "cannot be read"),
        ({"adapter_config.json": "[]"}, "not a JSON object"),
        ({"adapter_config.json": "{}"}, "neither"),
        (
            {"adapter_config.json": "{}", "adapters.safetensors": "x"},
            "not a complete safetensors file",
        ),
    ],
)
def test_an_unusable_folder_is_an_error_that_names_it(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(AppError, match=message) as caught:
        read_adapter(tmp_path, tiny.CONFIG)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert str(tmp_path) in caught.value.message


def test_the_memory_of_adapters_is_counted(settings: list[AdapterSettings]) -> None:
    model = build()
    one, all_three = (
        Adapters(model, settings[:count], config=tiny.CONFIG).nbytes for count in (1, 3)
    )
    assert 0 < one < all_three


def test_a_gguf_file_is_an_adapter(
    tmp_path: Path, make: Any, settings: list[AdapterSettings]
) -> None:
    """It has the bits of the same adapter in PEFT's format."""
    path = write_gguf(tmp_path / "a.gguf", ADAPTERS[0], alpha=ADAPTERS[0][QUERY].scale * 4)
    model = build()
    named = [AdapterSettings(name="g", path=str(path))]
    loop = make_loop(model, adapters=Adapters(model, named, config=tiny.CONFIG))
    found = run_one(loop, job("1", PROMPT, adapter="g"))
    assert token_bits(found) == token_bits(run_alone(make, "a"))


def test_an_adapter_that_belongs_to_the_model_applies_to_every_request(
    tmp_path: Path, make: Any
) -> None:
    path = write_adapter(tmp_path / "own", 0)
    model = build()
    adapters = Adapters(model, [], config=tiny.CONFIG, default=path)
    loop = make_loop(model, adapters=adapters, running=4, policy="radix", chunk=16)
    found = run(loop, *(job(str(n), PROMPT) for n in range(4)))
    alone = token_bits(run_alone(make, "a"))
    assert [token_bits(one) for one in found.values()] == [alone] * 4
    assert run_one(loop, job("again", PROMPT)).cached == len(PROMPT) - 1


def test_a_file_that_is_neither_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"GGUF")
    with pytest.raises(AppError, match=r"a\.bin") as caught:
        read_adapter(path, tiny.CONFIG)
    assert caught.value.kind is ErrorKind.MODEL_FILES
