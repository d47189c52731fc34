"""Embedding requests with a real engine: pooling as configured in the model's folder, errors for
unsupported requests, and cancellation."""

import asyncio
import contextlib
import itertools
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

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.jobs import ContextLimit
from app.core.model_files import ModelFiles
from app.core.ports import Runner
from app.core.requests import Embeddings, EmbedInput, EmbedJob, EmbedRequest, PoolingType
from app.core.settings import Settings
from app.core.thread_pools import ThreadPools
from app.engine.loop import Loop
from app.engine.model_info import complete_config
from app.runners.admission import Admission
from app.runners.thread_runner import ThreadRunner
from app.serving.embeddings import EmbeddingService
from app.serving.pooling_config import read_pooling_config
from app.text.tokenizer import Tokenizer
from models import architectures
from tests import tiny, tiny_encoder
from tests.batches import flatten
from tests.engine.harness import job
from tests.models import parity, test_mlx_lm_adapter

PATIENCE = 30.0
WIDTH = tiny.CONFIG["hidden_size"]


def build_request(*contents: str | tuple[int | str, ...], name: str, **fields: Any) -> EmbedRequest:
    inputs = tuple(EmbedInput(content=c, param=f"input.{i}") for i, c in enumerate(contents))
    return EmbedRequest(model=name, inputs=inputs, **fields)


def build_service(files: ModelFiles, runner: Runner, settings: Settings) -> EmbeddingService:
    def context_limit() -> ContextLimit:
        return ContextLimit(
            model_context=files.context_length,
            configured_context=files.resolve_context_length(settings.context),
            capacity=runner.status().capacity,
        )

    engine = Admission(runner, settings.max_queue)
    return EmbeddingService(files, engine, Tokenizer.load(files), context_limit, ThreadPools())


@contextlib.asynccontextmanager
async def run_service(
    folder: Path, **changes: Any
) -> AsyncIterator[tuple[EmbeddingService, ThreadRunner]]:
    settings = Settings(prefill_chunk=16, debug=True, **changes)
    files, runner = complete_config(store.resolve(str(folder))), ThreadRunner(settings)
    await runner.start(files)
    try:
        async with asyncio.timeout(PATIENCE):
            yield build_service(files, runner, settings), runner
    finally:
        await runner.stop()


def embed(folder: Path, *contents: str | tuple[int | str, ...], **fields: Any) -> Embeddings:
    settings = fields.pop("settings", {})

    async def run() -> Embeddings:
        async with run_service(folder, **settings) as (service, _):
            return await service.embed(build_request(*contents, name=folder.name, **fields))

    return asyncio.run(run())


def get_error(folder: Path, *contents: str | tuple[int, ...], **fields: Any) -> AppError:
    with pytest.raises(AppError) as caught:
        embed(folder, *contents, **fields)
    return caught.value


def read_floats(vector: bytes) -> Any:
    return np.frombuffer(vector, "<f4")


def compute_expected(ids: Sequence[int], pooling: PoolingType = "mean") -> Any:
    model = architectures.build(tiny.CONFIG, tiny.weights())
    hidden = np.array(model(mx.array([ids]), model.make_kv())[0])
    pooled = hidden.mean(axis=0) if pooling == "mean" else hidden[-1]
    return pooled / np.linalg.norm(pooled)


def pooling_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def test_texts_and_token_ids_are_embedded(tiny_model: Path):
    embeddings = embed(tiny_model, "hello", (1, 2, 3), "a longer text than a chunk has room for")
    ids = [b"hello", (1, 2, 3), b"a longer text than a chunk has room for"]
    for vector, input_ in zip(embeddings.vectors, ids, strict=True):
        np.testing.assert_allclose(read_floats(vector), compute_expected(list(input_)), atol=1e-4)
    assert embeddings.prompt_tokens == sum(map(len, ids))


def test_tokens_and_texts_may_be_mixed(tiny_model: Path):
    embeddings = embed(tiny_model, (1, "hello", 2))
    ids = [1, *b"hello", 2]
    np.testing.assert_allclose(read_floats(embeddings.vectors[0]), compute_expected(ids), atol=1e-4)
    assert embeddings.prompt_tokens == 7


def test_the_request_selects_pooling_and_dimensions(tiny_model: Path):
    [vector] = embed(tiny_model, "hello", pooling="last", dimensions=5).vectors
    reference = compute_expected(list(b"hello"), "last")[:5]
    np.testing.assert_allclose(
        read_floats(vector), reference / np.linalg.norm(reference), atol=1e-4
    )


def test_the_folder_configures_the_default_pooling(tmp_path: Path):
    folder = pooling_folder(tiny.write(tmp_path / "m"), {"pooling_mode_lasttoken": True})
    [vector] = embed(folder, "hello").vectors
    np.testing.assert_allclose(
        read_floats(vector), compute_expected(list(b"hello"), "last"), atol=1e-4
    )


