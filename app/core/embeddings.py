"""Embedding requests, jobs and results.

Knows: texts, token IDs, bytes. Must not know: HTTP, tensors, tokenizers.

An embedding is stored as bytes: its elements are consecutive little-endian float32 numbers. This
format can be sent between processes and encoded as base64 without conversion.
"""

from dataclasses import dataclass
from typing import Literal

# mean: mean of the hidden states of all positions · last: hidden state of the last position
PoolingType = Literal["mean", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedInput:
    """A text, its tokens, or tokens and texts in order; never empty. param: the dotted path of the
    request field."""

    content: str | tuple[int | str, ...]
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """A request for one embedding per input. pooling: the pooling method; None selects the model's
    default. dimensions: the number of leading elements of each embedding to return; None returns
    all. keep_alive, caller, admin: the same as in `GenerateRequest`."""

    model: str
    inputs: tuple[EmbedInput, ...]
    pooling: PoolingType | None = None
    dimensions: int | None = None
    truncate: bool = False
    keep_alive: float | None = None
    caller: str = ""
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """The embeddings of a request. vectors: one embedding per input, in order, normalized to unit
    length. prompt_tokens: the number of tokens in all inputs."""

    vectors: tuple[bytes, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """A job that computes embeddings. inputs: the tokens of each input, from one token up to the
    context length. dimensions: the number of elements to return, at most the hidden size of the
    model."""

    id: str
    inputs: tuple[tuple[int, ...], ...]
    pooling: PoolingType
    dimensions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """The result of a finished job. vectors: the same as in `Embeddings`. error: one sentence if
    the job failed; `vectors` is then empty."""

    job_id: str
    vectors: tuple[bytes, ...] = ()
    error: str | None = None
