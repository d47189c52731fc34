"""The requirements on a GPU: run by `make test-device`, on Metal or CUDA.

The device is MLX's default device. The reference is MLX on the CPU of the same machine, without our
kernels. Products in float32 are exact to float32 (tests/device/__main__.py), so that a difference
is an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from app import store
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.engine.known_answers import check_device, check_model_on_gpu, list_known_answers
from app.engine.model_info import complete_config
from app.prove.proof import Proof, ProofOptions
from models.base import Model
from models.cpu_layout import apply_cpu_layout
from models.gated_delta_metal import find_fault
from models.gpu_layout import apply_gpu_layout
from tests import tiny
from tests.engine.harness import assert_same, job, make_loop, run, run_one, tiny_model
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.kernel_switch import use_kernels
from tests.models.test_gpu_layout import CHAINS

pytestmark = pytest.mark.gpu

# The largest root mean square of the differences, relative to that of the logits.
TOLERANCE, TOLERANCE_OF_16_BITS = 2e-3, 5e-2

PROMPT, CHUNKS = 45, (20, 1, 17, 7)

NO_STOP = frozenset[int]()

FORMATS = [(case, kind) for case in cases() for kind in (None, *case.quantized)]
FORMAT_IDS = [f"{case.id}-{kind or 'unquantized'}" for case, kind in FORMATS]

# In 16 bits, a router may choose another expert.
DENSE = [case for case in cases() if case.id in ("llama-plain", "qwen3-plain", "gemma3_text-plain")]


@contextmanager
def on_the_cpu() -> Iterator[None]:
    device = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    try:
        with use_kernels(enabled=False):
            yield
    finally:
        mx.set_default_device(device)


def load_on_device(folder: Path) -> Model:
    model = parity.load_model(folder)
    assert isinstance(model, nn.Module)
    apply_cpu_layout(model)
    apply_gpu_layout(model)
    return model


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    assert np.isfinite(found).all()
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize(("case", "kind"), FORMATS, ids=FORMAT_IDS)
def test_the_device_computes_the_logits_of_the_cpu(
    case: Case, kind: str | None, tmp_path: Path
) -> None:
    """In one chunk, in chunks, and position by position."""
    prompt = parity.ids(case, PROMPT)
    with on_the_cpu():
        parity.save_reference(case, tmp_path, kind=kind)
        expected = parity.prefill(parity.load_model(tmp_path), prompt, [PROMPT])
    model = load_on_device(tmp_path)
    for chunks in ([PROMPT], CHUNKS, [1] * PROMPT):
        assert relative_error(parity.prefill(model, prompt, chunks), expected) < TOLERANCE, chunks


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.id)
def test_the_device_computes_in_16_bits(case: Case, dtype: mx.Dtype, tmp_path: Path) -> None:
    prompt = parity.ids(case, PROMPT)
    with on_the_cpu():
        parity.save_reference(case, tmp_path)
        expected = parity.prefill(parity.load_model(tmp_path), prompt, [PROMPT])
    model: Any = parity.load_model(tmp_path)
    model.set_dtype(dtype)
    apply_cpu_layout(model)
    for chunks in ([PROMPT], CHUNKS):
        found = parity.prefill(model, prompt, chunks)
        assert relative_error(found, expected) < TOLERANCE_OF_16_BITS, chunks


@pytest.mark.parametrize("name", CHAINS)
def test_compiled_chains_compute_the_same_on_the_device(name: str) -> None:
    chain, count = CHAINS[name]
    arrays = [3 * mx.random.normal((2, 1, 96), key=mx.random.key(i)) for i in range(count)]
    mx.eval(arrays)
    with on_the_cpu():
        expected = np.array(chain(*arrays))
    np.testing.assert_allclose(np.array(chain(*arrays)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case, kind in FORMATS if case.name == "plain"],
    ids=[name for name in FORMAT_IDS if "-plain-" in name],
)
def test_known_answers(case: Case, kind: str | None, tmp_path: Path) -> None:
    """The test of every load, without slow kernels."""
    with on_the_cpu():
        parity.save_reference(case, tmp_path, kind=kind)
    model = parity.load_model(tmp_path)
    if mx.default_device().type == mx.DeviceType.gpu:
        found = check_model_on_gpu(model)
        assert not found.wrong
        assert not [warning for warning in found.warnings if " fails " in warning]
        return
    with use_kernels(enabled=False):
        layers = model.make_kv()
        model(mx.zeros((1, 2), mx.int32), layers)
        streams = {"device": mx.new_stream(mx.Device(mx.cpu)), "reference": mx.Device(mx.cpu)}
        assert not check_device(list(list_known_answers(model, layers)), **streams).wrong


@pytest.mark.skipif(not mx.metal.is_available(), reason="the kernel is written for Metal")
@pytest.mark.parametrize(
    "sizes",
    [
        {"key_heads": 16, "value_heads": 32, "key_size": 128, "value_size": 128},
        {"key_heads": 16, "value_heads": 16, "key_size": 128, "value_size": 128},
        {"key_heads": 2, "value_heads": 4, "key_size": 32, "value_size": 6},
    ],
    ids=str,
)
def test_the_kernel_of_the_gated_delta_rule(sizes: dict[str, int]) -> None:
    """The first sizes are from Qwen3-Next and Qwen3.5."""
    assert find_fault(**sizes) is None


def make_prompts() -> Sequence[list[int]]:
    shared = np.random.default_rng(9).integers(1, 256, 60).tolist()
    return [
        [*shared[: 12 * i], *np.random.default_rng(i).integers(1, 256, 7 + 9 * i).tolist()]
        for i in range(5)
    ]


@pytest.mark.parametrize("policy", ["radix", "single", "multi_user"])
def test_batched_and_cached_tokens_are_those_of_a_request_alone(
    policy: str, ties: list[int]
) -> None:
    """Prompts of several lengths that share prefixes, twice, so that the second ones are cached."""
    model = tiny_model()
    samplings = ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_p": 0.9, "seed": 5})
    jobs = [
        job(f"{i} {j}", prompt, max_tokens=24, stop_token_ids=NO_STOP, **sampling)
        for i, sampling in enumerate(samplings)
        for j, prompt in enumerate(make_prompts())
    ]
    alone = {one.id: run_one(make_loop(model, chunk=32), one) for one in jobs}
    loop = make_loop(model, running=6, chunk=32, policy=policy)
    for _ in range(2):
        together = run(loop, *jobs)
        for one in jobs:
            ties.append(assert_same(together[one.id], alone[one.id]))


PROVEN = ("builtin", "llama-plain", "gemma3_text-plain", "gpt_oss-plain", "qwen3_next-plain")


@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_answers_are_the_same_under_every_condition_of_the_engine(
    name: str, exact: bool, tmp_path: Path
) -> None:
    """As `mlxrunner prove`: batched, cached, cancelled, preempted and others. With --exact, the
    bits are equal."""
    proof = Proof(
        _find_files(name, tmp_path),
        Settings(exact=exact),
        ProofOptions(conversations=4, seconds=60),
    )
    reference = proof.compute_reference()
    reports = list(proof.run(reference, lambda _: None))
    assert reports
    assert [report for report in reports if not report.passed] == []


def _find_files(name: str, folder: Path) -> ModelFiles:
    if name != "builtin":
        [case] = [case for case in cases() if case.id == name]
        with on_the_cpu():
            config = {**case.config, "vocab_size": tiny.VOCAB}
            parity.save_reference(replace(case, config=config), folder)
        tiny.tokenizer().save(str(folder / "tokenizer.json"))
    return complete_config(store.find("builtin" if name == "builtin" else str(folder)))