def test_special_tokens_of_the_tokenizer_are_added(tmp_path: Path):
    """Models that pool the last token were trained with an end token, which the tokenizer adds."""
    folder = tiny.write(tmp_path / "m")
    path = str(folder / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(path)
    template = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", tiny.END)]
    )
    inner.post_processor = template  # pyright: ignore[reportAttributeAccessIssue]  # the stub lacks it
    inner.save(path)
    tokenizer = Tokenizer.load(store.resolve(str(folder)))
    assert tokenizer.encode_for_embedding("hi") == [*b"hi", tiny.END]
    assert tokenizer.encode("hi", add_special_tokens=True) == list(b"hi")
    [vector] = embed(folder, "hi", pooling="last").vectors
    np.testing.assert_allclose(
        read_floats(vector), compute_expected([*b"hi", tiny.END], "last"), atol=1e-4
    )


def test_an_input_may_be_as_long_as_the_context(tiny_model: Path):
    settings = {"context": 300}
    assert embed(tiny_model, "a" * 300, settings=settings).prompt_tokens == 300
    error = get_error(tiny_model, "fine", "a" * 301, settings=settings)
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "input.1")
    assert "301 tokens, but an input can have at most 300" in error.message
    error = get_error(tiny_model, (1,) * 301, settings=settings)
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "input.0")


def test_a_huge_text_is_tokenized_only_up_to_a_bound(tiny_model: Path):
    error = get_error(tiny_model, "a" * 3_000_000, settings={"context": 100})
    assert "more than" in error.message


def test_the_sum_of_all_inputs_is_bounded(tiny_model: Path):
    error = get_error(tiny_model, *["a" * 3000] * 101)
    assert (error.kind, error.param) == (ErrorKind.INVALID, "input")
    assert "300000" in error.message


@pytest.mark.parametrize("token", [258, -1])
def test_token_ids_are_checked_against_the_vocabulary(tiny_model: Path, token: int):
    error = get_error(tiny_model, "fine", (1, token, 2))
    assert (error.kind, error.param) == (ErrorKind.INVALID, "input.1")
    assert f"{token} is not a token ID" in error.message


def test_too_many_dimensions_are_rejected(tiny_model: Path):
    assert len(read_floats(embed(tiny_model, "a", dimensions=WIDTH).vectors[0])) == WIDTH
    error = get_error(tiny_model, "a", dimensions=WIDTH + 1)
    assert (error.kind, error.param) == (ErrorKind.INVALID, "dimensions")
    assert f"{WIDTH} dimensions" in error.message


def test_a_model_of_mlx_lm_is_rejected_with_the_reason(tmp_path: Path):
    parity.save_reference(test_mlx_lm_adapter.CASES[0], tmp_path)
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    error = get_error(tmp_path, (1, 2))
    assert (error.kind, error.param) == (ErrorKind.INVALID, "model")
    assert "no hidden states" in error.message


def test_requests_before_the_model_is_loaded_are_rejected(tiny_model: Path):
    files = complete_config(store.resolve(str(tiny_model)))
    service = build_service(files, ThreadRunner(Settings()), Settings())
    with pytest.raises(AppError) as caught:
        asyncio.run(service.embed(build_request("a", name=tiny_model.name, dimensions=3)))
    assert caught.value.kind == ErrorKind.LOADING


# pooling configuration

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
def test_the_pooling_configuration_is_read(
    tmp_path: Path, config: dict[str, Any], pooling: str | None, problem: str | None
):
    files = store.resolve(str(pooling_folder(tiny.write(tmp_path / "m"), config)))
    pooling_config = read_pooling_config(files)
    if problem is None:
        assert (pooling_config.pooling, pooling_config.unsupported) == (pooling, None)
    else:
        assert problem in (pooling_config.unsupported or "")


@pytest.mark.parametrize("text", ["", "{", "[]", '"a"', "\xff"])
def test_an_invalid_pooling_configuration_is_ignored(tmp_path: Path, text: str):
    folder = pooling_folder(tiny.write(tmp_path / "m"), {})
    (folder / "1_Pooling" / "config.json").write_bytes(text.encode("latin-1"))
    (folder / "modules.json").write_bytes(text.encode("latin-1"))
    assert read_pooling_config(store.resolve(str(folder))).unsupported is None


def test_unsupported_modules_are_a_problem(tmp_path: Path):
    folder = pooling_folder(tiny.write(tmp_path / "m"), {"pooling_mode": "mean"})
    (folder / "modules.json").write_text(json.dumps(MODULES))
    assert read_pooling_config(store.resolve(str(folder))).unsupported is None
    (folder / "modules.json").write_text(json.dumps([*MODULES, DENSE]))
    assert "Dense" in (read_pooling_config(store.resolve(str(folder))).unsupported or "")


