"""Ollama's embedding endpoints: /api/embed and the older /api/embeddings.

Knows: their fields and bodies. Must not know: how embeddings are computed. Both endpoints return
vectors of unit length.
"""

import time
from array import array
from dataclasses import replace
from functools import partial

import orjson
from starlette.types import Scope

from app.api.fields import Fields, as_array, invalid_request
from app.api.ollama.options import limit_keep_alive
from app.api.openai.request import read_keep_alive
from app.core.models import ModelDetails
from app.core.ports import Generate, ResolvedModel
from app.core.requests import Embeddings, EmbedInput, EmbedRequest
from app.core.sampling_params import INT32_MAX
from app.core.thread_pools import ThreadPools
from app.http.auth import get_caller, is_admin
from app.http.responses import JsonObject

MAX_INPUTS = 2048


def parse_embed(body: object, details: ModelDetails, *, admin: bool) -> EmbedRequest:
    """Parses the body of POST /api/embed. Raises AppError(INVALID)."""
    fields = Fields.from_value(body)
    request = EmbedRequest(
        model=details.name,
        inputs=_read_inputs(fields.value("input")),
        truncate=fields.boolean("truncate") is not False,
        dimensions=fields.integer("dimensions", 0, INT32_MAX) or None,
        keep_alive=_read_common(fields, details, admin=admin),
    )
    fields.check_unknown()
    return request


def parse_embeddings(body: object, details: ModelDetails, *, admin: bool) -> EmbedRequest:
    """Parses the body of POST /api/embeddings. Raises AppError(INVALID)."""
    fields = Fields.from_value(body)
    prompt = fields.string("prompt") or ""
    request = EmbedRequest(
        model=details.name,
        inputs=(EmbedInput(content=prompt, param="prompt"),) if prompt else (),
        truncate=True,
        keep_alive=_read_common(fields, details, admin=admin),
    )
    fields.check_unknown()
    return request


def _read_common(fields: Fields, details: ModelDetails, *, admin: bool) -> float | None:
    """Reads the fields of both endpoints. Returns the keep-alive."""
    fields.string("model")  # was resolved earlier
    fields.nested("options")  # no option affects embeddings
    return limit_keep_alive(read_keep_alive(fields), details, admin=admin)


def _read_inputs(value: object) -> tuple[EmbedInput, ...]:
    """Reads a text or a list of texts. Returns () for an empty text."""
    if value is None or value == "":
        return ()
    items = [value] if isinstance(value, str) else as_array(value)
    if items is None or not all(isinstance(item, str) for item in items):
        raise invalid_request(
            "input", "invalid input type: input must be a text or a list of texts"
        )
    if len(items) > MAX_INPUTS:
        raise invalid_request("input", f"input must contain at most {MAX_INPUTS} texts")
    for place, item in enumerate(items):
        if not item:
            raise invalid_request(f"input.{place}", f"input.{place} must not be empty")
    return tuple(
        EmbedInput(content=str(item), param=f"input.{place}") for place, item in enumerate(items)
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
