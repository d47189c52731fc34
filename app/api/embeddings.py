"""OpenAI's embeddings endpoint: POST /v1/embeddings.

Knows: the forms of an input, the encodings of embeddings. Must not
know: how embeddings are computed, the model's vocabulary, the context length. The serving layer
checks the vocabulary and the context length.

Wire format: OpenAI's API reference, "Create embeddings".
"""

import base64
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import orjson
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.api.fields import (
    as_array,
    as_integer,
    as_mapping,
    as_token_ids,
    invalid_request,
    quote_value,
)
from app.api.generate_endpoint import read_request
from app.api.openai.request import get_keep_alive
from app.api.schema.decode import decode_json, require
from app.api.schema.embeddings import (
    EMBEDDING,
    NATIVE_EMBEDDING,
    EmbeddingBody,
    NativeEmbeddingBody,
)
from app.core.ports import Generate, Models, ResolvedModel
from app.core.requests import Embeddings, EmbedInput, EmbedRequest
from app.core.sampling_params import INT32_MAX
from app.core.settings import Settings
from app.core.thread_pools import ThreadPools
from app.http.auth import get_caller, is_admin
from app.http.body import RequestBodies
from app.http.responses import JsonObject
from app.http.streaming import cancel_on_disconnect, send_json

# the limit of OpenAI's API
MAX_INPUTS = 2048

Encoding = Literal["float", "base64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedEmbedRequest:
    """A valid request, and the encoding of the embeddings in the response."""

    request: EmbedRequest
    encoding: Encoding


class HasEmbedRequest(Protocol):
    """A parsed body."""

    @property
    def request(self) -> EmbedRequest: ...


Parsed = TypeVar("Parsed", bound=HasEmbedRequest)
Rendered = TypeVar("Rendered")


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    endpoint = EmbedEndpoint(
        generate, models, bodies, parse=parse_embeddings, render=render_embeddings
    )
    return [Route("/v1/embeddings", endpoint, methods=["POST"])]


class EmbedEndpoint(Generic[Parsed]):
    """An ASGI application for one route. It cancels the request when the client disconnects.
    parse: converts a body, with the name of the model. render: builds the response."""

    def __init__(
        self,
        generate: Generate,
        models: Models,
        bodies: RequestBodies,
        *,
        parse: Callable[[bytearray, str], Parsed],
        render: Callable[[Parsed, Embeddings], object],
    ) -> None:
        self._parse, self._render = parse, render
        self._generate = generate
        self._models = models
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._bodies.receive_json(scope, receive) as body:

            async def exchange(send: Send) -> None:
                model, parsed = await read_request(
                    body, self._models, lambda data, card: self._parse(data, card.id)
                )
                render = partial(self._render, parsed)
                workers = self._bodies.workers
                reply = await embed(parsed.request, model, self._generate, workers, scope, render)
                await send_json(reply, scope, send)

            await cancel_on_disconnect(receive, send, exchange)


async def embed(
    request: EmbedRequest,
    model: ResolvedModel,
    generate: Generate,
    workers: ThreadPools,
    scope: Scope,
    render: Callable[[Embeddings], Rendered],
) -> Rendered:
    """Computes embeddings for the caller of a request, and renders them on a thread. Raises
    AppError."""
    request = replace(request, caller=get_caller(scope), admin=is_admin(scope))
    embeddings = await generate.embed(request, model)
    size = sum(map(len, embeddings.vectors))
    return await workers.run(partial(render, embeddings), size=size)


def parse_embeddings(data: bytes | bytearray, model: str) -> ParsedEmbedRequest:
    """Parses the body of POST /v1/embeddings. Raises AppError(INVALID) for an invalid request."""
    return _build_request(EMBEDDING.decode(data), model)


def parse_native_embeddings(data: bytes | bytearray, model: str) -> ParsedEmbedRequest:
    """Like `parse_embeddings`, for llama.cpp's own format."""
    return _build_request(NATIVE_EMBEDDING.decode(data), model)


def _build_request(body: EmbeddingBody, model: str) -> ParsedEmbedRequest:
    value = decode_json(body.input)
    if value is None and isinstance(body, NativeEmbeddingBody):
        value = decode_json(body.content)
    return ParsedEmbedRequest(
        request=EmbedRequest(
            model=model,
            inputs=_build_inputs(require(value, "input")),
            pooling=body.pooling,
            dimensions=body.dimensions,
            keep_alive=get_keep_alive(body.keep_alive, body.ttl),
        ),
        encoding=body.encoding_format or "float",
    )


def render_embeddings(parsed: ParsedEmbedRequest, embeddings: Embeddings) -> JsonObject:
    """Builds the response body. Each embedding is encoded to JSON separately, so that the GIL is
    released between embeddings."""
    write = _as_base64 if parsed.encoding == "base64" else encode_vector
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": write(vector)}
            for index, vector in enumerate(embeddings.vectors)
        ],
        "model": parsed.request.model,
        "usage": {
            "prompt_tokens": embeddings.prompt_tokens,
            "total_tokens": embeddings.prompt_tokens,
        },
    }


