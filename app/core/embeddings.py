"""Vectors of texts: what is asked for, what crosses the rooms, what comes back.

Knows: words, ids, bytes. Must not know: HTTP, tensors, tokenizers. A vector is its numbers as
float32, little-endian, behind each other: so it crosses any wall, and base64 is one step away.
"""

from dataclasses import dataclass
from typing import Literal

# mean: of the hidden states of all positions · last: the hidden state of the last one
PoolingType = Literal["mean", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedInput:
    """A text or its ids, not empty. param: where it stood in the request, dotted."""

    content: str | tuple[int, ...]
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """Vectors that a client wants, one to each input. pooling: None leaves it to the model.
    dimensions: only so many of the first numbers; None for all. keep_alive, caller,
    admin: as in `GenerateRequest`."""

    model: str
    inputs: tuple[EmbedInput, ...]
    pooling: PoolingType | None = None
    dimensions: int | None = None
    keep_alive: float | None = None
    caller: str = ""
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """vectors: in the order of the inputs, each of Euclidean length one. prompt_tokens: of all
    inputs."""

    vectors: tuple[bytes, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """inputs: ids, at least one each, none longer than the context. dimensions: at most the width
    of the model's hidden states."""

    id: str
    inputs: tuple[tuple[int, ...], ...]
    pooling: PoolingType
    dimensions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """The job is over. vectors: as in `Embeddings`. error: a sentence, where there are none."""

    job_id: str
    vectors: tuple[bytes, ...] = ()
    error: str | None = None
