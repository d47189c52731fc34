"""From a request for vectors to a real engine and back: what the model's folder says is done, what
cannot be is refused with a reason, and whoever leaves takes nothing along."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tokenizers
from tokenizers import processors

import models
from app import store
from app.core.embeddings import Embeddings, EmbedInput, EmbedJob, EmbedRequest, PoolingType
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.model_state import ContextLimit
from app.core.ports import Runner
from app.core.settings import Settings
from app.core.thread_pools import ThreadPools
from app.engine.loop import Loop
from app.engine.model_info import complete_config
from app.runners.admission import Admission
from app.runners.thread_runner import ThreadRunner
from app.serving.embeddings import EmbeddingService, read_pooling_config
from app.text.tokenizer import Tokenizer
from tests import tiny
from tests.engine.harness import job
from tests.models import parity, test_mlx_lm_adapter

PATIENCE = 30.0
WIDTH = tiny.CONFIG["hidden_size"]


def asked(*contents: str | tuple[int, ...], name: str, **fields: Any) -> EmbedRequest:
    inputs = tuple(EmbedInput(content=c, param=f"input.{i}") for i, c in enumerate(contents))
    return EmbedRequest(model=name, inputs=inputs, **fields)


def embedding(files: ModelFiles, runner: Runner, settings: Settings) -> EmbeddingService:
    def room() -> ContextLimit:
        return ContextLimit(
            model_context=files.context_length,
            configured_context=files.resolve_context_length(settings.context),
            capacity=runner.status().capacity,
        )

    engine = Admission(runner, settings.max_queue)
    return EmbeddingService(files, engine, Tokenizer.load(files), room, ThreadPools())


@contextlib.asynccontextmanager
async def served(
    folder: Path, **changes: Any
) -> AsyncIterator[tuple[EmbeddingService, ThreadRunner]]:
    settings = Settings(prefill_chunk=16, debug=True, **changes)
    files, runner = complete_config(store.resolve(str(folder))), ThreadRunner(settings)
    await runner.start(files)
    try:
        async with asyncio.timeout(PATIENCE):
            yield embedding(files, runner, settings), runner
    finally:
        await runner.stop()


def embed(folder: Path, *contents: str | tuple[int, ...], **fields: Any) -> Embeddings:
    settings = fields.pop("settings", {})

    async def run() -> Embeddings:
        async with served(folder, **settings) as (made, _):
            return await made.embed(asked(*contents, name=folder.name, **fields))

    return asyncio.run(run())


def refused(folder: Path, *contents: str | tuple[int, ...], **fields: Any) -> AppError:
    with pytest.raises(AppError) as caught:
        embed(folder, *contents, **fields)
    return caught.value


def numbers(vector: bytes) -> Any:
    return np.frombuffer(vector, "<f4")


def expected(ids: Sequence[int], pooling: PoolingType = "mean") -> Any:
    model = models.build(tiny.CONFIG, tiny.weights())
    hidden = np.array(model(mx.array([ids]), model.make_kv())[0])
    found = hidden.mean(axis=0) if pooling == "mean" else hidden[-1]
    return found / np.linalg.norm(found)


def pooling_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def test_texts_and_ids_become_vectors(tiny_model: Path):
    found = embed(tiny_model, "hello", (1, 2, 3), "a longer text than a chunk has room for")
    ids = [b"hello", (1, 2, 3), b"a longer text than a chunk has room for"]
    for vector, one in zip(found.vectors, ids, strict=True):
        np.testing.assert_allclose(numbers(vector), expected(list(one)), atol=1e-4)
    assert found.prompt_tokens == sum(map(len, ids))


def test_pooling_and_dimensions_are_the_requests(tiny_model: Path):
    [vector] = embed(tiny_model, "hello", pooling="last", dimensions=5).vectors
    wanted = expected(list(b"hello"), "last")[:5]
    np.testing.assert_allclose(numbers(vector), wanted / np.linalg.norm(wanted), atol=1e-4)


def test_the_folder_says_which_pooling(tmp_path: Path):
    folder = pooling_folder(tiny.write(tmp_path / "m"), {"pooling_mode_lasttoken": True})
    [vector] = embed(folder, "hello").vectors
    np.testing.assert_allclose(numbers(vector), expected(list(b"hello"), "last"), atol=1e-4)


def test_what_ends_a_text_is_part_of_it(tmp_path: Path):
    """Models that pool the last token were trained with an end there, which tokenizers add."""
    folder = tiny.write(tmp_path / "m")
    path = str(folder / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(path)
    ended = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", tiny.END)]
    )
    inner.post_processor = ended  # pyright: ignore[reportAttributeAccessIssue]  # the stub lacks it
    inner.save(path)
    tokenizer = Tokenizer.load(store.resolve(str(folder)))
    assert tokenizer.encode_for_embedding("hi") == [*b"hi", tiny.END]
    assert tokenizer.encode("hi", add_special_tokens=True) == list(b"hi")
    [vector] = embed(folder, "hi", pooling="last").vectors
    np.testing.assert_allclose(numbers(vector), expected([*b"hi", tiny.END], "last"), atol=1e-4)


def test_an_input_may_be_as_long_as_the_context_and_no_longer(tiny_model: Path):
    settings = {"context": 300}
    assert embed(tiny_model, "a" * 300, settings=settings).prompt_tokens == 300
    error = refused(tiny_model, "fine", "a" * 301, settings=settings)
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "input.1")
    assert "301 tokens, but an input can have at most 300" in error.message
    error = refused(tiny_model, (1,) * 301, settings=settings)
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "input.0")


def test_a_text_beyond_all_bounds_costs_no_more_than_a_context(tiny_model: Path):
    error = refused(tiny_model, "a" * 3_000_000, settings={"context": 100})
    assert "more than" in error.message


def test_all_inputs_together_are_bounded(tiny_model: Path):
    error = refused(tiny_model, *["a" * 3000] * 101)
    assert (error.kind, error.param) == (ErrorKind.INVALID, "input")
    assert "300000" in error.message


@pytest.mark.parametrize("token", [258, -1])
def test_ids_are_held_against_the_vocabulary(tiny_model: Path, token: int):
    error = refused(tiny_model, "fine", (1, token, 2))
    assert (error.kind, error.param) == (ErrorKind.INVALID, "input.1")
    assert f"{token} is not a token id" in error.message


def test_more_dimensions_than_there_are_are_refused(tiny_model: Path):
    assert len(numbers(embed(tiny_model, "a", dimensions=WIDTH).vectors[0])) == WIDTH
    error = refused(tiny_model, "a", dimensions=WIDTH + 1)
    assert (error.kind, error.param) == (ErrorKind.INVALID, "dimensions")
    assert f"{WIDTH} dimensions" in error.message


def test_a_model_of_mlx_lms_is_refused_with_the_reason(tmp_path: Path):
    parity.saved(test_mlx_lm_adapter.CASES[0], tmp_path)
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    error = refused(tmp_path, (1, 2))
    assert (error.kind, error.param) == (ErrorKind.INVALID, "model")
    assert "no hidden states" in error.message


def test_nobody_is_served_before_the_model_is_there(tiny_model: Path):
    files = complete_config(store.resolve(str(tiny_model)))
    made = embedding(files, ThreadRunner(Settings()), Settings())
    with pytest.raises(AppError) as caught:
        asyncio.run(made.embed(asked("a", name=tiny_model.name, dimensions=3)))
    assert caught.value.kind == ErrorKind.LOADING


# what folders say

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {
        "idx": 2,
        "name": "2",
        "path": "2_Normalize",
        "type": "sentence_transformers.models.Normalize",
    },
]
DENSE = {"idx": 3, "name": "3", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.mark.parametrize(
    ("config", "pooling", "problem"),
    [
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last", None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean", None),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 8}, "last", None),
        ({"pooling_mode": "mean"}, "mean", None),
        ({"pooling_mode_cls_token": True}, None, "cls_token"),
        ({"pooling_mode": "weightedmean"}, None, "weightedmean"),
        ({"pooling_mode": ["mean", "max"]}, None, "max"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            None,
            "mean_tokens and max_tokens",
        ),
        ({}, None, "none"),
    ],
)
def test_a_folders_pooling_is_read(
    tmp_path: Path, config: dict[str, Any], pooling: str | None, problem: str | None
):
    files = store.resolve(str(pooling_folder(tiny.write(tmp_path / "m"), config)))
    found = read_pooling_config(files)
    if problem is None:
        assert (found.pooling, found.unsupported) == (pooling, None)
    else:
        assert problem in (found.unsupported or "")


@pytest.mark.parametrize("text", ["", "{", "[]", '"a"', "\xff"])
def test_a_folder_whose_pooling_cannot_be_read_says_nothing(tmp_path: Path, text: str):
    folder = pooling_folder(tiny.write(tmp_path / "m"), {})
    (folder / "1_Pooling" / "config.json").write_bytes(text.encode("latin-1"))
    (folder / "modules.json").write_bytes(text.encode("latin-1"))
    assert read_pooling_config(store.resolve(str(folder))).unsupported is None


def test_modules_that_are_not_here_are_a_problem(tmp_path: Path):
    folder = pooling_folder(tiny.write(tmp_path / "m"), {"pooling_mode": "mean"})
    (folder / "modules.json").write_text(json.dumps(MODULES))
    assert read_pooling_config(store.resolve(str(folder))).unsupported is None
    (folder / "modules.json").write_text(json.dumps([*MODULES, DENSE]))
    assert "Dense" in (read_pooling_config(store.resolve(str(folder))).unsupported or "")


@pytest.mark.parametrize("said", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_model_that_looks_both_ways_is_a_problem(tiny_model: Path, said: dict[str, Any]):
    files = store.resolve(str(tiny_model))
    both = read_pooling_config(replace(files, config={**files.config, **said}))
    assert "only causal attention is supported" in (both.unsupported or "")
    assert read_pooling_config(files).unsupported is None


def test_a_problem_is_told_unless_the_request_says_what_it_wants(tmp_path: Path):
    folder = pooling_folder(tiny.write(tmp_path / "m"), {"pooling_mode_cls_token": True})
    error = refused(folder, "hello")
    assert (error.kind, error.param) == (ErrorKind.INVALID, "pooling")
    assert "its pooling is cls_token" in error.message
    [vector] = embed(folder, "hello", pooling="mean").vectors
    np.testing.assert_allclose(numbers(vector), expected(list(b"hello")), atol=1e-4)


# the runner


# inputs, of 4000 tokens each: more than any machine embeds while a test runs
MANY = 20_000


def endless(name: str) -> EmbedJob:
    return EmbedJob(id=name, inputs=((1,) * 4000,) * MANY, pooling="mean")


def test_whoever_stops_waiting_cancels(tiny_model: Path):
    async def run() -> None:
        async with served(tiny_model) as (made, runner):
            waiting = asyncio.create_task(runner.embed(endless("a")))
            async with asyncio.timeout(PATIENCE):
                while not runner.status().stats.embedded_tokens:  # noqa: ASYNC110  # another thread's
                    await asyncio.sleep(0.005)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            # the next one's step tells that nobody else is embedded any more
            await made.embed(asked("b", name=tiny_model.name))
            assert runner.status().stats.embedding_jobs == 0
            assert runner.status().stats.embedded_tokens < MANY * 4000
            assert runner.status().stats.ledger.kv == 0

    asyncio.run(run())


def test_when_the_engine_dies_those_who_wait_are_told(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    def die(_: Loop) -> Any:
        raise AssertionError("planted")

    async def run() -> None:
        async with served(tiny_model) as (made, _):
            monkeypatch.setattr(Loop, "step", die)
            with pytest.raises(AppError, match="the engine stopped") as caught:
                await made.embed(asked("a", name=tiny_model.name))
            assert caught.value.kind == ErrorKind.ENGINE

    asyncio.run(run())


def test_streams_go_on_while_many_inputs_are_embedded(tiny_model: Path):
    async def run() -> None:
        async with served(tiny_model) as (_, runner):
            waiting = asyncio.create_task(runner.embed(endless("a")))
            one = job("s", b"hello", max_tokens=100, stop_token_ids=frozenset())
            async with runner.submit(one) as submission:
                updates = [update async for update in submission]
            assert len(updates) > 100
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())
