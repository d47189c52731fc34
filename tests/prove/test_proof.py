"""A proof passes for a correct engine, and names the condition of a difference of one bit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app import store
from app.core.jobs import Token
from app.core.model_files import ModelFiles
from app.core.settings import ActivationBits, AdapterSettings, KVPrecision, Settings
from app.engine.model_info import complete_config
from app.prove.comparison import Answer
from app.prove.conditions import ODD_CHUNK
from app.prove.proof import (
    TURNS,
    ConditionReport,
    Proof,
    ProofOptions,
    Reference,
    generate_conversations,
)
from app.text.tokenizer import Tokenizer
from models import kernels
from models.kernels.in_place_attention import SlotMapping
from models.kernels.layers import KernelLinear
from models.kv import KVCache
from tests import tiny
from tests.engine.test_adapters import write_adapter
from tests.models import parity
from tests.models.architectures import Case, cases

CONVERSATIONS = 4

needs_kernels = pytest.mark.skipif(kernels.ops() is None, reason="needs the CPU kernels")


def test_a_seed_gives_the_same_conversations() -> None:
    assert generate_conversations(4, 12) == generate_conversations(4, 12)
    assert generate_conversations(4, 12) != generate_conversations(5, 12)


def test_the_first_conversations_do_not_depend_on_their_number() -> None:
    """A slow model runs fewer of them."""
    assert generate_conversations(0, 12)[:3] == generate_conversations(0, 3)


def test_conversations_cover_the_stages_of_the_sampler() -> None:
    specs = generate_conversations(0, 12)
    names = {name for spec in specs for name, value in spec.sampling.items() if value}
    assert names >= {
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "repeat_last_n"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    }
    assert any(spec.grammar for spec in specs)
    assert any(spec.cancel_after for spec in specs)
    assert specs[0].long_text
    assert all(len(spec.questions) == TURNS for spec in specs)


def test_every_sampled_conversation_has_a_seed() -> None:
    for spec in generate_conversations(0, 24):
        assert bool(spec.sampling.get("temperature")) == ("seed" in spec.sampling)


@pytest.mark.parametrize(
    ("text", "sent"),
    [("Hello", "Hello"), ("a STOP b", "a "), ("STOP", ""), ("x END STOP", "x "), ("STO", "STO")],
)
def test_an_answer_is_compared_up_to_a_stop_string_of_the_model(
    files: ModelFiles, text: str, sent: str
) -> None:
    """A model of Ollama's store with the parameter `stop` failed, because only the server knows
    stop strings."""
    stops = {**files.generation_config, "stop_strings": ["STOP", "END"]}
    proof = Proof(replace(files, generation_config=stops), Settings(), ProofOptions())
    ids = Tokenizer.load(files).encode(text, add_special_tokens=False)
    tokens = tuple(Token(job_id="", id=id, timestamp_ns=0, logprob=-1.0) for id in ids)
    found = proof.cut_at_stop_string(Answer(tokens=tokens, reason="length"))
    assert found.tokens == tokens[: len(sent)]  # a token is a character
    assert found.reason == ("length" if sent == text else "stop")


def read_files(folder: Path) -> ModelFiles:
    return complete_config(store.find(str(folder)))


def prove(
    files: ModelFiles,
    *,
    conversations: int = CONVERSATIONS,
    seconds: float = 1000,
    last: str = "",
    kv: KVPrecision = "auto",
    context: int | None = None,
    adapters: tuple[AdapterSettings, ...] = (),
) -> tuple[Reference, dict[str, ConditionReport]]:
    """Runs the conditions up to `last`, by default all that the engine has."""
    options = ProofOptions(conversations=conversations, seconds=seconds)
    proof = Proof(files, Settings(kv=kv, context=context, adapters=adapters), options)
    reference = proof.compute_reference()
    reports: dict[str, ConditionReport] = {}
    for report in proof.run(reference, lambda _: None):
        reports[report.name] = report
        if report.name == last:
            break
    return reference, reports


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return read_files(tiny.write(tmp_path_factory.mktemp("prove") / "tiny"))


@needs_kernels
def test_conversations_alternate_between_the_adapters_and_the_model(
    files: ModelFiles, tmp_path: Path
) -> None:
    paths = {name: write_adapter(tmp_path / name, index) for index, name in enumerate("xy")}
    adapters = tuple(AdapterSettings(name=name, path=str(path)) for name, path in paths.items())
    reference, reports = prove(files, adapters=adapters, last="batched + cached")
    used = [chain[0].job.job.adapter for chain in reference.chains]
    assert used == ["x", "y", "", "x"]
    assert "adapter x), turn 1" in reference.requests[0].label
    assert all(report.passed and report.equal == report.answers for report in reports.values())
    plain, _ = prove(files, last="batched")
    pairs = zip(reference.chains, plain.chains, strict=True)
    differs = [a[0].expected.ids != b[0].expected.ids for a, b in pairs]
    assert differs == [True, True, False, True]


@needs_kernels
@pytest.mark.parametrize(
    ("kv", "context"),
    [
        ("float32", None),
        pytest.param("bfloat16", 1024, marks=pytest.mark.exhaustive),
        ("float16", 99_999),
    ],
)
def test_a_correct_engine_passes_every_condition(
    files: ModelFiles, kv: KVPrecision, context: int | None
) -> None:
    """Also with a configured context, and with one that is longer than the model's."""
    reference, reports = prove(files, kv=kv, context=context)
    assert reference.capacity.kv_dtype == kv
    assert [len(chain) for chain in reference.chains] == [2] * CONVERSATIONS
    assert len({one.expected.ids for one in reference.requests}) > CONVERSATIONS
    assert all(report.passed and report.answers for report in reports.values()), reports
    assert all(report.tolerance is None for name, report in reports.items() if "kern" not in name)
    assert reports["cached"].answers == 2 * len(reference.requests)
    assert "preemption" in reports["preempted"].detail
    assert not reports["cached"].detail.startswith("0 ")
    # another rounding is not hidden
    assert 0 < reports["without kernels"].largest < 1e-3


