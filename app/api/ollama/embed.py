"""Ollama's embedding endpoints: /api/embed and the older /api/embeddings.

Knows: their fields and bodies. Must not know: how embeddings are computed. Both endpoints return
vectors of unit length.
"""

import time
from collections.abc import Sequence

from app.api.embeddings import encode_vector
from app.api.fields import invalid_request
from app.api.ollama.options import limit_keep_alive
from app.api.openai.request import get_keep_alive
from app.api.openai.sampling import to_tuple
from app.api.schema.ollama import EMBED, EMBEDDINGS
from app.core.models import ModelDetails
from app.core.requests import Embeddings, EmbedInput, EmbedRequest
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


def render_embeddings(_model: str, embeddings: Embeddings) -> JsonObject:
    """Builds the body of /api/embeddings."""
    vectors = embeddings.vectors
    return {"embedding": encode_vector(vectors[0]) if vectors else []}


def render_embed(started: int, model: str, embeddings: Embeddings) -> JsonObject:
    """Builds the body of /api/embed. started: when the request arrived, in nanoseconds."""
    return {
        "model": model,
        "embeddings": [encode_vector(vector) for vector in embeddings.vectors],
        "total_duration": time.time_ns() - started,
        "load_duration": 0,
        "prompt_eval_count": embeddings.prompt_tokens,
    }