@pytest.mark.parametrize("fields", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_bidirectional_attention_is_a_problem(tiny_model: Path, fields: dict[str, Any]):
    files = store.resolve(str(tiny_model))
    bidirectional = read_pooling_config(replace(files, config={**files.config, **fields}))
    assert "only causal attention is supported" in (bidirectional.unsupported or "")
    assert read_pooling_config(files).unsupported is None


def test_unsupported_pooling_is_an_error_unless_the_request_overrides_it(tmp_path: Path):
    folder = pooling_folder(tiny.write(tmp_path / "m"), {"pooling_mode_cls_token": True})
    error = get_error(folder, "hello")
    assert (error.kind, error.param) == (ErrorKind.INVALID, "pooling")
    assert "its pooling is cls_token" in error.message
    [vector] = embed(folder, "hello", pooling="mean").vectors
    np.testing.assert_allclose(read_floats(vector), compute_expected(list(b"hello")), atol=1e-4)


# the runner


# inputs of 4000 tokens each: more than any machine embeds during a test
NUM_INPUTS = 20_000


def endless_job(name: str) -> EmbedJob:
    return EmbedJob(id=name, inputs=((1,) * 4000,) * NUM_INPUTS, pooling="mean")


def test_cancelling_the_task_cancels_the_job(tiny_model: Path):
    async def run() -> None:
        async with run_service(tiny_model) as (service, runner):
            task = asyncio.create_task(runner.embed(endless_job("a")))
            async with asyncio.timeout(PATIENCE):
                while not runner.status().stats.embedded_tokens:  # noqa: ASYNC110  # changed by another thread
                    await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            # the step of the next job shows that the cancelled one is gone
            await service.embed(build_request("b", name=tiny_model.name))
            assert runner.status().stats.embedding_jobs == 0
            assert runner.status().stats.embedded_tokens < NUM_INPUTS * 4000
            assert runner.status().stats.ledger.kv == 0

    asyncio.run(run())


def test_a_crash_of_the_engine_fails_the_waiting_requests(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    def die(_: Loop) -> Any:
        raise AssertionError("planted")

    async def run() -> None:
        async with run_service(tiny_model) as (service, _):
            monkeypatch.setattr(Loop, "step", die)
            with pytest.raises(AppError, match="the engine stopped") as caught:
                await service.embed(build_request("a", name=tiny_model.name))
            assert caught.value.kind == ErrorKind.ENGINE

    asyncio.run(run())


def test_streams_continue_while_many_inputs_are_embedded(tiny_model: Path):
    async def run() -> None:
        async with run_service(tiny_model) as (_, runner):
            task = asyncio.create_task(runner.embed(endless_job("a")))
            one = job("s", b"hello", max_tokens=100, stop_token_ids=frozenset())
            async with runner.submit(one) as submission:
                updates = [update async for update in flatten(submission)]
            assert len(updates) > 100
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def rank(folder: Path, query: str, *documents: str, **changes: Any) -> list[float]:
    found = embed(folder, *documents, query=query, settings=changes)
    return [float(read_floats(vector)[0]) for vector in found.vectors]


def test_a_reranker_scores_each_document_as_it_does_alone(tmp_path: Path):
    folder = tiny_encoder.write(tmp_path / "m", "bert-reranker")
    documents = ["w5 w6", "w7", "w8 w9 w10"]
    together = rank(folder, "w1 w2", *documents)
    assert [rank(folder, "w1 w2", document) for document in documents] == [[s] for s in together]
    assert len(set(together)) == 3
    assert all(0 < score < 1 for score in together)


def test_the_end_of_a_document_that_is_too_long_is_ignored(tmp_path: Path):
    folder = tiny_encoder.write(tmp_path / "m", "bert-reranker")
    # [CLS] w1 [SEP], the document, and [SEP], in 64 positions
    full = " ".join(["w5"] * 60)
    assert rank(folder, "w1", full) == rank(folder, "w1", full + " w6" * 1000)
    with pytest.raises(AppError, match="shorten the query") as caught:
        rank(folder, "w1 " * 62, "w5")
    assert (caught.value.kind, caught.value.param) == (ErrorKind.CONTEXT_LENGTH, "query")


def test_a_model_without_scores_is_no_reranker(tmp_path: Path):
    folder = tiny_encoder.write(tmp_path / "m", "bert")
    error = get_error(folder, "w1", query="w2")
    assert (error.kind, error.param) == (ErrorKind.INVALID, "model")
    assert "use a reranker" in error.message


def test_a_qwen3_reranker_compares_the_logits_of_yes_and_no(tmp_path: Path):
    """The model has random weights, so this tests only the definition: sigmoid(yes - no)."""
    folder = tiny.write(
        tmp_path / "tiny-reranker", model_type="qwen3", head_dim=16, vocab_size=tiny.VOCAB + 2
    )
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    for layer, name in itertools.product(range(tiny.CONFIG["num_hidden_layers"]), "qk"):
        weights[f"model.layers.{layer}.self_attn.{name}_norm.weight"] = mx.ones(16)
    mx.save_safetensors(file, weights)
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.add_tokens(["yes", "no"])
    words.save(str(folder / "tokenizer.json"))
    first, second = rank(folder, "why", "because", "no idea")
    assert rank(folder, "why", "because") == [first]
    assert 0 < first < 1
    assert first != second
