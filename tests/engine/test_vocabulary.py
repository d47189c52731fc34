"""Ids that only the model has are never sampled, regardless of their logits; ids that only the
tokenizer has are harmless."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app import store
from app.core.model_files import ModelFiles
from app.core.requests import JsonSchema
from app.core.settings import Settings
from app.engine.loader import load
from app.grammar.compiler import GrammarCompiler
from tests import tiny
from tests.engine.harness import job, run_one

ROWS = 320
ANYTHING = JsonSchema(text="{}")


@pytest.fixture(scope="module")
def padded_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A head with more rows than the tokenizer has tokens. The extra rows score highest for any
    hidden state, because each one is followed by its negative."""
    folder = tiny.write(tmp_path_factory.mktemp("padded") / "model", vocab_size=ROWS)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    head = weights["lm_head.weight"]
    loud = 1000 * mx.ones((ROWS - tiny.VOCAB, head.shape[1]))
    signs = mx.where(mx.arange(ROWS - tiny.VOCAB) % 2 == 0, 1.0, -1.0)
    weights["lm_head.weight"] = mx.concatenate([head[: tiny.VOCAB], loud * signs[:, None]])
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return store.resolve(str(folder))


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_k": 5},
        {"temperature": 1.0, "seed": 3, "top_p": 0.9},
        {"temperature": 1.0, "seed": 4, "min_p": 0.1, "repetition_penalty": 1.2},
    ],
)
def test_padding_rows_of_the_head_are_never_sampled(
    padded_model: ModelFiles, knobs: dict[str, Any]
) -> None:
    assert (padded_model.vocab_size, padded_model.sampleable_vocab_size) == (ROWS, tiny.VOCAB)
    loop = load(padded_model, Settings(), lambda percent, memory: None)
    endless = job(
        "a", b"hello", max_tokens=64, stop_token_ids=frozenset[int](), top_logprobs=20, **knobs
    )
    found = run_one(loop, endless)
    assert len(found.ids) == 64
    assert max(found.ids) < tiny.VOCAB
    # nor are they among the top logprobs
    assert all(id < tiny.VOCAB for token in found.tokens for id, _ in token.top_logprobs)


def test_padding_rows_are_sampled_if_the_tokenizer_size_is_unknown(
    padded_model: ModelFiles,
) -> None:
    """The planted rows do score highest: otherwise the test above would prove nothing."""
    unknown = replace(padded_model, tokenizer_vocab_size=None)
    loop = load(unknown, Settings(), lambda percent, memory: None)
    found = run_one(loop, job("a", b"hello"))
    assert min(found.ids) >= tiny.VOCAB


def test_a_grammar_works_if_model_and_tokenizer_differ_in_size(
    padded_model: ModelFiles, tiny_model: Path
) -> None:
    files = store.resolve(str(tiny_model))
    fewer = replace(files, config={**files.config, "vocab_size": tiny.END})
    for each in (padded_model, fewer):
        grammars = GrammarCompiler(
            each.tokenizer_path, vocab=each.tokenizer_vocab_size or each.vocab_size
        )
        matcher = grammars.compile(ANYTHING, frozenset({tiny.END}))
        assert 8 * len(matcher.bitmask) >= each.sampleable_vocab_size
