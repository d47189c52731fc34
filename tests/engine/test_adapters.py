"""Requests with adapters: mixed batches, cached prefixes and preemptions give each request the bits
that it has alone in a fresh engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Job, LoadAdapter, UnloadAdapter
from app.core.settings import AdapterSettings
from app.engine.adapters import Adapters, read_adapter
from app.engine.loop import Loop
from app.engine.model_info import complete_config
from app.engine.weights import open_model, read_weights
from models import architectures, kernels
from models.gguf.layers import GgufLinear
from models.lora import AdaptedModel
from tests import tiny
from tests.engine.harness import Outcome, job, make_loop, record, run, run_one, token_bits
from tests.models.gguf.test_lora import write_adapter as write_gguf
from tests.models.test_lora import ADAPTERS, QUERY, build, compute_logits, draw_factors
from tests.store.gguf.files import write_tiny as write_tiny_gguf

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
    with pytest.raises(AppError, match="missing: it does not exist"):
        read_adapter(tmp_path / "missing", tiny.CONFIG)
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


def make_empty_loop(**options: Any) -> Loop:
    model = build()
    return make_loop(model, adapters=Adapters(model, [], config=tiny.CONFIG), **options)


def load(loop: Loop, key: str, path: Path) -> None:
    loop.call(LoadAdapter(key=key, path=str(path)))


def start(loop: Loop, *jobs: Job) -> dict[str, Outcome]:
    """Runs three steps, so that the jobs are decoding."""
    found = {one.id: Outcome() for one in jobs}
    for one in jobs:
        loop.submit(one)
    proceed(loop, found, 3)
    return found


def proceed(loop: Loop, found: dict[str, Outcome], steps: int = 5000) -> None:
    while steps and not loop.idle:
        for update in loop.step().updates:
            record(found[update.job_id], update)
        steps -= 1


def test_an_adapter_is_loaded_and_unloaded_while_requests_run(tmp_path: Path, make: Any) -> None:
    """They keep their bits, and its memory is counted until it is unloaded."""
    paths = [write_adapter(tmp_path / name, index) for index, name in enumerate(NAMES)]
    loop = make_empty_loop(running=8, policy="radix", chunk=16)
    load(loop, "a", paths[0])
    before = loop.stats().ledger.weights
    found = start(loop, job("1", PROMPT), job("2", PROMPT, adapter="a", max_tokens=40))
    load(loop, "b@1", paths[1])
    assert loop.stats().ledger.weights > before
    proceed(loop, found, 2)
    found["3"] = Outcome()
    loop.submit(job("3", PROMPT, adapter="b@1"))
    proceed(loop, found)
    loop.call(UnloadAdapter(key="b@1"))
    loop.call(UnloadAdapter(key="b@1"))
    assert loop.stats().ledger.weights == before
    for name, adapter in (("1", ""), ("3", "b")):
        assert token_bits(found[name]) == token_bits(run_alone(make, adapter))
    alone = run_one(make(), job("alone", PROMPT, adapter="a", max_tokens=40))
    assert token_bits(found["2"]) == token_bits(alone)
    loop.check()


def test_a_prefix_of_an_unloaded_adapter_is_not_reused(tmp_path: Path, make: Any) -> None:
    """Not even by another adapter with the same key, which answers with its own weights."""
    paths = [write_adapter(tmp_path / name, index) for index, name in enumerate("ab")]
    loop = make_empty_loop(policy="radix")
    for path, name in zip([*paths, paths[0]], "aba", strict=True):
        load(loop, "x", path)
        found = run_one(loop, job("1", PROMPT, adapter="x"))
        assert found.cached == 0
        assert token_bits(found) == token_bits(run_alone(make, name))
        loop.call(UnloadAdapter(key="x"))


def write_unusable(folder: Path, kind: str) -> Path:
    """An adapter that is wrong in one respect."""
    if kind == "missing":
        return folder
    write_adapter(folder, 0)
    tensors: Any = mx.load(str(folder / "adapter_model.safetensors"))
    name = next(name for name in tensors if "lora_B" in name)
    match kind:
        case "rank":
            tensors[name] = mx.zeros((tensors[name].shape[0], 3))
        case "model":
            tensors[name] = mx.zeros((7, tensors[name].shape[1]))
        case "numbers":
            tensors[name] = mx.full(tensors[name].shape, float("nan"))
        case "layer":
            tensors["model.layers.77.mlp.up_proj.lora_B.weight"] = tensors[name]
        case _:
            (folder / "adapter_model.safetensors").write_bytes(b"x" * 99)
            return folder
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "it does not exist"),
        ("rank", "do not match"),
        ("model", "use an adapter that was trained on this model"),
        ("numbers", "some of its numbers are not finite"),
        ("layer", "only one factor"),
        ("file", "not a complete safetensors file"),
    ],
)
def test_an_unusable_adapter_changes_nothing(
    tmp_path: Path, make: Any, kind: str, message: str
) -> None:
    good, bad = write_adapter(tmp_path / "good", 0), write_unusable(tmp_path / "bad", kind)
    loop = make_empty_loop(running=4, policy="radix", chunk=16)
    load(loop, "a", good)
    found = start(loop, job("1", PROMPT), job("2", PROMPT, adapter="a"))
    before = loop.stats().ledger, loop.capacity
    with pytest.raises(AppError, match=message) as caught:
        load(loop, "b", bad)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert (loop.stats().ledger, loop.capacity) == before
    proceed(loop, found)
    assert token_bits(found["1"]) == token_bits(run_alone(make, ""))
    assert token_bits(found["2"]) == token_bits(run_alone(make, "a"))


def test_an_adapter_takes_memory_from_the_context_down_to_a_minimum(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", 0)
    size = Adapters(build(), [AdapterSettings(name="a", path=str(path))], config=tiny.CONFIG).nbytes
    loop = make_empty_loop(budget=2 * size, min_kv_budget=size)
    before = loop.capacity
    load(loop, "a", path)
    assert loop.capacity.kv_budget == before.kv_budget - size
    assert loop.capacity.context_length < before.context_length
    with pytest.raises(AppError, match=r"the memory budget has 0.* for adapters"):
        load(loop, "b", path)
    assert loop.capacity.kv_budget == before.kv_budget - size
    loop.call(UnloadAdapter(key="a"))
    assert loop.capacity == before


def test_requests_are_preempted_for_an_adapter_and_lose_nothing(tmp_path: Path, make: Any) -> None:
    path = write_adapter(tmp_path / "a", 0)
    size = Adapters(build(), [AdapterSettings(name="a", path=str(path))], config=tiny.CONFIG).nbytes
    footprint = make_empty_loop().capacity.kv_bytes_per_sequence
    loop = make_empty_loop(running=3, policy="radix", chunk=16, budget=footprint)
    jobs = [job(str(n), PROMPT, max_tokens=40, stop_token_ids=frozenset()) for n in range(3)]
    alone = token_bits(run_one(make(), jobs[0]))
    found = start(loop, *jobs)
    taken = loop.stats().ledger.kv
    assert taken > loop.capacity.kv_budget - size, "the adapter would fit beside them"
    load(loop, "a", path)
    proceed(loop, found)
    assert loop.stats().preemptions > 0
    assert [token_bits(one) for one in found.values()] == [alone] * 3
    loop.check()


def test_an_adapter_that_is_gone_when_the_model_is_loaded_again_fails_its_own_requests_only(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gone = AdapterSettings(name="gone", path=str(tmp_path / "gone"), version=1)
    model = build()
    loop = make_loop(model, adapters=Adapters(model, [gone], config=tiny.CONFIG))
    assert "the adapter gone is not loaded again" in caplog.text
    found = run(loop, job("1", PROMPT, adapter="gone@1"), job("2", PROMPT))
    assert found["1"].error is not None
    assert "load it again" in found["1"].error
    assert token_bits(found["2"]) == token_bits(run_alone(make, ""))
    with pytest.raises(AppError, match="it does not exist"):
        Adapters(model, [replace(gone, version=0)], config=tiny.CONFIG)


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


@pytest.mark.skipif(kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}")
def test_an_adapter_changes_layers_of_gguf_blocks(tmp_path: Path) -> None:
    """The logits match the merged model, whose weights are dequantized."""

    def choose_type(name: str) -> gguf.GGMLQuantizationType | None:
        return gguf.GGMLQuantizationType.Q8_0 if "attn_q" in name or "ffn" in name else None

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
    path = write_tiny_gguf(tmp_path / "m.gguf", quantize=choose_type, **sizes)
    files = complete_config(store.resolve(str(path)))
    model: Any = open_model(files, None)
    read_weights(model, files.path, lambda percent, memory: None)
    layers = {n: one for n, one in model.named_modules() if n.endswith(("q_proj", "up_proj"))}
    assert all(isinstance(one, GgufLinear) for one in layers.values())
    changes = {name: draw_factors(one, name) for name, one in layers.items()}
    adapted = AdaptedModel(model)
    adapted.select([adapted.add(changes)])
    merged = {
        f"{name}.weight": one.weight
        for name, one in model.named_modules()
        if not one.children() and "weight" in one
    }
    for name, one in changes.items():
        merged[f"{name}.weight"] += one.scale * (one.b @ one.a)
    config = {**tiny.CONFIG, **sizes, "vocab_size": len(merged["lm_head.weight"])}
    expected = compute_logits(architectures.build(config, merged))
    assert not mx.allclose(compute_logits(model), expected, atol=1e-2)
    assert mx.allclose(compute_logits(adapted.model), expected, atol=1e-3)


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
