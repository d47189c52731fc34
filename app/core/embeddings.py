"""Embedding requests, jobs and results.

Knows: texts, ids, bytes. Must not know: HTTP, tensors, tokenizers.

A vector is stored as bytes: its numbers as little-endian float32, one after the other. This form
can be sent between processes and encoded as base64 without conversion.
"""

from dataclasses import dataclass
from typing import Literal

# mean: mean of the hidden states of all positions · last: hidden state of the last position
PoolingType = Literal["mean", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedInput:
    """A text or its token ids; never empty. param: dotted path of the request field."""

    content: str | tuple[int, ...]
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """A request for one vector per input. pooling: None is the model's default. dimensions: number
    of leading vector elements to return; None returns all. keep_alive, caller, admin: as in
    `GenerateRequest`."""

    model: str
    inputs: tuple[EmbedInput, ...]
    pooling: PoolingType | None = None
    dimensions: int | None = None
    keep_alive: float | None = None
    caller: str = ""
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """vectors: one per input, in order, each of Euclidean length 1. prompt_tokens: tokens of all
    inputs."""

    vectors: tuple[bytes, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """inputs: token ids of each input, at least one, at most the context length. dimensions: at
    most the width of the model's hidden states."""

    id: str
    inputs: tuple[tuple[int, ...], ...]
    pooling: PoolingType
    dimensions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """The result of a finished job. vectors: as in `Embeddings`. error: one sentence if the job
    failed; then `vectors` is empty."""

    job_id: str
    vectors: tuple[bytes, ...] = ()
    error: str | None = None
