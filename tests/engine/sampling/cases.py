"""Requests of every kind, for the sampler's tests."""

from typing import Any, cast

import mlx.core as mx
import numpy as np

from app.core.sampling_params import SamplingParams
from app.engine.sampling.sampler import SamplerBatch, SamplerOutput, SamplerState

VOCAB = 12


def make_state(prompt: Any = (0,), seed: int = 0, vocab: int = VOCAB, **knobs: Any) -> SamplerState:
    """knobs: fields of SamplingParams, and options of min_tokens."""
    names = ("stop_token_ids", "min_tokens", "num_drawn")
    min_tokens_options = {name: knobs.pop(name) for name in names if name in knobs}
    return SamplerState(
        SamplingParams(**knobs), seed=seed, prompt=prompt, vocab=vocab, **min_tokens_options
    )


def to_list(array: mx.array) -> list[int]:
    return cast(list[int], array.tolist())


def pack_bits(allowed: Any) -> mx.array:
    """A bitmask of bools [B, n], with more words than needed, all of whose other bits are set."""
    bits = np.asarray(allowed, dtype=bool)
    bits = np.pad(bits, [(0, 0), (0, 64 - bits.shape[1] % 32)], constant_values=True)
    return mx.array(np.packbits(bits, axis=1, bitorder="little").view(np.uint32))


def sample_once(logits: Any, state: SamplerState, **options: Any) -> SamplerOutput:
    """Sample one token of one row."""
    rows = SamplerBatch([state])
    sampled = rows.sample(mx.array([logits]), **options)
    rows.release()
    return sampled


def softmax(logits: Any) -> Any:
    exp = np.exp(np.array(logits, dtype=np.float64) - np.max(logits))
    return exp / exp.sum()


LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -9.0]
P = softmax(LOGITS)

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "temperature": {"temperature": 0.6},
    "seed": {"seed": 99},
    "top_k": {"top_k": 7},
    "large top_k": {"top_k": 300},
    "top_p": {"top_p": 0.8},
    "small top_p": {"top_p": 0.15, "temperature": 2.0},
    "min_p": {"min_p": 0.1},
    "all filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.5, "temperature": 0.0},
    "frequency": {"frequency_penalty": 0.7, "top_k": 20},
    "window": {"frequency_penalty": 2.0, "repeat_last_n": 3, "temperature": 0.0},
    "wide window": {"repetition_penalty": 1.4, "repeat_last_n": 8},
    "bias": {"logit_bias": ((7, 9.0), (8, -100.0))},
    "no end yet": {"stop_token_ids": frozenset({0, 3, 9999}), "min_tokens": 2},
    "no end for long": {"stop_token_ids": frozenset({1}), "min_tokens": 50, "top_p": 0.8},
    "allowed": {"allowed_token_ids": (2, 5, 7, 10, 400)},
    "allowed and no end yet": {
        "allowed_token_ids": (0, 5, 10),
        "stop_token_ids": frozenset({0}),
        "min_tokens": 3,
        "top_p": 0.9,
    },
    "a bad token": {"bad_words": ((0,), (3,)), "temperature": 0.0},
    "bad words": {"bad_words": ((0, 1), (1, 0), (2,), (0, 0, 0), (400, 1))},
    "long bad words": {"bad_words": ((0, 0), (1, 1, 1, 1, 1)), "top_k": 2},
    "bias and penalty": {"logit_bias": ((9, 9.0),), "presence_penalty": 9.0, "top_p": 0.9},
}


RowOutput = tuple[int, float, list[int], list[float]]


def row_output(sampled: SamplerOutput, place: int) -> RowOutput:
    assert sampled.logprobs is not None
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    return (
        cast(int, sampled.tokens[place].item()),
        cast(float, sampled.logprobs[place].item()),
        cast(list[int], sampled.top_ids[place].tolist()),
        cast(list[float], sampled.top_logprobs[place].tolist()),
    )