def render_native_embeddings(parsed: ParsedEmbedRequest, embeddings: Embeddings) -> object:
    """Builds llama.cpp's response body. Each input has a list of vectors, or one vector with
    pooling."""
    return [
        {"index": index, "embedding": [encode_vector(vector)]}
        for index, vector in enumerate(embeddings.vectors)
    ]


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def encode_vector(vector: bytes) -> orjson.Fragment:
    """Returns the JSON array of an embedding in float32."""
    numbers = array("f")
    numbers.frombytes(vector)
    return orjson.Fragment(orjson.dumps(numbers.tolist()))


def _build_inputs(value: Any) -> tuple[EmbedInput, ...]:
    """Converts `input`, which is a string, a list of token IDs, a list of strings, or a list of
    token ID lists. As in llama.cpp, a string may be replaced by an object, and a list of token IDs
    may contain strings."""
    if isinstance(value, str | dict):
        return (_build_input(value, "input"),)
    items = as_array(value)
    if not items:
        wanted = "a string, a list of token IDs, or a list of these"
        raise invalid_request("input", f"input must be {wanted}, not {quote_value(value)}")
    if as_integer(items[0]) is not None:
        return (_build_input(items, "input"),)
    if len(items) > MAX_INPUTS:
        raise invalid_request(
            "input", f"input must contain at most {MAX_INPUTS} texts, not {len(items)}"
        )
    return tuple(_build_input(item, f"input.{n}") for n, item in enumerate(items))


def _build_input(value: Any, at: str) -> EmbedInput:
    if isinstance(value, dict):
        value = get_text_of_object(cast("dict[str, Any]", value), at)
    if isinstance(value, str) and value:
        return EmbedInput(content=value, param=at)
    if items := as_array(value):
        if any(isinstance(item, str) for item in items):
            return EmbedInput(content=_build_parts(items, at), param=at)
        return EmbedInput(content=as_token_ids(items, at), param=at)
    raise invalid_request(
        at, f"{at} must be a string or a list of token IDs, not {quote_value(value)}"
    )


def _build_parts(items: Sequence[object], at: str) -> tuple[int | str, ...]:
    """Converts token IDs and strings in order, as in llama.cpp."""
    parts: list[int | str] = []
    for index, item in enumerate(items):
        part = item if isinstance(item, str) and item else as_integer(item)
        if part is None or (isinstance(part, int) and not 0 <= part <= INT32_MAX):
            raise invalid_request(
                f"{at}.{index}", f"{at} must contain token IDs and strings, not {quote_value(item)}"
            )
        parts.append(part)
    return tuple(parts)


def get_text_of_object(value: Mapping[str, Any], at: str) -> str:
    """Returns the text of an object as in llama.cpp: `prompt_string`, or the text parts in
    `content`. at: the path of the object. Raises AppError(INVALID)."""
    text = value.get("prompt_string")
    if text is None and value.get("content") is not None:
        parts = as_array(value["content"]) or [None]
        return "".join(_get_text(part, f"{at}.content.{n}") for n, part in enumerate(parts))
    path = f"{at}.content" if text is None else f"{at}.prompt_string"
    return _check_text(require(text, path), path)


def _get_text(part: Any, path: str) -> str:
    fields = as_mapping(part, path)
    if fields.get("type") != "text":
        kind = quote_value(fields.get("type"))
        raise invalid_request(f"{path}.type", f"{path}.type must be 'text', not {kind}")
    return _check_text(require(fields.get("text"), f"{path}.text"), f"{path}.text")


def _check_text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise invalid_request(path, f"{path} must be a string, not {quote_value(value)}")
    return value