ARCHITECTURES = {
    case.id: case for case in cases() if case.name == "plain" and case.config.get("vocab_size")
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "qwen3_next-plain" else pytest.mark.exhaustive)
        for name in sorted(ARCHITECTURES)
    ],
)
def test_the_architectures_pass(name: str, tmp_path: Path) -> None:
    config = {**ARCHITECTURES[name].config, "vocab_size": tiny.VOCAB}
    tiny.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    parity.save_reference(Case(name="proof", config=config), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written |= {"max_position_embeddings": 2048, "eos_token_id": tiny.END}
    (tmp_path / "config.json").write_text(json.dumps(written))
    _, reports = prove(read_files(tmp_path), conversations=2)
    if kernels.ops() is None:
        del reports["without kernels"]
    assert all(report.passed and report.answers for report in reports.values()), reports


@needs_kernels
@pytest.mark.parametrize("bits", [16, 8])
def test_fewer_bits_of_activations_pass_every_condition(
    bits: ActivationBits, tmp_path: Path
) -> None:
    """With 8 bits, except the comparison with MLX's operations, which round less."""
    folder = tiny.write(tmp_path / "tiny", hidden_size=64, intermediate_size=128)
    files = read_files(folder)
    options = ProofOptions(conversations=2)
    proof = Proof(files, Settings(quantize=8, activations=bits), options)
    reference = proof.compute_reference()
    reports = {report.name: report for report in proof.run(reference, lambda _: None)}
    compared = reports.pop("without kernels")
    if bits == 16:
        assert compared.passed
        assert compared.answers == len(reference.requests)
        assert compared.tolerance == 0.05
        assert 0 < compared.largest < 0.05
    else:
        assert compared.answers == 0
        assert "--activations 8" in compared.detail
    assert all(report.passed and report.answers for report in reports.values()), reports
    assert all(report.tolerance is None for report in reports.values())


@needs_kernels
def test_mlx_operations_that_give_no_answer_in_time_are_not_compared(files: ModelFiles) -> None:
    # so few seconds that the process cannot even start
    _, reports = prove(files, seconds=0.01)
    report = reports["without kernels"]
    assert report.passed
    assert not report.answers
    assert report.detail == "MLX's operations gave no answer in 0 s: raise --seconds"


def test_without_equal_bits_the_tolerance_applies(files: ModelFiles) -> None:
    proof = Proof(files, Settings(), ProofOptions())
    reference = Reference(
        chains=(), long=(), long_skipped="", capacity=_capacity(proof), batch_invariant=False
    )
    assert proof.tolerance(reference) == 0.01
    assert proof.tolerance(replace(reference, batch_invariant=True)) is None
    exact = Proof(files, Settings(exact=True), ProofOptions())
    assert exact.tolerance(reference) is None


def _capacity(proof: Proof) -> Any:
    with proof.open_engine() as engine:
        return engine.capacity


# one wrong bit


def flip_bit(array: mx.array) -> mx.array:
    """Flips the lowest bit of the first number of the last axis, in each row."""
    bits = mx.view(array, mx.uint32)
    flipped = mx.concatenate([bits[..., :1] ^ 1, bits[..., 1:]], axis=-1)
    return mx.view(flipped, mx.float32)


def break_kernel(patch: pytest.MonkeyPatch) -> None:
    """A matrix product whose result depends on the number of rows."""
    multiply: Callable[[Any, mx.array], mx.array] = KernelLinear.__call__

    def call(layer: KernelLinear, x: mx.array) -> mx.array:
        result = multiply(layer, x)
        return flip_bit(result) if x.shape[0] > 2 and x.size == x.shape[0] * x.shape[-1] else result

    patch.setattr(KernelLinear, "__call__", call)


def break_cache(patch: pytest.MonkeyPatch) -> None:
    """A copy of a cached prefix that is not the original."""
    append = KVCache.append

    def append_wrong(cache: KVCache, other: KVCache, start: int, end: int) -> None:
        append(cache, other, start, end)
        if start < end:
            keys, values = cache.take_buffers()
            cache.return_buffers(keys, flip_bit(values))

    patch.setattr(KVCache, "append", append_wrong)


def break_mask(patch: pytest.MonkeyPatch) -> None:
    """A prefill chunk that does not attend to the first position."""
    allocate = KVCache.allocate_slots

    def allocate_wrong(cache: KVCache, keys: mx.array, values: mx.array) -> SlotMapping:
        place = allocate(cache, keys, values)
        if place.write_slot == ODD_CHUNK and keys.shape[2] > 1:
            return place._replace(window=place.length - 1)
        return place

    patch.setattr(KVCache, "allocate_slots", allocate_wrong)


@needs_kernels
@pytest.mark.parametrize(
    ("break_part", "failing", "passing"),
    [
        (break_kernel, "batched", ("cached", "chunked")),
        (break_cache, "cached", ("batched", "chunked")),
        (break_mask, "chunked", ("batched", "cached")),
    ],
)
def test_one_wrong_bit_fails_the_condition_that_contains_it(
    files: ModelFiles,
    monkeypatch: pytest.MonkeyPatch,
    break_part: Callable[[pytest.MonkeyPatch], None],
    failing: str,
    passing: tuple[str, ...],
) -> None:
    break_part(monkeypatch)
    # so few seconds that the long answers are skipped
    _, reports = prove(files, seconds=0.01, last="chunked")
    report = reports[failing]
    assert not report.passed
    assert report.first_difference is not None
    assert report.first_difference.startswith("conversation ")
    assert ", token " in report.first_difference
    assert all(reports[name].passed for name in passing), reports
