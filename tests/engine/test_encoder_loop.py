"""The engine loop of an encoder: each input has the bits that it has alone, for every history of
jobs, and a failure ends only the job that caused it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import store
from app.core.errors import AppError
from app.core.requests import EmbedJob, EmbedResult, PoolingType
from app.core.settings import Settings
from app.engine import encoder_loop
from app.engine.encoder_loop import EncoderLoop
from app.engine.fit import estimate_fit
from app.engine.loader import load, load_engine
from app.engine.model_info import complete_config
from tests import tiny_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder.write(tmp_path_factory.mktemp("encoder") / "m", "modernbert")


@pytest.fixture(scope="module")
def loop(folder: Path) -> EncoderLoop:
    return open_loop(folder)


def open_loop(folder: Path, **settings: Any) -> EncoderLoop:
    files = complete_config(store.resolve(str(folder)))
    found = load_engine(files, Settings(**settings), lambda *_: None)
    assert isinstance(found, EncoderLoop)
    return found


def make_job(
    name: str, inputs: Sequence[Sequence[int]], pooling: PoolingType = "mean", **fields: Any
) -> EmbedJob:
    return EmbedJob(id=name, inputs=tuple(map(tuple, inputs)), pooling=pooling, **fields)


def run(loop: EncoderLoop) -> dict[str, EmbedResult]:
    found: dict[str, EmbedResult] = {}
    while not loop.idle:
        found |= {result.job_id: result for result in loop.step().embed_results}
    return found


def embed_alone(loop: EncoderLoop, ids: Sequence[int], pooling: PoolingType) -> bytes:
    loop.embed(make_job("alone", [ids], pooling))
    return run(loop)["alone"].vectors[0]


INPUTS = st.lists(st.lists(st.integers(3, 59), min_size=1, max_size=40), min_size=1, max_size=5)
POOLINGS = st.sampled_from(["mean", "cls", "last"])


@given(jobs=st.lists(st.tuples(INPUTS, POOLINGS), min_size=1, max_size=4), data=st.data())
def test_every_input_has_the_bits_that_it_has_alone(
    loop: EncoderLoop, jobs: list[tuple[list[list[int]], PoolingType]], data: st.DataObject
) -> None:
    found: dict[str, EmbedResult] = {}
    for number, (inputs, pooling) in enumerate(jobs):
        loop.embed(make_job(str(number), inputs, pooling))
        if data.draw(st.booleans()):
            found |= {result.job_id: result for result in loop.step().embed_results}
    found |= run(loop)
    assert loop.stats().embedding_jobs == 0
    for number, (inputs, pooling) in enumerate(jobs):
        expected = tuple(embed_alone(loop, ids, pooling) for ids in inputs)
        assert found[str(number)] == EmbedResult(job_id=str(number), vectors=expected)


def test_a_pass_has_a_limited_number_of_tokens_and_jobs_take_turns(
    loop: EncoderLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_loop, "MAX_TOKENS", 10)
    loop.embed(make_job("large", [[5] * 6] * 4))
    loop.embed(make_job("small", [[7] * 6]))
    ended = []
    while not loop.idle:
        before = loop.stats().embedded_tokens
        ended += [result.job_id for result in loop.step().embed_results]
        assert loop.stats().embedded_tokens - before == 6
    assert ended == ["small", "large"]


def test_a_cancelled_job_has_no_result(loop: EncoderLoop) -> None:
    loop.embed(make_job("a", [[5]]))
    loop.embed(make_job("b", [[6]]))
    loop.cancel("a")
    assert list(run(loop)) == ["b"]


def test_dimensions_shorten_an_embedding(loop: EncoderLoop) -> None:
    loop.embed(make_job("a", [[5, 6]], dimensions=4))
    vector = np.frombuffer(run(loop)["a"].vectors[0], "<f4")
    assert (len(vector), float(np.linalg.norm(vector))) == (4, pytest.approx(1))


def test_a_failing_input_ends_only_its_own_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = open_loop(folder)
    encode = loop._model.encode  # pyright: ignore[reportPrivateUsage]  # a failure of the device

    def fail(tokens: mx.array, *rest: Any) -> mx.array:
        if mx.any(tokens == 13).item():
            raise RuntimeError("out of memory")
        return encode(tokens, *rest)

    monkeypatch.setattr(loop._model, "encode", fail)  # pyright: ignore[reportPrivateUsage]
    loop.embed(make_job("good", [[5], [6]]))
    loop.embed(make_job("bad", [[13]]))
    found = run(loop)
    assert found["bad"].error is not None
    assert len(found["good"].vectors) == 2


def test_a_reranker_scores_pairs_with_their_segments(tmp_path: Path) -> None:
    folder = tiny_encoder.write(tmp_path / "m", "bert-reranker")
    assert complete_config(store.resolve(str(folder))).num_scores == 1
    loop = open_loop(folder)
    pairs = [[1, 5, 6, 2, 7, 2], [1, 5, 6, 2, 9, 9, 9, 2]]
    loop.embed(make_job("a", pairs, "rank", first_segments=(4, 4)))
    loop.embed(make_job("b", [pairs[1]], "rank", first_segments=(4,)))
    loop.embed(make_job("c", [pairs[1]], "rank", first_segments=(8,)))
    loop.embed(make_job("d", [pairs[1]]))
    found = run(loop)
    first, second = (np.frombuffer(vector, "<f4") for vector in found["a"].vectors)
    assert first.shape == (1,)
    assert first != second
    assert found["b"].vectors[0] == found["a"].vectors[1] != found["c"].vectors[0]
    assert len(found["d"].vectors[0]) == 4 * tiny_encoder.WIDTH


def test_the_estimate_includes_the_activations_of_the_longest_input(folder: Path) -> None:
    files = complete_config(store.resolve(str(folder)))
    short, full = (estimate_fit(files, Settings(context=count)) for count in (64, 512))
    assert (short.kv_per_context, short.weights) == (0, full.weights)
    assert full.working > 4 * short.working
    ledger = open_loop(folder).stats().ledger
    assert ledger.weights + ledger.working <= ledger.budget


def test_an_encoder_does_not_run_on_several_ranks(folder: Path) -> None:
    files = complete_config(store.resolve(str(folder)))
    with pytest.raises(AppError, match="single process"):
        load(files, Settings(), lambda *_: None)
