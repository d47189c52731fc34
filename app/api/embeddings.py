"""OpenAI's embeddings endpoint: POST /v1/embeddings.

Knows: every field that OpenAI documents for the endpoint, the encodings of embeddings. Must not
know: how embeddings are computed, the model's vocabulary, the context length. The serving layer
checks the vocabulary and the context length.

Wire format: OpenAI's API reference, "Create embeddings".
"""

import base64
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import orjson
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.api.fields import Fields, as_array, as_integer, as_token_ids, invalid_request, quote_value
from app.api.generate_endpoint import resolve_requested
from app.api.openai.request import check_model, read_keep_alive
from app.api.schema.unsupported_fields import reject_unsupported_fields
from app.core.ports import Generate, Models, ResolvedModel
from app.core.requests import Embeddings, EmbedInput, EmbedRequest, PoolingType
from app.core.sampling_params import INT32_MAX
from app.core.settings import Settings
from app.http.auth import get_caller, is_admin
from app.http.body import Body, RequestBodies
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


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    return [Route("/v1/embeddings", EmbedEndpoint(generate, models, bodies), methods=["POST"])]


class EmbedEndpoint:
    """An ASGI application for the endpoint. It cancels the request when the client disconnects.
    native: whether requests and responses have llama.cpp's own format."""

    def __init__(
        self, generate: Generate, models: Models, bodies: RequestBodies, *, native: bool = False
    ) -> None:
        self._parse = parse_native_embeddings if native else parse_embeddings
        self._render = render_native_embeddings if native else render_embeddings
        self._generate = generate
        self._models = models
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._bodies.receive_json(scope, receive) as body:

            async def exchange(send: Send) -> None:
                model, parsed = await self._parse_body(body)
                request = replace(parsed.request, caller=get_caller(scope), admin=is_admin(scope))
                found = await self._generate.embed(request, model)
                size = sum(map(len, found.vectors))
                reply = await self._bodies.workers.run(
                    partial(self._render, parsed, found), size=size
                )
                await send_json(reply, scope, send)

            await cancel_on_disconnect(receive, send, exchange)

    async def _parse_body(self, body: Body) -> tuple[ResolvedModel, ParsedEmbedRequest]:
        return await body.read(
            partial(resolve_requested, self._models),
            lambda content, model: (model, self._parse(content, model.card.id)),
        )


def parse_embeddings(body: object, model: str) -> ParsedEmbedRequest:
    """Parses the body of POST /v1/embeddings. Raises AppError(INVALID) for an invalid request."""
    fields = Fields.from_value(body)
    check_model(fields)
    inputs = _inputs(fields)
    parsed = ParsedEmbedRequest(
        request=EmbedRequest(
            model=model,
            inputs=inputs,
            pooling=_read_pooling(fields),
            dimensions=fields.integer("dimensions", 1, INT32_MAX),
            keep_alive=read_keep_alive(fields),
        ),
        encoding=_read_encoding(fields),
    )
    fields.string("user")  # documented by OpenAI, accepted but not used
    reject_unsupported_fields(fields, "embeddings")
    fields.check_unknown()
    return parsed


def render_embeddings(parsed: ParsedEmbedRequest, embeddings: Embeddings) -> JsonObject:
    """Builds the response body. Each embedding is encoded to JSON separately, so that the GIL is
    released between embeddings."""
    write = _as_base64 if parsed.encoding == "base64" else _as_floats
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


def parse_native_embeddings(body: object, model: str) -> ParsedEmbedRequest:
    """Parses the body of llama.cpp's POST /embedding, which may name the input `content`. Raises
    AppError(INVALID) for an invalid request."""
    given = cast(JsonObject, body) if isinstance(body, dict) else {}
    content = given.get("content")
    if content is None or given.get("input") is not None:
        return parse_embeddings(cast(object, body), model)
    rest = {name: value for name, value in given.items() if name != "content"}
    return parse_embeddings({**rest, "input": content}, model)


def render_native_embeddings(parsed: ParsedEmbedRequest, embeddings: Embeddings) -> object:
    """Builds llama.cpp's response body. Each input has a list of vectors, and with pooling one."""
    return [
        {"index": index, "embedding": [_as_floats(vector)]}
        for index, vector in enumerate(embeddings.vectors)
    ]


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _as_floats(vector: bytes) -> orjson.Fragment:
    numbers = array("f")
    numbers.frombytes(vector)
    return orjson.Fragment(orjson.dumps(numbers.tolist()))


def _inputs(fields: Fields) -> tuple[EmbedInput, ...]:
    """Reads `input`, which is a text, a list of token IDs, a list of texts, or a list of token ID
    lists. In place of a text, there may be an object, as in llama.cpp, and in a list of token IDs,
    there may be texts."""
    value = fields.required("input")
    if isinstance(value, str | dict):
        return (_input(value, "input"),)
    items = as_array(value)
    if not items:
        wanted = "a string, a list of token IDs, or a list of these"
        raise invalid_request("input", f"input must be {wanted}, not {quote_value(value)}")
    if as_integer(items[0]) is not None:
        return (_input(items, "input"),)
    if len(items) > MAX_INPUTS:
        raise invalid_request(
            "input", f"input must contain at most {MAX_INPUTS} texts, not {len(items)}"
        )
    return tuple(_input(item, f"input.{n}") for n, item in enumerate(items))


def _input(value: Any, at: str) -> EmbedInput:
    if isinstance(value, dict):
        value = _read_text(Fields.from_value(cast(object, value), at))
    if isinstance(value, str) and value:
        return EmbedInput(content=value, param=at)
    if items := as_array(value):
        if any(isinstance(item, str) for item in items):
            return EmbedInput(content=_read_parts(items, at), param=at)
        return EmbedInput(content=as_token_ids(items, at), param=at)
    raise invalid_request(
        at, f"{at} must be a text or a list of token IDs, not {quote_value(value)}"
    )


def _read_parts(items: Sequence[object], at: str) -> tuple[int | str, ...]:
    """Reads token IDs and texts in order, as in llama.cpp."""
    parts: list[int | str] = []
    for index, item in enumerate(items):
        part = item if isinstance(item, str) and item else as_integer(item)
        if part is None or (isinstance(part, int) and not 0 <= part <= INT32_MAX):
            raise invalid_request(
                f"{at}.{index}", f"{at} must contain token IDs and texts, not {quote_value(item)}"
            )
        parts.append(part)
    return tuple(parts)


def _read_text(fields: Fields) -> str:
    """Reads the text of an object: `prompt_string`, or the text parts in `content`."""
    text = fields.string("prompt_string")
    if text is None:
        path, texts = fields.path("content"), list[str]()
        for place, item in enumerate(as_array(fields.required("content")) or [None]):
            part = Fields.from_value(item, f"{path}.{place}")
            part.required_one_of("type", ("text",))
            texts.append(part.required_string("text"))
            part.ignore_unknown()
        text = "".join(texts)
    fields.check_unknown()
    return text


def _read_pooling(fields: Fields) -> PoolingType | None:
    value = fields.string("pooling")
    if value is None or value == "mean" or value == "last" or value == "cls":
        return value
    raise invalid_request(
        "pooling", f'pooling must be "mean", "last" or "cls", not {quote_value(value)}'
    )


def _read_encoding(fields: Fields) -> Encoding:
    value = fields.string("encoding_format")
    if value is None or value == "float":
        return "float"
    if value == "base64":
        return value
    raise invalid_request(
        "encoding_format", f'encoding_format must be "float" or "base64", not {quote_value(value)}'
    )
