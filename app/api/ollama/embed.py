"""Ollama's embedding endpoints: /api/embed and the older /api/embeddings.

Knows: their fields and bodies. Must not know: how embeddings are computed. Both endpoints return
vectors of unit length.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import orjson
from starlette.types import Scope

from app.api.fields import invalid_request
from app.api.ollama.options import limit_keep_alive
from app.api.openai.request import get_keep_alive
from app.api.openai.sampling import to_tuple
from app.api.schema.ollama import EMBED, EMBEDDINGS
from app.core.models import ModelDetails
from app.core.ports import Generate, ResolvedModel
from app.core.requests import Embeddings, EmbedInput, EmbedRequest
from app.core.thread_pools import ThreadPools
from app.http.auth import get_caller, is_admin
from app.http.responses import JsonObject

MAX_INPUTS = 2048


def parse_embed(data: bytes | bytearray, details: ModelDetails, *, admin: bool) -> EmbedRequest:
    """Parses the body of POST /api/embed. Raises AppError(INVALID)."""
    body = EMBED.decode(data)
    return EmbedRequest(
        model=details.name,
        inputs=_build_inputs(body.input or ()),
        truncate=body.truncate is not False,
        dimensions=body.dimensions or None,
        keep_alive=limit_keep_alive(get_keep_alive(body.keep_alive), details, admin=admin),
    )


def parse_embeddings(
    data: bytes | bytearray, details: ModelDetails, *, admin: bool
) -> EmbedRequest:
    """Parses the body of POST /api/embeddings. Raises AppError(INVALID)."""
    body = EMBEDDINGS.decode(data)
    prompt = body.prompt or ""
    return EmbedRequest(
        model=details.name,
        inputs=(EmbedInput(content=prompt, param="prompt"),) if prompt else (),
        truncate=True,
        keep_alive=limit_keep_alive(get_keep_alive(body.keep_alive), details, admin=admin),
    )


def _build_inputs(texts: str | Sequence[str]) -> tuple[EmbedInput, ...]:
    texts = to_tuple(texts)
    if len(texts) > MAX_INPUTS:
        raise invalid_request("input", f"input must contain at most {MAX_INPUTS} texts")
    for index, text in enumerate(texts):
        if not text:
            raise invalid_request(f"input.{index}", f"input.{index} must not be empty")
    return tuple(
        EmbedInput(content=text, param=f"input.{index}") for index, text in enumerate(texts)
    )


async def embed(
    request: EmbedRequest,
    model: ResolvedModel,
    generate: Generate,
    workers: ThreadPools,
    scope: Scope,
) -> tuple[list[orjson.Fragment], Embeddings]:
    """Computes the embeddings and encodes each one as JSON separately, so that the GIL is not held
    for long. Raises AppError."""
    if not request.inputs:
        return [], Embeddings(vectors=(), prompt_tokens=0)
    request = replace(request, caller=get_caller(scope), admin=is_admin(scope))
    embeddings = await generate.embed(request, model)
    size = sum(map(len, embeddings.vectors))
    encoded = await workers.run(partial(_encode, embeddings), size=size)
    return encoded, embeddings


def _encode(embeddings: Embeddings) -> list[orjson.Fragment]:
    return [_encode_vector(vector) for vector in embeddings.vectors]


def _encode_vector(vector: bytes) -> orjson.Fragment:
    numbers = array("f")
    numbers.frombytes(vector)
    return orjson.Fragment(orjson.dumps(numbers.tolist()))


def render_embed(
    model: str, vectors: list[orjson.Fragment], embeddings: Embeddings, started: int
) -> JsonObject:
    """Builds the body of /api/embed. started: when the request arrived, in nanoseconds."""
    return {
        "model": model,
        "embeddings": vectors,
        "total_duration": time.time_ns() - started,
        "load_duration": 0,
        "prompt_eval_count": embeddings.prompt_tokens,
    }
